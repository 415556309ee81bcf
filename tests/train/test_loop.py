"""Runs: what they leave behind, that they repeat, stop, resume, and refuse."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from visualtokens.data import create_loader, open_dataset
from visualtokens.errors import UserError
from visualtokens.tasks.classify import Evaluation, evaluate
from visualtokens.train import Diverged, TrainConfig, load_checkpoint, train
from visualtokens.train.loop import default_augment
from visualtokens.train.step import Learner

Make = Callable[..., TrainConfig]


def weights(config: TrainConfig) -> dict[str, Tensor]:
    return load_file(Path(config.out) / "model.safetensors")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def log(config: TrainConfig) -> list[dict[str, object]]:
    return [json.loads(line) for line in (Path(config.out) / "log.jsonl").read_text().splitlines()]


def signal_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGINT) -> None:
    """Send ourselves a signal in the middle of the given step, counted from 0."""
    learn = Learner.learn

    def learn_and_signal(self: Learner, images: Tensor, labels: Tensor) -> tuple[float, int]:
        if self.step == step:
            os.kill(os.getpid(), number)
        return learn(self, images, labels)

    monkeypatch.setattr(Learner, "learn", learn_and_signal)


def test_a_run_learns_and_leaves_what_it_says(config: Make) -> None:
    settings = config(epochs=12, lr=2e-3)
    result = train(settings)
    assert result.history[-1]["loss"] < 0.8 * result.history[0]["loss"]
    assert result.accuracy is not None
    assert result.accuracy > 0.35, "chance is 0.1"
    assert result.signal is None
    assert result.seconds > 0
    assert result.images_per_second > 0

    assert log(settings) == result.history
    assert [record["epoch"] for record in result.history] == list(range(1, 13))
    assert set(result.history[0]) == {
        *("epoch", "lr", "loss", "train_accuracy", "val_loss", "val_accuracy", "images_per_second", "seconds")
    }

    checkpoint = load_checkpoint(settings.out)
    val = open_dataset(settings.data, "val")
    loader = create_loader(val, checkpoint.preprocess, batch=7, train=False)
    again = evaluate(checkpoint.model, loader, classes=10)
    assert again.accuracy == pytest.approx(result.accuracy)
    assert result.confusion is not None
    assert torch.equal(again.confusion, result.confusion)
    assert result.confusion.sum() == len(val) == 40
    assert checkpoint.classes == result.classes == val.classes
    assert checkpoint.config["training"]["epochs"] == 12


def test_the_same_seed_gives_the_same_weights(config: Make, tmp_path: Path) -> None:
    first, again, other = (
        config(out=str(tmp_path / name), seed=seed) for name, seed in zip("abc", (0, 0, 1), strict=True)
    )
    for settings in (first, again, other):
        torch.rand(3)  # whatever was drawn before must not matter
        train(settings)
    assert same(weights(first), weights(again))
    assert not same(weights(first), weights(other))


def test_the_seed_decides_the_order_of_the_images(
    config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def look(self: Learner, images: Tensor, labels: Tensor) -> tuple[float, int]:
        seen.append(labels.tolist())
        return 1.0, 0

    monkeypatch.setattr(Learner, "learn", look)
    for name, seed in zip("abc", (0, 0, 1), strict=True):
        train(config(out=str(tmp_path / name), seed=seed, epochs=2))
    first, again, other = seen[:6], seen[6:12], seen[12:]
    assert first == again
    assert first != other
    assert first[:3] != first[3:], "a new order every epoch"


def test_dropout_is_seeded_too(config: Make, tmp_path: Path) -> None:
    runs = [config(out=str(tmp_path / n), epochs=1, model_args={"drop_path_rate": 0.5}) for n in "ab"]
    for settings in runs:
        train(settings)
    assert same(weights(runs[0]), weights(runs[1]))


def test_workers_change_nothing(config: Make, tmp_path: Path) -> None:
    alone, helped = config(out=str(tmp_path / "a")), config(out=str(tmp_path / "b"), workers=1)
    train(alone)
    train(helped)
    assert same(weights(alone), weights(helped))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_with_a_usable_model(
    config: Make, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    settings = config(epochs=50)
    handler = signal.getsignal(number)
    signal_at(monkeypatch, step=4, number=number)  # the second of three steps of epoch 2
    result = train(settings)
    assert result.signal == number
    assert len(result.history) == len(log(settings)) == 1
    assert result.accuracy == result.history[0]["val_accuracy"]
    assert signal.getsignal(number) == handler
    state = torch.load(Path(settings.out) / "state.pt", weights_only=True)
    assert state["step"] == 3, "the state is that after the last whole epoch"
    assert not same(weights(settings), state["model"]), "the model has the step that the signal fell into"
    assert load_checkpoint(settings.out).classes


def test_a_signal_in_the_first_epoch_leaves_a_usable_model(
    config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config()
    signal_at(monkeypatch, step=0)
    result = train(settings)
    assert result.history == []
    assert result.accuracy is None
    assert load_checkpoint(settings.out).classes


def test_a_signal_during_validation_keeps_the_epoch(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(epochs=3)
    signal_at(monkeypatch, step=2)  # the last step of epoch 1: the epoch is whole, validation is left out
    result = train(settings)
    assert result.signal == signal.SIGINT
    assert [record["val_accuracy"] for record in result.history] == [None]
    assert torch.load(Path(settings.out) / "state.pt", weights_only=True)["epoch"] == 1


@pytest.mark.parametrize("step", [1, 4, 5])  # in epoch 1, in epoch 2, in the last step of epoch 2
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    config: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: int
) -> None:
    args = dict(epochs=3, model_args={"drop_path_rate": 0.3}, lr=2e-3)
    whole, broken = config(out=str(tmp_path / "whole"), **args), config(out=str(tmp_path / "broken"), **args)
    reference = train(whole)
    with monkeypatch.context() as patch:
        signal_at(patch, step=step)
        assert train(broken).signal == signal.SIGINT
    result = train(config(out=broken.out, resume=True, **args))
    assert same(weights(whole), weights(broken))
    assert [r["loss"] for r in log(broken)] == [r["loss"] for r in log(whole)]
    assert result.accuracy == reference.accuracy
    assert len(result.history) == 3


def test_resuming_a_finished_run_judges_it_again_and_changes_nothing(config: Make) -> None:
    first = train(config())
    before = weights(config())
    again = train(config(resume=True))
    assert again.accuracy == first.accuracy
    assert again.history == first.history
    assert same(weights(config()), before)


def test_more_epochs_go_on_from_the_end(config: Make) -> None:
    train(config(epochs=1))
    result = train(config(epochs=2, resume=True))
    assert [record["epoch"] for record in result.history] == [1, 2]


def test_a_folder_that_holds_a_run_is_refused_unless_told(config: Make) -> None:
    train(config(epochs=1))
    before = weights(config())
    with pytest.raises(UserError, match="already holds a run; give --resume, --overwrite or another --out"):
        train(config(epochs=1, seed=1))
    assert same(weights(config()), before)
    train(config(epochs=1, seed=1, overwrite=True))
    assert not same(weights(config()), before)
    assert len(log(config())) == 1


def test_overwriting_leaves_nothing_of_the_old_run(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    train(config(epochs=1))
    signal_at(monkeypatch, step=0)
    train(config(epochs=1, overwrite=True))  # ends before it has a state or a log of its own
    assert sorted(path.name for path in Path(config().out).iterdir()) == ["config.json", "model.safetensors"]


def test_a_mistake_in_the_options_does_not_cost_the_old_run(config: Make) -> None:
    train(config(epochs=1))
    before = weights(config())
    for mistake in ({"model": "paca_vit_nan"}, {"data": "digit"}, {"augment": "foto"}, {"device": "gpu"}):
        with pytest.raises(UserError, match=r"^unknown "):
            train(config(overwrite=True, **mistake))
    assert same(weights(config()), before)


def test_resume_refuses_other_settings_and_empty_folders(config: Make) -> None:
    with pytest.raises(UserError, match="nothing to resume"):
        train(config(resume=True))
    train(config(epochs=1, lr=1e-3))
    with pytest.raises(UserError, match=r"has lr=0\.001, not 0\.002"):
        train(config(epochs=1, lr=2e-3, resume=True))


def test_a_damaged_state_is_refused(config: Make) -> None:
    train(config(epochs=1))
    state = Path(config().out) / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"state\.pt cannot be read.*--overwrite"):
        train(config(resume=True))


def test_out_that_is_a_file(config: Make, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UserError, match="is a file; give a folder"):
        train(config())
    assert (tmp_path / "run").read_text() == "mine"


def test_a_loss_that_is_not_finite_ends_the_run_and_saves_nothing_of_it(config: Make) -> None:
    train(config(epochs=1))
    good = weights(config())
    nan = torch.tensor(torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("visualtokens.train.step.loss_of", lambda *args, **options: nan)
        with pytest.raises(Diverged, match=r"the loss is nan at step 4 .*lower lr"):
            train(config(epochs=2, resume=True))
    assert same(weights(config()), good)


def test_a_validation_that_is_not_finite_keeps_the_good_checkpoint(
    config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config(epochs=1))
    good = weights(config())
    broken = Evaluation(0.1, float("nan"), torch.zeros(10, 10), 40, ())
    monkeypatch.setattr("visualtokens.train.loop.evaluate", lambda *args, **options: broken)
    with pytest.raises(Diverged, match="the validation loss is nan at step 6 "):
        train(config(epochs=2, resume=True))
    assert same(weights(config()), good)
    assert len(log(config())) == 1


def test_a_real_divergence_is_told_with_its_step(config: Make) -> None:
    with pytest.raises(Diverged, match=r"at step 2 "):
        train(config(lr=1e20, min_lr=1e20, warmup_epochs=0))
    assert not (Path(config().out) / "model.safetensors").exists()


def test_mixed_precision_and_channels_last_train(config: Make) -> None:
    settings = config(epochs=3, lr=2e-3, bf16=True, channels_last=True)
    result = train(settings)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert all(w.dtype == torch.float32 for w in weights(settings).values() if w.is_floating_point())


def make_folder(root: Path, *, good: int, bad: int) -> str:
    for split in ("train", "val"):
        for name in ("dark", "light"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(good // 2):
                pixels = np.full((40, 40, 3), 60 if name == "dark" else 200, np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    for i in range(bad):
        (root / "train" / "dark" / f"broken{i}.png").write_bytes(b"no image")
    return f"folder:{root}"


def test_unreadable_images_are_named_once(config: Make, tmp_path: Path) -> None:
    data = make_folder(tmp_path / "data", good=20, bad=1)
    result = train(config(data=data, augment=None, batch=1, epochs=2))
    assert [Path(bad.path).name for bad in result.unreadable] == ["broken0.png"]
    state = torch.load(Path(config().out) / "state.pt", weights_only=True)
    assert state["step"] == 42, "a step without images counts, so the schedule keeps its pace"


def test_too_many_unreadable_images_end_the_run(config: Make, tmp_path: Path) -> None:
    data = make_folder(tmp_path / "data", good=36, bad=4)
    with pytest.raises(
        UserError, match=r"images cannot be read, more than the 5\.0% allowed: .*broken\d\.png"
    ):
        train(config(data=data))
    assert not (Path(config().out) / "model.safetensors").exists()


def test_a_single_class_is_refused(config: Make, tmp_path: Path) -> None:
    pixels, labels = np.zeros((4, 8, 8), np.uint8), np.zeros(4, np.int64)
    np.savez(tmp_path / "one.npz", x_train=pixels, y_train=labels, x_val=pixels, y_val=labels)
    with pytest.raises(UserError, match="has 1 class; a classifier needs 2 or more"):
        train(config(data=f"npz:{tmp_path / 'one.npz'}"))


def test_size_and_default_augmentation(config: Make) -> None:
    train(config(epochs=1, size=40))
    assert load_checkpoint(config().out).preprocess.size == (40, 40)
    assert [default_augment(d) for d in ("digits", "digit_scenes:96x96", "folder:/x", "npz:/digits")] == [
        *("digits", "digits", "photo", "photo")
    ]


def test_progress_goes_to_stderr_and_only_if_wanted(config: Make, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(epochs=1))
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    train(config(epochs=1, overwrite=True), progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    for word in ("epoch 1", "loss", "accuracy", "images/s"):
        assert word in captured.err
