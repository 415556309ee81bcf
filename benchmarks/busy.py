"""Speed on a busy machine: training, prediction and a reduced model beside other processes that compute.

    python benchmarks/busy.py --save results/busy.json

OpenMP's threads spin while they wait for each other. On a busy machine a spinning thread holds a processor
that the thread it waits for could use. Each setting of OpenMP runs in a process of its own; the settings take
turns, without and with 2, 4 and 8 competing processes. With n competitors, a process of t threads on as many
cores has a fair share of t / (t + n) of them. The targets of the setting of ``vtok``: on a busy machine at
least half the fair share, on a quiet one at least 0.97 times the speed of the libraries' default.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch

import visualtokens
from own_process import OwnProcess
from visualtokens.bench import machine
from visualtokens.bench.timing import median_interval
from visualtokens.train import TrainConfig
from visualtokens.train.distributed import Team
from visualtokens.train.run import Run
from vtok import SPIN_COUNT

# "default" comes first: it is the reference of the ratios.
SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "vtok": {"GOMP_SPINCOUNT": str(SPIN_COUNT)},
    **{f"spin {count:,}": {"GOMP_SPINCOUNT": str(count)} for count in (1000, 3000, 10_000, 30_000)},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "1 thread": {"OMP_NUM_THREADS": "1"},
}
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")


def training() -> Callable[[], object]:
    """Steps of the demo's model on 32 digits."""
    folder = tempfile.mkdtemp()  # nothing is written to it
    config = TrainConfig(model="paca_vit_nano", data="digits", out=f"{folder}/run", batch=32, device="cpu")
    run = Run(config, device=torch.device("cpu"), team=Team(), progress=False)
    batch = next(iter(run.train_loader))
    run.learner.model.train()

    def step() -> None:
        with torch.inference_mode(False):
            run.learner.learn(batch)

    return step


def prediction() -> Callable[[], object]:
    """PaCa-ViT-Tiny on one image of 224²."""
    model, image = timm.create_model("paca_vit_tiny").eval(), torch.randn(1, 3, 224, 224)
    return lambda: model(image)


def reduction() -> Callable[[], object]:
    """DeiT-S with weighted k-medoids on 8 images of 224²."""
    model = visualtokens.reduce(
        timm.create_model("deit_small_patch16_224"), "weighted_kmedoids", keep="deit_small/3"
    ).eval()
    images = torch.randn(8, 3, 224, 224)
    return lambda: model(images)


WORK = {"train": training, "predict": prediction, "reduce": reduction}


def start(work: str, setting: str) -> OwnProcess:
    """The work in a process with the environment variables of the setting."""
    before = {name: os.environ.pop(name, None) for name in VARIABLES}
    os.environ.update(SETTINGS[setting])
    try:
        return OwnProcess(functools.partial(WORK[work]))
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def competitors(count: int) -> Iterator[None]:
    """Processes that each compute without a pause."""
    spin = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    running = [subprocess.Popen(spin, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in running:
            process.stdout.readline()  # type: ignore[union-attr]  # it has started
        yield
    finally:
        for process in running:
            process.kill()
            process.communicate()


def measure(work: str, settings: list[str], loads: list[int], rounds: int, seconds: float) -> dict[str, Any]:
    """Calls per second of each setting at each load, and the ratios that the targets are about."""
    processes = {setting: start(work, setting) for setting in settings}
    rates: dict[int, dict[str, list[float]]] = {load: {name: [] for name in settings} for load in loads}
    for turn in range(rounds):
        order = settings[turn % len(settings) :] + settings[: turn % len(settings)]
        for load in loads:
            with competitors(load):
                for name in order:
                    rates[load][name].append(processes[name].rate(seconds))
    cores = torch.get_num_threads()
    result = {}
    for name in settings:
        quiet = statistics.median(rates[0][name])
        threads = 1 if name == "1 thread" else cores
        ratios = [a / b for a, b in zip(rates[0][name], rates[0]["default"], strict=True)]
        interval = median_interval(ratios)
        result[name] = {
            "quiet_calls_per_second": round(quiet, 2),
            "quiet_to_default": round(statistics.median(ratios), 3),
            "quiet_to_default_interval": interval and [round(interval.low, 3), round(interval.high, 3)],
            "busy": {
                str(load): {
                    "calls_per_second": round(statistics.median(rates[load][name]), 2),
                    "of_fair_share": round(
                        statistics.median(rates[load][name]) / (quiet * fair_share(threads, load, cores)), 3
                    ),
                }
                for load in loads
                if load
            },
        }
    return result


def fair_share(threads: int, competitors: int, cores: int) -> float:
    """The share of its quiet speed that a process keeps if all threads get the same time."""
    return min(1.0, cores / (threads + competitors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--loads", type=int, nargs="+", default=[0, 2, 4, 8], help="competing processes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--save", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    settings = ["default", *(name for name in options.settings if name != "default")]
    result: dict[str, Any] = {
        "command": "python benchmarks/busy.py --save results/busy.json",
        "machine": machine(),
        "settings": {name: SETTINGS[name] for name in settings},
        "work": {},
    }
    for work in options.work:
        result["work"][work] = measure(work, settings, options.loads, options.rounds, options.seconds)
        print(f"\n{work}: {WORK[work].__doc__}")
        print(f"{'setting':14s} {'calls/s':>8s} {'to default':>11s}   of the fair share, by competitors")
        for name, row in result["work"][work].items():
            busy = "  ".join(f"{load}: {level['of_fair_share']:.2f}" for load, level in row["busy"].items())
            print(f"{name:14s} {row['quiet_calls_per_second']:8.1f} {row['quiet_to_default']:11.2f}   {busy}")
        sys.stdout.flush()
        if options.save:
            options.save.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
