"""Initial weights from another run, and teachers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.train.helpers import Make, lines, same, signal_at, weights
from visualtokens.checkpoint import save_checkpoint
from visualtokens.errors import UserError
from visualtokens.tasks.classify import ClassifyTraining
from visualtokens.tasks.task import open_training
from visualtokens.tasks.timm_models import build_model, preprocess_for, sized_args
from visualtokens.train import train

DIGITS = [str(i) for i in range(10)]


def save(
    folder: Path, name: str, *, classes: list[str], size: int | None = None, **model_args: object
) -> str:
    args = sized_args(name, model_args, size=size)
    model = build_model(name, classes=len(classes), model_args=args)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    save_checkpoint(
        folder,
        model,
        classes=classes,
        preprocess=preprocess_for(model, size=size),
        model_args=args,
        training={},
    )
    return str(folder)


def test_teacher_from_a_checkpoint_is_frozen(config: Make, tmp_path: Path) -> None:
    folder = save(tmp_path / "teacher", "resnet18", classes=DIGITS, size=48)
    task = open_training(config(teacher=folder, distill=0.8, distill_temperature=2.0))
    assert isinstance(task, ClassifyTraining)
    assert (task.options.distill, task.options.temperature) == (0.8, 2.0)
    assert task.teacher is not None
    assert task.teacher.size == (48, 48)
    before = {name: w.clone() for name, w in task.teacher.state_dict().items()}
    result = train(config(teacher=folder, distill=0.8, epochs=1))
    assert len(result.history) == 1
    assert same(dict(task.teacher.state_dict()), before)
    assert not any(parameter.requires_grad for parameter in task.teacher.parameters())
    assert "teacher" not in " ".join(weights(config()))


def test_student_learns_from_its_teacher_only(config: Make, tmp_path: Path) -> None:
    """Labels have weight 0, and the teacher predicts seven for every image."""
    folder = save(tmp_path / "teacher", "paca_vit_nano", classes=DIGITS)
    teacher = open_training(config(init=folder)).model
    with torch.no_grad():
        teacher.head.weight.zero_()  # type: ignore[union-attr, operator]
        teacher.head.bias.copy_(10.0 * torch.eye(10)[7])  # type: ignore[union-attr, operator]
    save_checkpoint(
        folder, teacher, classes=DIGITS, preprocess=preprocess_for(teacher), model_args={}, training={}
    )
    result = train(config(teacher=folder, distill=1.0, epochs=4, lr=2e-3))
    assert result.confusion is not None
    assert result.confusion[:, 7].sum() == 40


def test_unusable_teachers_are_refused(config: Make, tmp_path: Path) -> None:
    others = save(tmp_path / "others", "paca_vit_nano", classes=["cat", "dog"])
    for teacher, message in (
        (others, "was trained for other classes than those of the data"),
        ("resnet_18", "unknown teacher 'resnet_18'; did you mean 'resnet"),
        (
            "paca_vit_nano",
            "teacher: the weights of 'paca_vit_nano' do not exist in timm; give others: --teacher",
        ),
    ):
        with pytest.raises(UserError, match=message):
            open_training(config(teacher=teacher))


def test_init_restarts_the_schedule(config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run of deit_2x has the weights of the first, a new optimizer and the same schedule."""
    first = config(out=str(tmp_path / "first"), log_every=1)
    train(first)
    second = config(out=str(tmp_path / "second"), init=first.out, log_every=1)
    signal_at(monkeypatch, 0)
    train(second)
    assert lines(second, "steps.jsonl")[0]["lr"] == lines(first, "steps.jsonl")[0]["lr"]
    moved = [(weight - weights(second)[name]).abs().max() for name, weight in weights(first).items()]
    assert 0 < max(moved) < 1e-4, "one step at the start of the warm-up"
