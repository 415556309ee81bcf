"""Resuming from snapshots, intact and damaged."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.helpers import (
    Make,
    at_step,
    flip,
    history,
    last_state,
    same,
    signal_at,
    step_losses,
    weights,
)
from visualtokens.errors import UserError
from visualtokens.train import TrainConfig, load_checkpoint, snapshot, train
from visualtokens.train.snapshot import list_snapshots, load_snapshot

EVERYTHING: dict[str, Any] = dict(
    epochs=3,
    batch=24,  # 4 steps per epoch
    lr=2e-3,
    ema=0.9,
    mixup=0.8,
    cutmix=1.0,
    drop_path=0.3,
    random_erasing=0.25,
    repeats=2,
    auto_augment="rand-m9-mstd0.5-inc1",
    log_every=1,
)


@pytest.fixture(scope="module")
def whole_run(few_digits: str, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """An uninterrupted run."""
    torch.set_num_threads(1)
    out = str(tmp_path_factory.mktemp("whole"))
    settings = TrainConfig(
        model="paca_vit_nano",
        data=few_digits,
        out=out,
        augment="digits",
        device="cpu",
        **EVERYTHING,
    )
    train(settings)
    return settings


def assert_equal_runs(a: TrainConfig, b: TrainConfig) -> None:
    (state_a, weights_a), (state_b, weights_b) = last_state(a), last_state(b)
    assert same(weights_a, weights_b), "EMA weights"
    assert same(state_a.trained, state_b.trained), "trained weights"
    assert same(state_a.optimizer, state_b.optimizer)
    assert (state_a.step, state_a.epoch, state_a.offset) == (state_b.step, state_b.epoch, state_b.offset)
    assert step_losses(a) == step_losses(b)
    for name in ("epoch", "lr", "loss", "train_accuracy", "val_loss", "val_accuracy"):
        assert [record[name] for record in history(a)] == [record[name] for record in history(b)], name


def stop_and_resume(make: Make, step: int, **changes: Any) -> TrainConfig:
    settings = make(**EVERYTHING, **changes)
    with pytest.MonkeyPatch.context() as patch:
        signal_at(patch, step)
        assert train(settings).signal == signal.SIGINT
    state, _ = last_state(settings)
    assert state.step == step + 1, "saved right after the step that the signal fell into"
    resumed = make(**EVERYTHING, **changes, resume="auto")
    result = train(resumed)
    assert result.signal is None
    assert len(result.history) == EVERYTHING["epochs"]
    return resumed


# In the first epoch, in the middle, in the last step of an epoch (before its evaluation).
@pytest.mark.parametrize(("step", "workers"), [(1, 0), (5, 2), (7, 0)])
def test_stopped_at_a_step(config: Make, whole_run: TrainConfig, step: int, workers: int) -> None:
    assert_equal_runs(whole_run, stop_and_resume(config, step, workers=workers))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("step", random.Random(0).sample(range(11), 8))
def test_stopped_at_any_step(config: Make, whole_run: TrainConfig, step: int, workers: int) -> None:
    assert_equal_runs(whole_run, stop_and_resume(config, step, workers=workers))


def test_stopped_again_and_again(config: Make, whole_run: TrainConfig) -> None:
    for step in range(0, 12, 2):
        with pytest.MonkeyPatch.context() as patch:
            signal_at(patch, step)
            train(config(**EVERYTHING, resume="auto", save_every=2, workers=step % 2))
    train(config(**EVERYTHING, resume="auto"))
    assert_equal_runs(whole_run, config(**EVERYTHING))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_with_a_usable_model(
    config: Make, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    settings = config(epochs=50)
    handler = signal.getsignal(number)
    signal_at(monkeypatch, step=4, number=number)  # the second of three steps of epoch 2
    result = train(settings)
    assert result.signal == number
    assert len(result.history) == len(history(settings)) == 1
    assert result.accuracy == result.history[0]["val_accuracy"]
    assert signal.getsignal(number) == handler
    state, saved = last_state(settings)
    assert (state.epoch, state.offset, state.step) == (1, 2, 5)
    assert same(weights(settings), saved)
    assert load_checkpoint(settings.out).classes


def test_a_signal_in_the_first_step_leaves_a_usable_model(
    config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config()
    signal_at(monkeypatch, step=0)
    result = train(settings)
    assert result.history == []
    assert result.accuracy is None
    assert load_checkpoint(settings.out).classes


def test_resuming_a_finished_run_evaluates_it_again_and_changes_nothing(config: Make) -> None:
    first = train(config())
    before = weights(config())
    again = train(config(resume=True))
    assert again.accuracy == first.accuracy
    assert again.history == first.history
    assert same(weights(config()), before)


def test_more_epochs_continue_a_finished_run(config: Make) -> None:
    train(config(epochs=1))
    result = train(config(epochs=2, resume=True))
    assert [record["epoch"] for record in result.history] == [1, 2]


def test_resume_auto_starts_a_new_run(config: Make) -> None:
    assert len(train(config(resume="auto")).history) == 2


def test_restarted_job_resumes_despite_overwrite(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    train(config(epochs=1))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    result = train(config(epochs=2, overwrite=True))
    assert [record["epoch"] for record in result.history] == [1, 2]


def kept_while_writing(monkeypatch: pytest.MonkeyPatch, settings: TrainConfig) -> list[list[int]]:
    """Record the steps of the complete snapshots whenever a new one is written."""
    write_folder, found = snapshot.write_folder, []

    def record(path: Path, fill: Any) -> None:
        found.append([int(path.name[-8:]) for path in list_snapshots(Path(settings.out))])
        write_folder(path, fill)

    monkeypatch.setattr(snapshot, "write_folder", record)
    return found


@pytest.mark.parametrize(
    ("keep", "expected"),
    [(1, [[], [1], [2], [3]]), (2, [[], [1], [2], [3]]), (3, [[], [1], [1, 2], [2, 3]])],
)
def test_old_snapshots_make_room_before_a_new_one_is_written(
    config: Make, monkeypatch: pytest.MonkeyPatch, keep: int, expected: list[list[int]]
) -> None:
    settings = config(epochs=1, batch=24, save_every=1, keep=keep)
    found = kept_while_writing(monkeypatch, settings)
    train(settings)
    assert found == expected
    assert [int(path.name[-8:]) for path in list_snapshots(Path(settings.out))] == [1, 2, 3, 4][-keep:]


def test_no_snapshot_is_deleted_while_the_newest_one_is_damaged(
    config: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(epochs=1, batch=24, save_every=1)
    found = kept_while_writing(monkeypatch, settings)
    at_step(monkeypatch, 2, lambda: flip(list_snapshots(Path(settings.out))[-1] / "state.pt", 80_000))
    train(settings)
    assert found == [[], [1], [1, 2], [3]]
    assert "step_00000002/state.pt is damaged" in caplog.text


# Damage.


def check_flips(settings: TrainConfig, folder: Path, *, flips: int) -> None:
    """Load copies of the run's last snapshot with one flipped bit each."""
    rng = random.Random(0)
    copy = Path(shutil.copytree(list_snapshots(Path(settings.out))[-1], folder / "copy"))
    files = sorted(path.name for path in copy.iterdir())
    load_snapshot(copy)
    for number in range(flips):
        path = copy / files[number % len(files)]
        before = path.read_bytes()
        flip(path, rng.randrange(8 * len(before)))
        with pytest.raises(UserError, match=re.escape(f"{copy}/")):
            load_snapshot(copy)
        path.write_bytes(before)
    load_snapshot(copy)


def test_a_flipped_bit_is_detected(config: Make, tmp_path: Path) -> None:
    train(config(epochs=1))
    check_flips(config(), tmp_path, flips=40)


@pytest.mark.slow
def test_any_flipped_bit_is_detected(config: Make, tmp_path: Path) -> None:
    train(config(epochs=1))
    check_flips(config(), tmp_path, flips=800)


def damage(folder: Path, how: str, hacked: Path) -> str:
    """Damage a snapshot; return the name of the file."""
    state = folder / "state.pt"
    if how == "cut":
        state.write_bytes(state.read_bytes()[:1000])
    elif how == "missing":
        state.unlink()
    elif how == "code":
        torch.save({"epoch": Evil(hacked)}, state)
        (folder / "digests.json").unlink(missing_ok=True)  # as in an older snapshot
    else:
        content = (folder / how).read_bytes()
        flip(folder / how, 8 * len(content) // 2)
        return how
    return state.name


@pytest.mark.parametrize("how", ["cut", "missing", "code", "state.pt", "model.safetensors", "config.json"])
def test_damaged_snapshot_falls_back_to_the_one_before(
    config: Make, whole_run: TrainConfig, caplog: pytest.LogCaptureFixture, tmp_path: Path, how: str
) -> None:
    out = shutil.copytree(whole_run.out, tmp_path / "copy")
    settings = config(out=str(out), **EVERYTHING, resume="auto")
    published = (Path(settings.out) / "config.json").read_bytes()
    damaged = list_snapshots(Path(settings.out))[-1]
    name = damage(damaged, how, tmp_path / "hacked")
    train(settings)
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert f"{damaged / name} " in warning
    assert warning.endswith("resuming from the snapshot before it, epoch_0002_step_00000008")
    assert_equal_runs(whole_run, settings)
    assert not (tmp_path / "hacked").exists()
    config_now = json.loads((Path(settings.out) / "config.json").read_bytes())
    assert config_now["label_names"] == json.loads(published)["label_names"]
    assert damaged.with_name(damaged.name + ".damaged").is_dir(), "nothing is deleted"


def test_without_an_intact_snapshot_the_run_is_refused(config: Make) -> None:
    train(config(epochs=1, keep=1))
    out = Path(config().out)
    published = {name: (out / name).read_bytes() for name in ("config.json", "model.safetensors")}
    folder = list_snapshots(out)[-1]
    flip(folder / "config.json", 1000)
    with pytest.raises(UserError, match=r"config\.json is damaged.*start again with --overwrite$") as caught:
        train(config(resume=True))
    assert "\n" not in str(caught.value)
    assert {name: (out / name).read_bytes() for name in published} == published
    assert folder.exists()


class Evil:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self.path), "w")
