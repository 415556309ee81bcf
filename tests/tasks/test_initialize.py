"""Initial weights: every source gives the same weights, heads of other classes are new, the rest must fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn

from tests.tasks.initial import (
    DIGITS,
    RESNET,
    VIT,
    Open,
    equal,
    others,
    random_model,
    save_bare,
    save_old_timm,
    save_own,
    save_pickle,
    save_released,
    save_timm,
)
from tests.test_converters import TouchesFile
from visualtokens.checkpoint import load, save_checkpoint
from visualtokens.data import Preprocess
from visualtokens.errors import UserError
from visualtokens.tasks.initialize import Initial, initialize_classifier
from visualtokens.train import TrainConfig, train

SOURCES: dict[str, Callable[[Path, nn.Module], str]] = {
    "own folder": save_own,
    "its file": lambda folder, model: save_own(folder, model) + "/model.safetensors",
    "timm folder": save_timm,
    "local-dir": lambda folder, model: "local-dir:" + save_timm(folder, model),
    "old timm folder": save_old_timm,
    "safetensors": save_bare,
    "pth": save_pickle(lambda state: state, "weights.pth"),
    "pt of a training script": save_pickle(lambda state: {"model": state, "epoch": 3}, "weights.pt"),
    "bin of parallel training": save_pickle(
        lambda state: {"state_dict": {f"module.{n}": w for n, w in state.items()}}, "weights.bin"
    ),
    "compiled": save_pickle(lambda state: {f"_orig_mod.{n}": w for n, w in state.items()}, "weights.pth"),
    "EMA": save_pickle(
        lambda state: {"model": {n: 0 * w for n, w in state.items()}, "model_ema": state}, "weights.pth"
    ),
    "old BatchNorm": save_pickle(
        lambda state: {n: w for n, w in state.items() if "num_batches" not in n}, "weights.pth"
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same_weights(start: Open, tmp_path: Path, source: str) -> None:
    model = random_model()
    training = start(init=SOURCES[source](tmp_path / "source", model))
    assert equal(training.model, dict(model.state_dict()))


# Heads.


@pytest.mark.parametrize(
    ("classes", "names", "note"),
    [
        (7, None, "their classifier is for 7 classes instead of 10: a new one starts from random weights"),
        (0, None, "they have no classifier: it starts from random weights"),
        (
            10,
            list("abcdefghij"),
            "their classifier is for other classes: a new one starts from random weights",
        ),
    ],
)
def test_head_for_other_classes_is_new(
    start: Open, tmp_path: Path, classes: int, names: list[str] | None, note: str
) -> None:
    model = random_model(classes=classes)
    source = save_own(tmp_path / "x", model, names) if names else save_bare(tmp_path / "x", model)
    training = start(init=source)
    assert training.notes == [f"init: the weights in {source!r}; {note}"]
    assert equal(
        training.model, others(model) | {n: w for n, w in start().model.state_dict().items() if "fc" in n}
    )


def test_head_of_as_many_unnamed_classes_is_kept(start: Open, tmp_path: Path) -> None:
    source = save_bare(tmp_path / "x", random_model())
    (note,) = start(init=source).notes
    assert note.endswith("; their classifier is kept: it has as many classes as the data")
    (note,) = start(init=save_own(tmp_path / "same", random_model())).notes
    assert note == f"init: the weights in {str(tmp_path / 'same')!r}"


# What does not fit.

WEIGHT = "layer1.0.conv1.weight"
DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda w: w.pop(WEIGHT), f"1 missing: {WEIGHT}"),
    "unknown": (
        lambda w: w.update({f"extra.{i}": torch.zeros(1) for i in range(5)}),
        "5 unknown: extra.0, extra.1, extra.2, …",
    ),
    "misshapen": (
        lambda w: w.update({WEIGHT: torch.zeros(8, 8, 1, 1)}),
        f"1 of another shape: {WEIGHT} (8×8×1×1 instead of 8×64×3×3)",
    ),
    "integers": (
        lambda w: w.update({WEIGHT: w[WEIGHT].to(torch.int8)}),
        f"1 of another type: {WEIGHT} (int8)",
    ),
    "several": (
        lambda w: w.update({"a\x1b": w.pop(WEIGHT), "bn1.bias": torch.tensor(1.0)}),
        f"1 missing: {WEIGHT}; 1 unknown: a\\x1b; 1 of another shape: bn1.bias (a number instead of 64)",
    ),
}


@pytest.mark.parametrize("classes", [10, 7])
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_fit_is_listed_and_nothing_is_loaded(damage: str, classes: int) -> None:
    change, problem = DAMAGE[damage]
    weights = dict(random_model(classes=classes).state_dict())
    change(weights)
    model = random_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(UserError) as caught:
        initialize_classifier(
            model, Initial("init: those", weights), name="resnet18", classes=DIGITS, model_args=RESNET
        )
    assert str(caught.value) == (
        f"init: those do not fit 'resnet18', so none was loaded; {problem}; "
        "give the model and model_args that they were trained with"
    )
    assert equal(model, before)


def test_wrong_architecture(start: Open, tmp_path: Path) -> None:
    source = save_own(tmp_path / "x", random_model("paca_vit_nano"), drop_rate=0.0)
    with pytest.raises(
        UserError, match=r"do not fit 'resnet18', so none was loaded; \d+ missing: conv1.weight"
    ):
        start(init=source)


def test_sources_that_cannot_be_read(start: Open, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half/config.json").write_text('{"architecture": "resnet18", "num_classes": 10}')
    (tmp_path / "notes.txt").write_text("weights")
    save_own(tmp_path / "segmenter", random_model())
    config = json.loads((tmp_path / "segmenter/config.json").read_text())
    (tmp_path / "segmenter/config.json").write_text(json.dumps(config | {"task": "segment"}))
    torch.save({"w": TouchesFile(tmp_path / "unpickled")}, tmp_path / "code.pth")
    for source, message in {
        "nowhere": "init: 'nowhere' does not exist; give a checkpoint folder with config.json and",
        "resnet50": "hf-hub:ORGANIZATION/NAME; for timm's weights of 'resnet50' give --pretrained instead",
        f"{tmp_path}/empty": "empty' has no config.json; give a checkpoint folder",
        f"{tmp_path}/half": "half' has no model.safetensors; give a checkpoint folder",
        f"{tmp_path}/notes.txt": "notes.txt' is not a file of weights; give",
        f"{tmp_path}/segmenter": "were trained to segment, not to classify; give others",
        f"{tmp_path}/code.pth": "init: .*code.pth holds more than tensors, and pickled code is never run",
    }.items():
        with pytest.raises(UserError, match=message):
            start(init=source)
    assert not (tmp_path / "unpickled").exists()


# Input size and statistics.


def test_input_statistics_are_those_of_the_weights(start: Open, tmp_path: Path) -> None:
    source = save_own(tmp_path / "x", random_model())
    training = start(init=source)
    expected = Preprocess((64, 64), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), crop=0.8, interpolation="bilinear")
    assert training.preprocess == expected
    stored = training.describe()["pretrained_cfg"]
    names = ("input_size", "mean", "std", "crop_pct", "interpolation")
    assert [stored[name] for name in names] == [
        (3, 64, 64),
        (0.1, 0.2, 0.3),
        (0.4, 0.5, 0.6),
        0.8,
        "bilinear",
    ]
    assert start(init=source, size=32).preprocess == replace(expected, size=(32, 32))
    bare = start(init=save_bare(tmp_path / "bare", random_model()))
    assert bare.preprocess == start().preprocess


def save_vit(folder: Path, size: int, classes: list[str] = DIGITS) -> tuple[str, nn.Module]:
    model = random_model("vit_tiny_patch16_224", classes=len(classes), img_size=size, **VIT)
    preprocess = Preprocess((size, size), (0.5,) * 3, (0.5,) * 3)
    args = VIT | {"img_size": size}
    save_checkpoint(folder, model, classes=classes, preprocess=preprocess, model_args=args, training={})
    return str(folder), model


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "reduced_vit"])
@pytest.mark.parametrize("bare", [False, True])
def test_position_embeddings_are_resampled_as_by_timm(
    start: Open, tmp_path: Path, name: str, bare: bool
) -> None:
    folder, _ = save_vit(tmp_path / "x", 64)
    weights = f"{folder}/model.safetensors"
    if bare:
        weights = str((tmp_path / "x/model.safetensors").rename(tmp_path / "weights.safetensors"))
    args = dict(base="vit_tiny_patch16_224", keep=[8, 4]) if name == "reduced_vit" else {}
    model = start(model=name, model_args=VIT | args, init=weights, size=96).model
    overlay = dict(file=weights, num_classes=10, custom_load=False)
    expected = timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=True,
        pretrained_cfg_overlay=overlay,
        num_classes=10,
        img_size=96,
        **VIT,
    )
    assert expected.pos_embed.shape == (1, 1 + 6 * 6, 24)
    assert equal(model, dict(expected.state_dict()))


@pytest.mark.parametrize("classes", [DIGITS, ["a", "b", "c"]])
def test_size_of_the_weights_is_the_default(start: Open, tmp_path: Path, classes: list[str]) -> None:
    folder, model = save_vit(tmp_path / "x", 64, classes)
    training = start(model="vit_tiny_patch16_224", model_args=VIT, init=folder)
    assert training.preprocess.size == (64, 64)
    state = training.model.state_dict()
    for name, weight in model.state_dict().items():
        assert (classes != DIGITS and name.startswith("head.")) or torch.equal(state[name], weight), name
    assert training.model(torch.zeros(1, 3, 64, 64)).shape == (1, 10)


# Released checkpoints.


@pytest.mark.parametrize(
    ("released", "name", "rename", "model_args"),
    [
        ("pacavit_tiny_p2cconv_100_0", "paca_vit_tiny", ("norm3.weight", "stages.2.norm.weight"), {}),
        ("stvit_small", "stvit_small", ("proj.weight", "final.0.weight"), {"border": "released"}),
    ],
)
def test_released_checkpoints_are_converted(
    start: Open, tmp_path: Path, released: str, name: str, rename: tuple[str, str], model_args: dict[str, str]
) -> None:
    file = tmp_path / "released.pth"
    values = save_released(file, released)
    training = start(model=name, model_args={}, init=str(file))
    theirs, ours = rename
    assert training.model.state_dict()[ours].unique().tolist() == [values[theirs]]
    assert training.describe()["model_args"] == model_args
    assert training.notes[0].endswith("1,000 classes instead of 10: a new one starts from random weights")
    with pytest.raises(
        UserError, match=rf"holds released weights of '{name}', not of 'resnet18'; choose that"
    ):
        start(init=str(file))


def test_arguments_of_released_weights_come_with_their_folder(start: Open, tmp_path: Path) -> None:
    model = random_model("stvit_small", border="released")
    folder = save_own(tmp_path / "x", model, border="released")
    training = start(model="stvit_small", model_args={}, init=folder)
    assert training.describe()["model_args"] == {"border": "released"}
    training = start(model="stvit_small", model_args={"border": "exact"}, init=folder)
    assert training.describe()["model_args"] == {"border": "exact"}


@pytest.mark.parametrize("name", ["bicubic", "bilinear", "lanczos", "nearest"])
def test_interpolation_is_timms(name: str) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=np.uint8))
    theirs = create_transform((3, 48, 48), interpolation=name, mean=(0, 0, 0), std=(1, 1, 1), crop_pct=1.0)
    ours = Preprocess((48, 48), (0, 0, 0), (1, 1, 1), interpolation=name)
    torch.testing.assert_close(ours(image), theirs(image), rtol=0, atol=1 / 255 + 1e-6)


def test_trained_model_keeps_the_statistics(digits: str, tmp_path: Path) -> None:
    source = save_own(tmp_path / "x", random_model(classes=3), list("abc"))
    options = TrainConfig(
        model="resnet18", model_args=RESNET, data=digits, init=source, out=str(tmp_path / "run"), epochs=1
    )
    train(options, progress=False)
    assert load(tmp_path / "run").preprocess == load(source).preprocess
