"""Initial weights from another run, and teachers."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch

from tests.train.helpers import Make, lines, same, signal_at, weights
from visualtokens.checkpoint import load, save_checkpoint
from visualtokens.errors import UserError
from visualtokens.tasks.classify import ClassifyTraining
from visualtokens.tasks.initialize import initialize_classifier
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


def test_init_loads_the_weights_of_another_run(config: Make, tmp_path: Path) -> None:
    first = save(tmp_path / "first", "paca_vit_nano", classes=DIGITS)
    assert same(dict(open_training(config(init=first)).model.state_dict()), weights(config(out=first)))


def test_head_for_other_classes_is_reinitialized(config: Make, tmp_path: Path) -> None:
    first = save(tmp_path / "first", "paca_vit_nano", classes=["cat", "dog"])
    states = []
    for init in (None, first):
        torch.manual_seed(0)
        states.append(open_training(config(init=init)).model.state_dict())
    untrained, started = states
    theirs = weights(config(out=first))
    for name, weight in started.items():
        source = untrained if name.startswith("head.") else theirs
        assert torch.equal(weight, source[name]), name


def test_position_embeddings_are_resampled(tmp_path: Path) -> None:
    folder = save(tmp_path / "first", "vit_tiny_patch16_224", classes=["a", "b"], size=64, depth=1)
    args = sized_args("vit_tiny_patch16_224", {"depth": 1}, size=96)
    model = build_model("vit_tiny_patch16_224", classes=2, model_args=args)
    initialize_classifier(model, load(folder), folder=folder, classes=["a", "b"], size=(96, 96))
    old = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert old.pos_embed.shape[1] == 1 + 4 * 4
    assert model.pos_embed.shape[1] == 1 + 6 * 6  # type: ignore[union-attr]
    assert torch.equal(model.blocks[0].mlp.fc1.weight, old.blocks[0].mlp.fc1.weight)  # type: ignore[union-attr,index]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("stvit_iso_64", dict(channels=(8, 8, 8, 8), depths=(1, 1, 1, 1), heads=(1, 1, 1, 1))),
        ("deit_e252", dict(depth=1)),
        ("swin_iso_64", dict(channels=(8, 8, 8, 8), depths=(1, 1, 1, 1), heads=(1, 1, 1, 1))),
    ],
)
def test_models_for_any_size_keep_their_positions(tmp_path: Path, name: str, args: dict) -> None:
    """The tables are those of the default size, whatever the size of the images; with img_size, of that."""
    folder = save(tmp_path / "first", name, classes=["a", "b"], size=64, **args)
    old = load(folder).model.state_dict()
    model = build_model(name, classes=2, model_args=args)
    initialize_classifier(model, load(folder), folder=folder, classes=["a", "b"], size=(96, 96))
    assert same(dict(model.state_dict()), dict(old))
    if name != "swin_iso_64":  # whose windows depend on more than the size
        model = build_model(name, classes=2, model_args=args | dict(img_size=96))
        initialize_classifier(model, load(folder), folder=folder, classes=["a", "b"], size=(96, 96))
        assert not any(
            key.endswith(("table", "pos_embed")) and w.shape == old[key].shape
            for key, w in model.state_dict().items()
        )


@pytest.mark.parametrize("broken", ["paca_vit_b0_32", None])
def test_init_weights_that_do_not_fit(config: Make, tmp_path: Path, broken: str | None) -> None:
    folder = save(tmp_path / "first", broken, classes=DIGITS) if broken else str(tmp_path / "nowhere")
    message = "do not fit the model: .* give the same --model" if broken else "init: .*does not exist"
    with pytest.raises(UserError, match=message):
        open_training(config(init=folder))


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
        ("paca_vit_nano", "teacher 'paca_vit_nano': timm cannot fetch its weights"),
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
