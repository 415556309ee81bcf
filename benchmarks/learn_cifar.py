"""Accuracy of two small models on CIFAR-10 after 20 minutes on two cores, with the small recipes.

    python benchmarks/learn_cifar.py --cifar ../shared/data/cifar10_20k.npz --save results/learn_cifar.json
    python benchmarks/learn_cifar.py --cifar ../shared/data/cifar10_20k.npz --check results/learn_cifar.json

The first command trains and saves the results; after an interruption, run it again to resume. Times are CPU
times, which do not depend on the load of the machine. The second command trains again and fails unless every
accuracy is within one point of the saved one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from budget import core_minutes
from visualtokens.bench import machine
from visualtokens.cli.parse import parse
from visualtokens.cli.train import VERB
from visualtokens.train import TrainConfig, train

RECIPES = {name: f"small_cifar10_{name}" for name in ("paca", "vt")}
TOLERANCE = 0.01


def config_of(recipe: str, *, cifar: str, out: Path, epochs: int | None) -> TrainConfig:
    arguments = ["--config", recipe, "--data", f"npz:{cifar}", "--out", str(out)]
    arguments += ["--resume", "auto", "--save_every", "100"]
    if epochs is not None:
        arguments += ["--epochs", str(epochs)]
    config, _ = parse("train", "", VERB, arguments)
    return config  # type: ignore[no-any-return]


def learn(config: TrainConfig) -> dict[str, Any]:
    began = time.process_time()
    result = train(config)
    if result.signal is not None:
        raise SystemExit(f"stopped by signal {result.signal}; run the same command to resume")
    return {
        "model": config.model,
        "accuracy": result.accuracy,
        "best": result.best,
        "epochs": config.epochs,
        "core_minutes": core_minutes(Path(config.out), began=began),
        "images_per_second": round(result.images_per_second),
        "waiting_for_images": round(result.data_wait, 4),
        "accuracy_by_epoch": [row["val_accuracy"] for row in result.history],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cifar", required=True, help="npz file of CIFAR-10")
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--epochs", type=int, help="overrides the recipe's, for a trial")
    parser.add_argument("--out", type=Path, default=Path("runs/learn_cifar"))
    parser.add_argument("--save", type=Path)
    parser.add_argument("--check", type=Path, help="results to compare with")
    options = parser.parse_args()
    expected = json.loads(options.check.read_text())["runs"] if options.check else {}
    saved: dict[str, Any] = {"runs": {}}
    if options.save and options.save.exists():
        saved = json.loads(options.save.read_text())
    failed = False
    for name in options.recipes:
        out = options.out / ("check" if options.check else "first") / name
        config = config_of(RECIPES[name], cifar=options.cifar, out=out, epochs=options.epochs)
        if options.check or name not in saved["runs"]:
            saved["runs"][name] = learn(config)
        run = saved["runs"][name]
        print(
            f"{RECIPES[name]}: {run['accuracy']:.2%} after {run['core_minutes']} core-minutes",
            flush=True,
        )
        if name in expected:
            difference = run["accuracy"] - expected[name]["accuracy"]
            print(f"  {difference:+.2%} from the saved accuracy")
            failed |= abs(difference) > TOLERANCE
        if options.save:
            command = f"python benchmarks/learn_cifar.py --cifar {Path(options.cifar).name}"
            saved |= dict(command=command, machine=machine())
            options.save.write_text(json.dumps(saved, indent=1) + "\n")
    if failed:
        raise SystemExit("an accuracy differs by more than one point")


if __name__ == "__main__":
    main()
