"""Several training processes: the result of one process, restarts, and signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.helpers import Make, history, last_state, lines, same, signal_at, step_losses, weights
from tests.train.ranks import run_ranks
from tests.train.test_run import make_folder
from visualtokens.data import Share
from visualtokens.errors import UserError
from visualtokens.processes import SIGNALS, Stop, catch_signals
from visualtokens.train import TrainConfig, train
from visualtokens.train.distributed import Team, join_team, local_device

# Adam turns a gradient that is zero but for rounding into a step of full length; SGD does not.
SGD: dict[str, Any] = dict(
    optimizer="nesterov",
    optimizer_args={"momentum": 0.9},
    lr=0.05,
    weight_decay=1e-4,
    warmup_epochs=0.0,
    epochs=3,
    batch=24,  # 4 steps per epoch
    mixup=0.8,
    cutmix=1.0,
    log_every=1,
)
EVERYTHING: dict[str, Any] = dict(
    epochs=3, batch=16, ema=0.9, mixup=0.8, cutmix=1.0, drop_path=0.3, log_every=1
)


def test_one_process_is_a_team_of_one() -> None:
    with join_team(torch.device("cpu")) as team:
        assert team == Team(0, 1)
        assert team.share == Share(0, 1)
        assert team.exchange([1.5, 2]).tolist() == [[1.5, 2.0]]
        assert team.gather("x") == ["x"]
        team.wait()
    assert local_device(torch.device("cpu")) == torch.device("cpu")


def exchange() -> tuple[Any, ...]:
    with join_team(torch.device("cpu")) as team:
        received = team.exchange([team.rank + 0.1, 7])
        gathered = team.gather({"rank": team.rank})
        team.wait()
        return team, received.tolist(), gathered


def test_exchange_and_gather() -> None:
    answers = run_ranks(exchange)
    for rank, (team, received, gathered) in enumerate(answers):
        assert team == Team(rank, 2)
        assert received == [[0.1, 7.0], [1.1, 7.0]]
        assert gathered == [{"rank": 0}, {"rank": 1}]


def test_two_processes_give_the_weights_of_one(config: Make, tmp_path: Path) -> None:
    """12 steps of a model without BatchNorm, with mixed images and accumulated gradients."""
    one = config(out=str(tmp_path / "one"), **SGD)
    two = config(out=str(tmp_path / "two"), **SGD, accumulate=2)
    alone = train(one)
    main, other = run_ranks(train, two)
    assert last_state(two)[0].step == 12
    for (name, a), b in zip(weights(one).items(), weights(two).values(), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert [loss for _, loss in step_losses(two)] == pytest.approx(
        [loss for _, loss in step_losses(one)], abs=1e-5
    )
    assert main.metrics == pytest.approx(alone.metrics, abs=1e-4)
    assert torch.equal(main.confusion, alone.confusion)
    assert main.metrics == other.metrics, "every process knows the figures of all"
    assert (main.is_main, other.is_main) == (True, False)


def stop_at(step: int, rank: int, settings: TrainConfig) -> int | None:
    with pytest.MonkeyPatch.context() as patch:
        if int(os.environ["RANK"]) == rank:
            signal_at(patch, step, signal.SIGTERM)
        return train(settings).signal


@pytest.mark.parametrize(
    ("model", "step", "rank"),
    [("paca_vit_nano", 7, 1), pytest.param("vt_resnet18", 5, 0, marks=pytest.mark.slow)],
)
def test_two_processes_resume_bit_for_bit(
    config: Make, tmp_path: Path, model: str, step: int, rank: int
) -> None:
    """A signal to one of them stops both. The second model has running statistics."""
    args = {"width": 0.25, "stem": "small"} if model == "vt_resnet18" else {}
    options = EVERYTHING | dict(model=model, model_args=args, size=32)
    whole = config(out=str(tmp_path / "whole"), **options)
    broken = config(out=str(tmp_path / "broken"), **options)
    run_ranks(train, whole)
    assert run_ranks(stop_at, step, rank, broken) == [signal.SIGTERM] * 2
    assert last_state(broken)[0].step == step + 1
    resumed = config(out=broken.out, **options, resume="auto", workers=1)
    assert [result.signal for result in run_ranks(train, resumed)] == [None, None]
    (state_a, average_a), (state_b, average_b) = last_state(whole), last_state(broken)
    assert same(average_a, average_b)
    assert same(state_a.trained, state_b.trained)
    assert same(state_a.optimizer, state_b.optimizer)
    assert step_losses(whole) == step_losses(broken)
    assert [r["val_loss"] for r in history(whole)] == [r["val_loss"] for r in history(broken)]


def test_unreadable_images_are_counted_over_all_processes(config: Make, tmp_path: Path) -> None:
    data = make_folder(tmp_path / "data", good=78, bad=2)
    results = run_ranks(train, config(data=data, augment=None, batch=20, epochs=2))
    for result in results:
        assert sorted(Path(bad.path).name for bad in result.unreadable) == ["broken0.png", "broken1.png"]
    data = make_folder(tmp_path / "worse", good=36, bad=4)
    errors = run_ranks(train, config(data=data, augment=None, batch=40, epochs=2, overwrite=True))
    for error in errors:
        assert isinstance(error, UserError)
        assert str(error).startswith("4 of 40 images cannot be read, more than the 5.0% allowed: ")


def test_several_processes_need_an_image_each_and_gpus_for_sync_bn(config: Make) -> None:
    for changes, message in (
        ({"batch": 1}, "batch=1 is less than one image for each of 2 processes"),
        ({"sync_bn": True}, "sync_bn needs a GPU for each process, not cpu; leave it out"),
    ):
        for error in run_ranks(train, config(**changes)):
            assert isinstance(error, UserError)
            assert str(error) == message


def test_killed_process_costs_only_the_steps_since_the_last_snapshot(config: Make, tmp_path: Path) -> None:
    """torchrun restarts both, and the result equals that of an uninterrupted run."""
    options: dict[str, Any] = EVERYTHING | dict(epochs=4)
    whole = config(out=str(tmp_path / "whole"), **options)
    broken = config(out=str(tmp_path / "broken"), **options)
    run_ranks(train, whole)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=2"),
        *("--standalone", "-m", "visualtokens.train"),
        *("--model", broken.model, "--data", broken.data, "--out", broken.out, "--augment", "digits"),
        *("--epochs", "4", "--batch", "16", "--ema", "0.9", "--mixup", "0.8", "--cutmix", "1.0"),
        *("--drop_path", "0.3", "--log_every", "1", "--save_every", "4", "--device", "cpu"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        _wait_for_steps(broken, 8, job)
        victim = _children(_children(job.pid)[0] if _children(job.pid) else job.pid) or _children(job.pid)
        os.kill(victim[-1], signal.SIGKILL)
        out, err = job.communicate(timeout=240)
    assert job.returncode == 0, err
    assert "resumed after step" in err
    assert out.count("saved in") == 1, "only the main process prints"
    assert len(re.findall(r"^output  ", err, re.MULTILINE)) == 2, "once at the start, once after the restart"
    assert len(re.findall(r"^epoch 4/4: loss ", err, re.MULTILINE)) == 1
    (state_a, average_a), (state_b, average_b) = last_state(whole), last_state(broken)
    assert state_b.step == 24
    assert same(average_a, average_b)
    assert same(state_a.trained, state_b.trained)
    assert same(state_a.optimizer, state_b.optimizer)
    assert step_losses(whole) == step_losses(broken)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
def test_processes_end_when_torchrun_is_killed(config: Make) -> None:
    settings = config()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"),
        *("-m", "visualtokens.train", "--model", settings.model, "--data", settings.data),
        *("--out", settings.out, "--augment", "digits", "--device", "cpu", "--batch", "16"),
        *("--epochs", "10000", "--log_every", "1", "--workers", "1"),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
        _wait_for_steps(settings, 4, job)
        ranks = _children(job.pid)
        workers = [worker for rank in ranks for worker in _children(rank)]
        assert len(ranks) == 2
        try:
            job.kill()
            deadline = time.monotonic() + 60
            while (alive := [pid for pid in (*ranks, *workers) if _is_running(pid)]) and (
                time.monotonic() < deadline
            ):
                time.sleep(0.1)
            assert not alive
        finally:
            for pid in filter(_is_running, (*ranks, *workers)):
                os.kill(pid, signal.SIGKILL)
    assert len(train(config(epochs=1, resume="auto", batch=16)).history) >= 1, "the folder is not in use"


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_for_steps(settings: TrainConfig, steps: int, job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and job.poll() is None:
        if (Path(settings.out) / "steps.jsonl").exists() and len(lines(settings, "steps.jsonl")) >= steps:
            return
        time.sleep(0.02)
    job.kill()
    raise AssertionError(f"no {steps} steps: {job.communicate()[1]}")


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


# Signals.


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_requests_a_stop_and_restores_the_default_handlers(number: signal.Signals) -> None:
    with catch_signals() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert stop.signal == number
        assert {signal.getsignal(each) for each in SIGNALS} == {signal.SIG_DFL}


def test_handlers_are_restored_after_an_error() -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(RuntimeError, match="inside"), catch_signals():
        raise RuntimeError("inside")
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_processes_agree_to_stop() -> None:
    signalled, other = Stop(), Stop()
    signalled.signal = signal.SIGTERM
    signals = [stop.signal or 0 for stop in (signalled, other)]
    assert signalled.agree(signals)
    assert other.agree(signals)
    assert other.signal == signal.SIGTERM
    assert not Stop().agree([0, 0])


def test_another_thread_does_not_touch_signals() -> None:
    outcome: list[object] = []

    def work() -> None:
        with catch_signals() as stop:
            outcome.append(bool(stop))
            outcome.append(signal.getsignal(signal.SIGINT))

    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert outcome == [False, handler]
