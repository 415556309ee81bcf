"""Resuming from snapshots, and the output folder of a run."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.helpers import Make, history, last_state, same, signal_at, step_losses, weights
from visualtokens.errors import UserError
from visualtokens.train import TrainConfig, load_checkpoint, train
from visualtokens.train.snapshot import list_snapshots

EVERYTHING: dict[str, Any] = dict(
    epochs=3,
    batch=24,  # 4 steps per epoch
    lr=2e-3,
    ema=0.9,
    mixup=0.8,
    cutmix=1.0,
    drop_path=0.3,
    random_erasing=0.25,
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


def test_folder_that_holds_a_run_is_refused_without_overwrite(config: Make) -> None:
    train(config(epochs=1))
    before = weights(config())
    with pytest.raises(UserError, match="already holds a run; give --resume, --overwrite or another --out"):
        train(config(epochs=1, seed=1))
    assert same(weights(config()), before)
    train(config(epochs=1, seed=1, overwrite=True))
    assert not same(weights(config()), before)
    assert len(history(config())) == 1


def test_overwrite_removes_the_old_run(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    train(config(epochs=1))
    other = Path(config().out) / "mine.txt"
    other.write_text("not of the run")
    signal_at(monkeypatch, step=0)
    train(config(epochs=1, overwrite=True))  # ends before its first evaluation
    assert sorted(path.name for path in Path(config().out).iterdir()) == [
        *("config.json", "mine.txt", "model.safetensors", "options.json", "snapshots", "steps.jsonl")
    ]


def test_wrong_options_do_not_delete_the_old_run(config: Make) -> None:
    train(config(epochs=1))
    before = weights(config())
    mistakes: list[dict[str, Any]] = [
        *({"model": "paca_vit_nan"}, {"data": "digit"}, {"augment": "foto"}, {"device": "gpu"}),
        *({"optimizer": "adamv"}, {"auto_augment": "ran-m9"}, {"task": "clasify"}, {"teacher": "resnet1"}),
    ]
    for mistake in mistakes:
        with pytest.raises(UserError, match=r"^unknown "):
            train(config(overwrite=True, **mistake))
    assert same(weights(config()), before)


def test_resume_refuses_other_settings_and_empty_folders(config: Make) -> None:
    with pytest.raises(UserError, match="nothing to resume"):
        train(config(resume=True))
    train(config(epochs=1, lr=1e-3))
    with pytest.raises(UserError, match=r"has lr=0\.001, not 0\.002"):
        train(config(epochs=1, lr=2e-3, resume=True))
    with pytest.raises(UserError, match=r"has optimizer='adamw', not 'lamb'"):
        train(config(epochs=1, optimizer="lamb", resume="auto"))


@pytest.mark.parametrize("damage", ["cut", "missing", "code"])
def test_damaged_snapshot_is_refused(config: Make, tmp_path: Path, damage: str) -> None:
    train(config(epochs=1))
    state = list_snapshots(Path(config().out))[-1] / "state.pt"
    if damage == "cut":
        state.write_bytes(state.read_bytes()[:1000])
    elif damage == "missing":
        state.unlink()
    else:
        torch.save({"epoch": Evil(tmp_path / "hacked")}, state)
    with pytest.raises(UserError, match=r"state\.pt .*cannot resume from it; delete .*--overwrite"):
        train(config(resume=True))
    assert not (tmp_path / "hacked").exists()


class Evil:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self.path), "w")


def test_out_must_be_a_folder(config: Make, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UserError, match="is a file; give a folder"):
        train(config())
    assert (tmp_path / "run").read_text() == "mine"
