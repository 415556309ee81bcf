"""``python -m visualtokens.studies.worker FOLDER PARENT``: the process of one run of a study."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import visualtokens
from visualtokens.bench import count_macs, count_parameters, machine
from visualtokens.checkpoint import load
from visualtokens.files import read_json, remove_folder
from visualtokens.processes import end_with_parent
from visualtokens.progress import Counted
from visualtokens.reduce import macs
from visualtokens.reduce.trainable import NAME
from visualtokens.studies.jobs import JOB, RECORD, RUN, write_record
from visualtokens.studies.study import BF16, INSERT, SEARCH
from visualtokens.tasks.task import Checkpoint, Loading, open_training
from visualtokens.train import TrainConfig, TrainResult, train
from visualtokens.train.snapshot import SNAPSHOTS
from visualtokens.tune.search import Interrupted, search

TIME = "core_minutes.txt"
TRAIN_IMAGES = 4_000  # evaluated for the training accuracy


def run_job(folder: Path) -> int:
    """Train, or resume, the run in the folder and record its result; return the exit code."""
    job = read_json(folder / JOB)
    options, data = job["options"], job["data"]
    if options.get(BF16):
        use_explicit_attention()
    if INSERT in options:
        return _record(folder, job, _insert(dict(options), data, job["seed"]))
    try:
        found, out, extra = _train(folder, dict(options), data, job["seed"])
    except Interrupted as stopped:
        _add_time(folder)
        return 128 + stopped.signal
    if found.signal is not None:
        _add_time(folder)
        return 128 + found.signal
    checkpoint = load(out)
    result = {
        "metrics": found.metrics,
        "score": found.score,
        "train": _train_metrics(checkpoint, data, options),
        **_size(checkpoint),
        **extra,
    }
    return _record(folder, job, result)


def _record(folder: Path, job: dict[str, Any], result: dict[str, Any]) -> int:
    minutes = round(_add_time(folder), 2)
    record = {"job": job, **result, "core_minutes": minutes, "machine": machine()}
    write_record(folder / RECORD, record)
    for snapshots in (folder / RUN / SNAPSHOTS, folder / RUN / "soft" / SNAPSHOTS):
        if snapshots.exists():
            remove_folder(snapshots)  # nothing is left to resume
    return 0


def _train(
    folder: Path, options: dict[str, Any], data: str, seed: int
) -> tuple[TrainResult, Path, dict[str, Any]]:
    """Return the result, the folder of the trained model, and what else to record."""
    out = folder / RUN
    if SEARCH in options:
        price, start = options.pop(SEARCH), options.pop("init")
        given = options | {"seed": seed, "keep": 1}
        found = search(start, data=data, out=out, price=price, options=given)
        return found.soft, out / "start", {"keep": list(found.keep), "mass": list(found.mass)}
    config = TrainConfig(**options, data=data, seed=seed, out=str(out), resume="auto", keep=1)
    extra = {"keep": options["model_args"]["keep"]} if options["model"] == NAME else {}
    return train(config), out, extra


def _insert(options: dict[str, Any], data: str, seed: int) -> dict[str, Any]:
    """Return the result of a reduced model with the weights of its stage, without any training."""
    del options[INSERT]
    torch.manual_seed(seed)
    training = open_training(TrainConfig(**options, data=data, seed=seed, out="unused"))
    model = training.model.eval()
    metrics = training.evaluate(model, training.val_loader(Loading(batch=64)), progress=False).metrics
    size = {"parameters": count_parameters(model), "macs": macs(model).total}
    keep = options["model_args"]["keep"]
    return {"metrics": metrics, "score": training.task.score, "train": None, **size, "keep": keep}


def _train_metrics(checkpoint: Checkpoint, data: str, options: dict[str, Any]) -> dict[str, float] | None:
    """Return the metrics on the first training images, not augmented; None if it is no classifier."""
    if checkpoint.task.name != "classify":
        return None
    images = checkpoint.task.open_data(checkpoint, data, "train", **options.get("data_args", {}))
    batch = 64
    loader = checkpoint.task.loader(images, checkpoint.preprocess, Loading(batch=batch))
    batches = min(len(loader), TRAIN_IMAGES // batch)
    some = Counted(itertools.islice(iter(loader), batches), batches)
    return checkpoint.task.evaluate(checkpoint, some, progress=False).metrics


def _size(checkpoint: Checkpoint) -> dict[str, int | None]:
    model = checkpoint.model
    parameters = count_parameters(model)
    if checkpoint.config["architecture"] == NAME:
        return {"parameters": parameters, "macs": macs(model).total}
    if checkpoint.task.name == "detect":  # its cost depends on the image
        return {"parameters": parameters, "macs": None}
    return {"parameters": parameters, "macs": count_macs(model, checkpoint.preprocess.size)}


def _add_time(folder: Path) -> float:
    """Return the CPU minutes of all processes of this run that ended by themselves or by SIGTERM."""
    file = folder / TIME
    total = (float(file.read_text()) if file.exists() else 0.0) + time.process_time() / 60
    file.write_text(str(total))
    return total


def use_explicit_attention() -> None:
    """Compute attention in this process as two matrix products in bfloat16 and a softmax.

    The fused kernel of torch is slow on a CPU in bfloat16 with as few patches as the models of studies have:
    with 65, a training step of a small DeiT takes 1.7 times as long.
    """
    torch.backends.cuda.enable_flash_sdp(False)  # of the CPU, too
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)


def main() -> int:
    """Run the job in the folder that the command line names."""
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    # Ctrl-C reaches all processes of a terminal; the runner forwards it as SIGTERM.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    end_with_parent(parent)
    if os.getppid() != parent:
        return 1
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    visualtokens.register_models()
    return run_job(folder)


if __name__ == "__main__":
    sys.exit(main())
