"""Initial weights: every source gives the same weights, heads of other classes are new, the rest must fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import _registry, save_for_hf
from torch import Tensor, nn

from tests.test_converters import TouchesFile, released_shapes
from visualtokens.checkpoint import load, save_checkpoint
from visualtokens.data import Preprocess
from visualtokens.errors import UserError
from visualtokens.tasks import hub
from visualtokens.tasks.initialize import Initial, initialize_classifier
from visualtokens.tasks.options import TaskOptions
from visualtokens.tasks.task import Training, open_training
from visualtokens.tasks.timm_models import build_model
from visualtokens.train import TrainConfig

DIGITS = [str(i) for i in range(10)]
RESNET: dict[str, Any] = dict(channels=[8, 8, 8, 8])
VIT: dict[str, Any] = dict(embed_dim=24, depth=2, num_heads=3)

Open = Callable[..., Training[Any]]


@pytest.fixture
def start(digits: str) -> Open:
    """Opens the training of a small ResNet on digits."""

    def make(**changes: Any) -> Training[Any]:
        torch.manual_seed(0)
        return open_training(TaskOptions(**dict(model="resnet18", model_args=RESNET, data=digits) | changes))

    return make


def random_model(name: str = "resnet18", classes: int = 10, **args: Any) -> nn.Module:
    """A model whose weights no constructor would give it."""
    model = build_model(name, classes=classes, model_args=args or (RESNET if name == "resnet18" else {}))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model


def equal(model: nn.Module, weights: dict[str, Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() == weights.keys() and all(torch.equal(state[n], w) for n, w in weights.items())


def save_own(folder: Path, model: nn.Module, classes: list[str] = DIGITS, **args: Any) -> str:
    preprocess = Preprocess((64, 64), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), crop=0.8, interpolation="bilinear")
    save_checkpoint(
        folder, model, classes=classes, preprocess=preprocess, model_args=args or RESNET, training={}
    )
    return str(folder)


def save_timm(folder: Path, model: nn.Module) -> str:
    save_for_hf(model, str(folder), model_args=RESNET, safe_serialization=True)
    return str(folder)


def save_old_timm(folder: Path, model: nn.Module) -> str:
    """timm's older layout: a pickle of tensors, and a configuration without nested objects."""
    folder.mkdir()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    config = dict(architecture="resnet18", num_classes=10, mean=[0.5] * 3, std=[0.5] * 3)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def save_pickle(wrap: Callable[[dict[str, Tensor]], Any], name: str) -> Callable[[Path, nn.Module], str]:
    def save(folder: Path, model: nn.Module) -> str:
        folder.mkdir()
        torch.save(wrap(dict(model.state_dict())), folder / name)
        return str(folder / name)

    return save


def save_bare(folder: Path, model: nn.Module) -> str:
    folder.mkdir()
    save_file(dict(model.state_dict()), folder / "weights.safetensors")
    return str(folder / "weights.safetensors")


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


def test_hub_repository(start: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    folder = save_timm(tmp_path / "cache", model)
    asked = []

    def fetch(repository: str, name: str, *, revision: str | None) -> str:
        asked.append((repository, name, revision))
        return f"{folder}/{name}"

    monkeypatch.setattr(hub, "hf_hub_download", fetch)
    assert equal(start(init="hf-hub:me/digits@v2").model, dict(model.state_dict()))
    assert asked == [("me/digits", "config.json", "v2"), ("me/digits", "model.safetensors", "v2")]


def test_hub_repository_without_safetensors(
    start: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model()
    folder = Path(save_old_timm(tmp_path / "cache", model))

    def fetch(repository: str, name: str, *, revision: str | None) -> str:
        if not (folder / name).exists():
            raise hub.errors.EntryNotFoundError("404")
        return str(folder / name)

    monkeypatch.setattr(hub, "hf_hub_download", fetch)
    assert equal(start(init="hf-hub:me/digits").model, dict(model.state_dict()))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            hub.errors.LocalEntryNotFoundError("x"),
            "the Hugging Face Hub cannot be reached, and they are not in",
        ),
        (
            hub.errors.EntryNotFoundError("404"),
            "it has no config.json and model.safetensors in timm's layout",
        ),
        (ValueError("Repo id must be\n'a/b'"), "cannot be fetched: Repo id must be 'a/b'"),
    ],
)
def test_hub_repository_that_cannot_be_fetched(
    start: Open, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fetch(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(hub, "hf_hub_download", fetch)
    with pytest.raises(UserError, match=f"^init: the repository 'me/x' .*{message}") as caught:
        start(init="hf-hub:me/x")
    assert "\n" not in str(caught.value)


# Heads.


def others(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in model.state_dict().items() if not name.startswith("fc.")}


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


def save_vit(folder: Path, size: int) -> tuple[str, nn.Module]:
    model = random_model("vit_tiny_patch16_224", img_size=size, **VIT)
    preprocess = Preprocess((size, size), (0.5,) * 3, (0.5,) * 3)
    save_checkpoint(
        folder, model, classes=DIGITS, preprocess=preprocess, model_args=VIT | {"img_size": size}, training={}
    )
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


def test_size_of_the_weights_is_the_default(start: Open, tmp_path: Path) -> None:
    folder, model = save_vit(tmp_path / "x", 64)
    training = start(model="vit_tiny_patch16_224", model_args=VIT, init=folder)
    assert training.preprocess.size == (64, 64)
    assert equal(training.model, dict(model.state_dict()))
    assert training.model(torch.zeros(1, 3, 64, 64)).shape == (1, 10)


# Released checkpoints.


def save_released(path: Path, released: str, classes: int = 1000) -> dict[str, float]:
    """Write a checkpoint in which every weight has a value of its own, and return the values."""
    weights, values = {}, {}
    for i, (name, shape) in enumerate(released_shapes(released).items()):
        values[name] = float(i)
        shape = (classes, *shape[1:]) if name.startswith("head.") else shape
        weights[name] = torch.tensor(values[name]).expand(shape)  # one number in the file
    torch.save({"model": weights}, path)
    return values


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
    assert training.notes[0].endswith("1000 classes instead of 10: a new one starts from random weights")
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


# timm's pretrained weights.


@pytest.fixture
def pretrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A ResNet for 1000 classes, whose weights timm finds as those of ``resnet10t``."""
    model = timm.create_model("resnet10t")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    save_file(dict(model.state_dict()), tmp_path / "timm.safetensors")
    cfg = replace(
        timm.get_pretrained_cfg("resnet10t"),
        hf_hub_id=None,
        file=str(tmp_path / "timm.safetensors"),
        input_size=(3, 48, 48),
        mean=(0.5, 0.5, 0.5),
    )
    monkeypatch.setitem(_registry._model_pretrained_cfgs, "resnet10t", cfg)
    return model


def test_pretrained_weights_are_timms(start: Open, pretrained: nn.Module) -> None:
    training = start(model="resnet10t", model_args={}, pretrained=True)
    state = training.model.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in others(pretrained).items())
    assert (training.preprocess.size, training.preprocess.mean) == ((48, 48), (0.5, 0.5, 0.5))
    assert training.notes == [
        "pretrained: the weights of 'resnet10t'; their classifier is for 1000 classes instead of 10: "
        "a new one starts from random weights"
    ]


def test_pretrained_weights_that_do_not_fit(start: Open, pretrained: nn.Module) -> None:
    with pytest.raises(UserError, match=r"the weights of 'resnet10t' do not fit its model_args: .*layer1\."):
        start(model="resnet10t", model_args={"channels": [8, 8, 8, 8]}, pretrained=True)


def test_models_without_pretrained_weights(start: Open) -> None:
    with pytest.raises(UserError) as caught:
        start(model="paca_vit_nano", model_args={}, pretrained=True)
    assert str(caught.value) == (
        "pretrained: the weights of 'paca_vit_nano' do not exist in timm; "
        "give weights of your own with --init, or leave --pretrained out"
    )


def test_pretrained_weights_without_network(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's own error, without its waiting times."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        start(model="resnet18.a1_in1k", model_args={}, pretrained=True)
    assert str(caught.value) == (
        "pretrained: the weights of 'resnet18.a1_in1k' cannot be fetched: the Hugging Face Hub cannot be "
        "reached, and they are not in its cache on this machine; download timm/resnet18.a1_in1k where there "
        "is a network and give --init FOLDER, or set HF_HOME to a cache that has them"
    )


# Dense models.


def dense(task: str, backbone: str, args: dict[str, Any], **changes: Any) -> Training[Any]:
    small = dict(backbone=backbone, backbone_args=args)
    if task == "segment":
        given = dict(model="fpn", model_args=small | dict(head_args=dict(dim=8, width=8)), size=64)
    else:
        given = dict(model="retinanet", model_args=small | dict(width=8), size=64)
    torch.manual_seed(0)
    return open_training(TaskOptions(**given | dict(task=task, data="digit_scenes") | changes))


PREFIX = {"segment": "backbone.body.", "detect": "backbone.body.body."}
BACKBONES: dict[str, dict[str, Any]] = {
    "resnet18": RESNET,
    "convnext_atto": dict(dims=[8, 8, 8, 8], depths=[1, 1, 1, 1]),  # its names get underscores
    "paca_vit_nano": {},
    "test_vit": {},
}


@pytest.mark.parametrize("task", PREFIX)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_classifiers_initialise_backbones(tmp_path: Path, task: str, backbone: str) -> None:
    if (task, backbone) == ("detect", "test_vit"):
        pytest.skip("a detector needs maps of several strides")
    model = random_model(backbone, **BACKBONES[backbone])
    training = dense(task, backbone, BACKBONES[backbone], init=save_bare(tmp_path / "x", model))
    random = dense(task, backbone, BACKBONES[backbone]).model.state_dict()
    known = {name.replace(".", "_"): weight for name, weight in model.state_dict().items()}
    prefix = PREFIX[task]
    for name, weight in training.model.state_dict().items():
        if name.startswith(prefix):
            expected = known[name.removeprefix(prefix).removeprefix("model.").replace(".", "_")]
            if "pos_embed" not in name:  # resampled to 64 pixels
                assert torch.equal(weight, expected), name
        else:
            assert torch.equal(weight, random[name]), name
    assert training.notes[0].endswith("for the backbone; the rest starts from random weights")


@pytest.mark.parametrize("task", PREFIX)
def test_dense_models_take_the_statistics_of_the_weights(tmp_path: Path, task: str) -> None:
    training = dense(task, "resnet18", RESNET, init=save_own(tmp_path / "x", random_model()))
    stored = json.loads(json.dumps(training.describe()))["preprocess"]
    assert (stored["mean"], stored["std"]) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    built, _, preprocess = training.task.build(training.describe())
    if task == "segment":
        assert preprocess == training.preprocess
        assert preprocess.size == (64, 64)
    else:
        assert built.transform.image_mean == [0.1, 0.2, 0.3]
        assert built.transform.image_std == [0.4, 0.5, 0.6]


@pytest.mark.parametrize("task", PREFIX)
def test_pretrained_backbones(pretrained: nn.Module, task: str) -> None:
    training = dense(task, "resnet10t", {}, pretrained=True)
    body = {
        n.removeprefix(PREFIX[task]): w for n, w in training.model.state_dict().items() if PREFIX[task] in n
    }
    assert body
    assert all(torch.equal(weight, pretrained.state_dict()[name]) for name, weight in body.items())
    assert training.describe()["preprocess"]["mean"] in ([0.5, 0.5, 0.5], (0.5, 0.5, 0.5))


def test_weights_of_another_dense_task_are_refused(tmp_path: Path) -> None:
    folder = save_own(tmp_path / "x", random_model())
    config = json.loads(Path(folder, "config.json").read_text())
    Path(folder, "config.json").write_text(json.dumps(config | {"task": "detect"}))
    message = "were trained to detect; give those of a classifier, or of task=segment"
    with pytest.raises(UserError, match=re.escape(message)):
        dense("segment", "resnet18", RESNET, init=folder)


def test_trained_model_keeps_the_statistics(digits: str, tmp_path: Path) -> None:
    from visualtokens.train import train

    source = save_own(tmp_path / "x", random_model(classes=3), list("abc"))
    options = TrainConfig(
        model="resnet18", model_args=RESNET, data=digits, init=source, out=str(tmp_path / "run"), epochs=1
    )
    train(options, progress=False)
    assert load(tmp_path / "run").preprocess == load(source).preprocess
