"""Training runs: outputs, reproducibility and failures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from tests.train.helpers import Make, history, last_state, lines, same, weights
from visualtokens.data import PRESETS, Batch, create_loader, open_dataset
from visualtokens.errors import UserError
from visualtokens.tasks.classify import ClassifyEvaluation, ClassifyTraining, evaluate
from visualtokens.tasks.classify.task import augment_of
from visualtokens.tasks.task import Loss
from visualtokens.train import Diverged, load_checkpoint, train
from visualtokens.train.step import Learner, StepResult


def test_run_learns_and_writes_its_outputs(config: Make) -> None:
    settings = config(epochs=8, lr=3e-3, log_every=1)
    result = train(settings)
    assert result.history[-1]["loss"] < 0.8 * result.history[0]["loss"]
    assert result.accuracy is not None
    assert result.accuracy > 0.35, "chance is 0.1"
    assert (result.signal, result.skipped, result.unreadable, result.is_main) == (None, 0, (), True)
    assert result.seconds > 0
    assert result.images_per_second > 0
    assert 0 <= result.data_wait < 1

    assert history(settings) == result.history
    assert [record["epoch"] for record in result.history] == list(range(1, 9))
    assert set(result.history[0]) == {
        *("epoch", "lr", "loss", "train_accuracy", "val_loss", "val_accuracy", "skipped"),
        *("images_per_second", "data_wait", "seconds"),
    }
    steps = lines(settings, "steps.jsonl")
    assert [record["step"] for record in steps] == list(range(1, 25))
    mean = np.mean([record["loss"] for record in steps[-3:]])
    assert mean == pytest.approx(result.history[-1]["loss"])

    checkpoint = load_checkpoint(settings.out)
    val = open_dataset(settings.data, "val")
    loader = create_loader(val, checkpoint.preprocess, batch=7, train=False)
    again = evaluate(checkpoint.model, loader, classes=10)
    assert again.accuracy == pytest.approx(result.accuracy)
    assert result.confusion is not None
    assert torch.equal(again.confusion, result.confusion)
    assert result.confusion.sum() == len(val) == 40
    assert checkpoint.classes == result.classes == val.classes
    assert checkpoint.config["training"]["epochs"] == 8
    assert checkpoint.config["task"] == "classify"


def test_the_best_epoch_is_kept_beside_the_last(config: Make) -> None:
    settings = config(epochs=4, lr=2e-3, keep=4)
    result = train(settings)
    scores = [record["val_accuracy"] for record in result.history]
    first_best = scores.index(max(scores)) + 1
    names = sorted(path.name for path in (Path(settings.out) / "snapshots").iterdir())
    assert names == [f"epoch_{i:04d}_step_{3 * i:08d}" for i in range(1, 5)]
    best = f"snapshots/epoch_{first_best:04d}_step_{3 * first_best:08d}"
    assert same(weights(settings, "best"), weights(settings, best))
    assert same(weights(settings), weights(settings, f"snapshots/{names[-1]}"))
    assert result.best == max(scores)
    by_timm = timm.create_model(f"local-dir:{settings.out}/best", pretrained=True)
    assert same(dict(by_timm.state_dict()), weights(settings, "best"))


def test_only_the_newest_snapshots_are_kept(config: Make) -> None:
    settings = config(epochs=2, save_every=1, keep=2)
    train(settings)
    names = sorted(path.name for path in (Path(settings.out) / "snapshots").iterdir())
    assert names == ["epoch_0001_step_00000005", "epoch_0002_step_00000006"]


def test_ema_weights_are_evaluated_and_saved(config: Make) -> None:
    settings = config(epochs=2, ema=0.9)
    result = train(settings)
    state, saved = last_state(settings)
    assert state.trained is not None
    assert not same(saved, state.trained)
    loader = create_loader(
        open_dataset(settings.data, "val"), load_checkpoint(settings.out).preprocess, batch=32, train=False
    )
    again = evaluate(load_checkpoint(settings.out).model, loader, classes=10)
    assert result.metrics["loss"] == pytest.approx(again.loss)


def test_the_same_seed_gives_the_same_weights(config: Make, tmp_path: Path) -> None:
    first, again, other = (
        config(out=str(tmp_path / name), seed=seed, epochs=1)
        for name, seed in zip("abc", (0, 0, 1), strict=True)
    )
    for settings in (first, again, other):
        torch.rand(3)  # earlier draws must not matter
        train(settings)
    assert same(weights(first), weights(again))
    assert not same(weights(first), weights(other))


def test_the_seed_decides_the_order_of_the_images(
    config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def record(self: Learner[Batch], batch: Batch, counts: Sequence[int] | None = None) -> StepResult:
        seen.append(batch.index.tolist())
        return StepResult(len(batch), 1.0, {"accuracy": 0.0})

    monkeypatch.setattr(Learner, "learn", record)
    for name, seed in zip("abc", (0, 0, 1), strict=True):
        train(config(out=str(tmp_path / name), seed=seed, epochs=2))
    first, again, other = seen[:6], seen[6:12], seen[12:]
    assert first == again
    assert first != other
    assert first[:3] != first[3:], "a new order every epoch"


def test_workers_change_nothing(config: Make, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(
        epochs=1, mixup=0.8, cutmix=1.0, random_erasing=0.5, auto_augment="rand-m9-mstd0.5", drop_path=0.5
    )
    alone = config(out=str(tmp_path / "a"), **options)
    helped = config(out=str(tmp_path / "b"), workers=2, **options)
    train(alone)
    train(helped)
    assert same(weights(alone), weights(helped))


def break_loss(monkeypatch: pytest.MonkeyPatch, steps: Sequence[int]) -> None:
    """Make the loss not a number at these steps, counted from 0."""
    loss, calls = ClassifyTraining.loss, iter(range(1000))

    def broken(self: ClassifyTraining, model: nn.Module, batch: Batch, *, rng: np.random.Generator) -> Loss:
        found = loss(self, model, batch, rng=rng)
        return Loss(found.value * torch.nan, found.sums) if next(calls) in steps else found

    monkeypatch.setattr(ClassifyTraining, "loss", broken)


def test_nan_step_is_skipped_counted_and_logged(
    config: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_loss(monkeypatch, [1, 4])
    settings = config(epochs=2)
    result = train(settings)
    assert result.skipped == 2
    assert [record["skipped"] for record in result.history] == [1, 1]
    assert "skipped a step: the loss is nan at step 2 " in caplog.text
    assert all(torch.isfinite(w).all() for w in weights(settings).values())
    assert [record["step"] for record in lines(settings, "steps.jsonl")] == [2, 5]
    assert last_state(settings)[0].step == 6, "the schedule advances"


def test_repeated_nan_steps_end_the_run_unsaved(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    train(config(epochs=1))
    good = weights(config())
    break_loss(monkeypatch, range(100))
    with pytest.raises(Diverged, match=r"the loss is nan at step 6 .*last of 3 such steps.*lower lr"):
        train(config(epochs=2, resume=True, max_bad_steps=3, save_every=1))
    assert same(weights(config()), good)


def test_nan_validation_keeps_the_last_checkpoint(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    train(config(epochs=1))
    good = weights(config())
    broken = ClassifyEvaluation(0.1, float("nan"), torch.zeros(10, 10), 40, ())
    monkeypatch.setattr(ClassifyTraining, "evaluate", lambda *args, **options: broken)
    with pytest.raises(Diverged, match="the validation loss is nan at step 6"):
        train(config(epochs=2, resume=True))
    assert same(weights(config()), good)
    assert len(history(config())) == 1


def test_divergence_reports_its_step(config: Make) -> None:
    with pytest.raises(Diverged, match=r"at step \d+ |after step \d+ "):
        train(config(lr=1e20, min_lr=1e20, warmup_epochs=0, max_bad_steps=2))
    assert not (Path(config().out) / "model.safetensors").exists()


def test_mixed_precision_and_channels_last_train(config: Make) -> None:
    settings = config(epochs=3, lr=2e-3, bf16=True, channels_last=True)
    result = train(settings)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert all(w.dtype == torch.float32 for w in weights(settings).values() if w.is_floating_point())


def make_folder(root: Path, *, good: int, bad: int) -> str:
    """Two classes of ``good`` images in each split, and as many bad ones to train on."""
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


def test_unreadable_images_are_counted_and_named_once(config: Make, tmp_path: Path) -> None:
    """1 % of them."""
    data = make_folder(tmp_path / "data", good=198, bad=2)
    result = train(config(data=data, augment=None, batch=50, epochs=2))
    folder = tmp_path / "data" / "train" / "dark"
    assert {bad.path for bad in result.unreadable} == {str(folder / f"broken{i}.png") for i in range(2)}
    assert len(result.unreadable) == 2


def test_a_step_without_images_counts(config: Make, tmp_path: Path) -> None:
    data = make_folder(tmp_path / "data", good=20, bad=1)
    train(config(data=data, augment=None, batch=1, epochs=1))
    assert last_state(config())[0].step == 21, "so that the schedule advances"


def test_too_many_unreadable_images_end_the_run(config: Make, tmp_path: Path) -> None:
    data = make_folder(tmp_path / "data", good=36, bad=4)
    with pytest.raises(
        UserError, match=r"images cannot be read, more than the 5\.0% allowed: .*broken\d\.png"
    ):
        train(config(data=data))
    assert not (Path(config().out) / "model.safetensors").exists()
    assert len(train(config(data=data, overwrite=True, max_bad_images=0.1, epochs=1)).unreadable) == 4


def test_single_class_is_refused(config: Make, tmp_path: Path) -> None:
    pixels, labels = np.zeros((4, 8, 8), np.uint8), np.zeros(4, np.int64)
    np.savez(tmp_path / "one.npz", x_train=pixels, y_train=labels, x_val=pixels, y_val=labels)
    with pytest.raises(UserError, match="has 1 class; a classifier needs 2 or more"):
        train(config(data=f"npz:{tmp_path / 'one.npz'}"))


def test_size_and_default_augmentation(config: Make) -> None:
    train(config(epochs=1, size=40))
    assert load_checkpoint(config().out).preprocess.size == (40, 40)
    chosen = [
        augment_of(config(data=d, augment=None))
        for d in ("digits", "digit_scenes:96x96", "folder:/x", "npz:/digits")
    ]
    assert chosen == [PRESETS[name] for name in ("digits", "digits", "photo", "photo")]


def test_progress_bar_is_optional_and_on_stderr(config: Make, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(epochs=1))
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    train(config(epochs=1, overwrite=True), progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    for word in ("epoch 1", "loss", "accuracy", "images/s", "3/3"):
        assert word in captured.err
