"""Accuracy of a quarter-width VT-ResNet-18 after minutes on two cores: digits, and CIFAR-10 per tokenizer.

    python benchmarks/learn_vt.py --cifar ../shared/data/cifar10_20k.npz --save results/learn_vt.json

The runs differ in the tokenizer only: same seed, epochs and images. A run whose results are in the file is
not repeated, so the script can be interrupted and started again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from visualtokens.bench import machine
from visualtokens.train import TrainConfig, train

SMALL = dict(width=0.25, stem="small")  # a 3×3 stem without stride, for 32×32 images
DIGITS_EPOCHS = 20
TOKENIZERS = ("filter", "cluster", "pool")


def learn(data: str, tokenizer: str, epochs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out:
        config = TrainConfig(
            model="vt_resnet18",
            data=data,
            out=out,
            epochs=epochs,
            size=32,
            batch=64,
            lr=2e-3,
            seed=0,
            channels_last=True,
            model_args=SMALL | dict(tokenizer=tokenizer),
            overwrite=True,
        )
        result = train(config)
    if result.signal is not None:
        raise SystemExit(f"stopped by signal {result.signal}; this run is not saved")
    return {
        "accuracy": result.accuracy,
        "epochs": epochs,
        "minutes": round(result.seconds / 60, 2),
        "images_per_second": round(result.images_per_second),
        "accuracy_by_epoch": [row["val_accuracy"] for row in result.history],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cifar", required=True, help="npz file of CIFAR-10")
    parser.add_argument("--epochs", type=int, default=14, help="on CIFAR-10")
    parser.add_argument("--save", type=Path, required=True)
    options = parser.parse_args()
    runs = [("digits", "digits", "filter", DIGITS_EPOCHS)]
    runs += [("cifar10", f"npz:{options.cifar}", tokenizer, options.epochs) for tokenizer in TOKENIZERS]
    saved = json.loads(options.save.read_text()) if options.save.exists() else {"runs": {}}
    saved["command"] = (
        f"python benchmarks/learn_vt.py --cifar {Path(options.cifar).name} --epochs {options.epochs}"
    )
    saved["machine"] = machine()
    for name, data, tokenizer, epochs in runs:
        key = f"vt_resnet18 width 0.25, {name}, {tokenizer}"
        if key not in saved["runs"]:
            saved["runs"][key] = learn(data, tokenizer, epochs)
            options.save.write_text(json.dumps(saved, indent=1) + "\n")
        run = saved["runs"][key]
        print(f"{key:45s} {run['accuracy']:.2%} after {run['epochs']} epochs, {run['minutes']} minutes")


if __name__ == "__main__":
    main()
