"""Kill a training run at random moments and check that it always resumes.

    python benchmarks/kill_train.py --kills 100 --save results/kill_train.json

Each process saves a snapshot every few steps and is killed by SIGKILL after a random time: while it starts,
resumes, trains, saves or evaluates. After each kill, the newest snapshot and the model must load, and the
next process must resume from there. A finished run must have the weights of an uninterrupted one, bit for
bit; then a new run begins.
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

# Each training process is forked from a clean one that has imported everything.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["visualtokens.train", "torchmetrics.classification"])
MAX_SECONDS = 2.5  # until a kill


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


def run_training(settings: TrainConfig) -> None:
    torch.set_num_threads(1)
    train(settings)


def check(out: Path) -> int | None:
    """Load the newest snapshot and the model; return the snapshot's step, None without a snapshot."""
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


def run_until_killed(settings: TrainConfig, seconds: float) -> bool:
    """Run for at most the given seconds; return whether the process was killed before it finished."""
    process = CONTEXT.Process(target=run_training, args=(settings,))
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
        uninterrupted = Path(folder) / "uninterrupted"
        run_until_killed(config(data, uninterrupted), 600)
        out = Path(folder) / "run0"
        while found["kills"] < options.kills:
            if run_until_killed(config(data, out), moments.uniform(0, MAX_SECONDS)):
                found["kills"] += 1
                found["in_the_middle_of_saving"] += bool(list(out.rglob(".*.tmp")))
                step = check(out)
                found["before_the_first_snapshot" if step is None else "loaded"] += 1
                print(f"kill {found['kills']}: last snapshot at step {step}", flush=True)
            else:
                found["runs_finished"] += 1
                found["runs_equal_to_an_undisturbed_one"] += same_weights(out, uninterrupted)
                out = Path(folder) / f"run{found['runs_finished']}"
    print(json.dumps(found, indent=1))
    if options.save:
        command = f"python benchmarks/kill_train.py --kills {options.kills} --seed {options.seed}"
        seconds = round(time.perf_counter() - began)
        document = dict(command=command, machine=machine(), seconds=seconds, **found)
        options.save.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
