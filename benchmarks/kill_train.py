"""Kill a training run at random moments: every time, what it left must load and go on.

    python benchmarks/kill_train.py --kills 100 --save results/kill_train.json

Each life of the run is a process of its own that saves every few steps and is ended by SIGKILL after a random
time: while it starts, resumes, trains, saves or judges. After each death the newest snapshot and the model
must load; the next life must resume from there. A run that reaches its end must have the weights of one that
was never disturbed, bit for bit; then the next run begins.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from visualtokens.bench import machine
from visualtokens.data import open_dataset
from visualtokens.train import TrainConfig, load_checkpoint, train
from visualtokens.train.snapshot import list_snapshots, load_snapshot

# A clean process that has imported everything and from which each life is forked.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["visualtokens.train", "torchmetrics.classification"])
LONGEST_LIFE = 2.5  # seconds


def make_data(path: Path) -> str:
    arrays = {}
    for split, count in (("train", 192), ("val", 64)):
        digits = open_dataset("digits", split)  # type: ignore[arg-type]
        arrays[f"x_{split}"] = np.stack([np.asarray(digits[i][0]) for i in range(count)])
        arrays[f"y_{split}"] = np.array([digits[i][1] for i in range(count)])
    np.savez(path, **arrays)
    return f"npz:{path}"


def config(data: str, out: Path) -> TrainConfig:
    return TrainConfig(
        model="paca_vit_nano",
        data=data,
        out=str(out),
        epochs=3,
        batch=16,
        ema=0.9,
        mixup=0.8,
        augment="digits",
        save_every=2,
        log_every=1,
        device="cpu",
        resume="auto",
    )


def live(settings: TrainConfig) -> None:
    torch.set_num_threads(1)
    train(settings)


def check(out: Path) -> int | None:
    """The step of the newest snapshot, after it and the model were loaded; None if there is none yet."""
    snapshots = list_snapshots(out)
    if not snapshots:
        return None
    state, _ = load_snapshot(snapshots[-1])
    if (out / "model.safetensors").exists():
        load_checkpoint(out)
    return state.step


def same_weights(a: Path, b: Path) -> bool:
    ours, theirs = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def one_life(settings: TrainConfig, seconds: float) -> bool:
    """Whether the run was killed; False if it had ended before."""
    process = CONTEXT.Process(target=live, args=(settings,))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        raise SystemExit(f"the run failed with exit code {process.exitcode}; see above")
    return process.exitcode != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    moments = random.Random(options.seed)
    began = time.perf_counter()
    found: dict[str, Any] = dict(kills=0, in_the_middle_of_saving=0, before_the_first_snapshot=0)
    found |= dict(loaded=0, runs_finished=0, runs_equal_to_an_undisturbed_one=0)
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder) / "data.npz")
        undisturbed = Path(folder) / "undisturbed"
        one_life(config(data, undisturbed), 600)
        out = Path(folder) / "run0"
        while found["kills"] < options.kills:
            if one_life(config(data, out), moments.uniform(0, LONGEST_LIFE)):
                found["kills"] += 1
                found["in_the_middle_of_saving"] += bool(list(out.rglob(".*.tmp")))
                step = check(out)
                found["before_the_first_snapshot" if step is None else "loaded"] += 1
                print(f"kill {found['kills']}: last snapshot at step {step}", flush=True)
            else:
                found["runs_finished"] += 1
                found["runs_equal_to_an_undisturbed_one"] += same_weights(out, undisturbed)
                out = Path(folder) / f"run{found['runs_finished']}"
    print(json.dumps(found, indent=1))
    if options.save:
        command = f"python benchmarks/kill_train.py --kills {options.kills} --seed {options.seed}"
        seconds = round(time.perf_counter() - began)
        document = dict(command=command, machine=machine(), seconds=seconds, **found)
        options.save.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
