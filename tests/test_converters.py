"""Released checkpoints: every parameter is renamed, and the converted models reproduce the released outputs.

``data/golden`` holds the parameter names of the released models, and their outputs for weights and images
that follow from a rule (see its README).
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from visualtokens.checkpoint import load
from visualtokens.converters import convert
from visualtokens.errors import UserError
from visualtokens.models import create_model

GOLDEN = Path(__file__).parent / "data/golden"
TINY = "pacavit_tiny_p2cconv_100_0"
MODELS = {  # released name: family, our name
    TINY: ("paca", "paca_vit_tiny"),
    "pacavit_small_p2cconv_100_0": ("paca", "paca_vit_small"),
    "pacavit_small_p2cmlp_100_0": ("paca", "paca_vit_small_mlp"),
    "pacavit_base_p2cconv_100_0": ("paca", "paca_vit_base"),
    "stvit_small": ("stvit", "stvit_small"),
    "stvit_base": ("stvit", "stvit_base"),
    "stvit_large": ("stvit", "stvit_large"),
}


def released_shapes(released: str) -> dict[str, tuple[int, ...]]:
    with (GOLDEN / f"{released}.keys.csv").open() as file:
        return {
            row["name"]: tuple(int(size) for size in row["shape"].split("x") if size)
            for row in csv.DictReader(file)
        }


def names_only(released: str = TINY) -> dict[str, Tensor]:
    """A checkpoint without values."""
    shapes = released_shapes(released)
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def golden_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    if name.endswith("num_batches_tracked"):
        return torch.tensor(0)
    if name.endswith("fold.weights"):
        return torch.eye(9).view(9, 1, 3, 3)
    n = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if name.endswith("running_var"):
        n = 1 + np.float32(0.1) * np.abs(n)
    elif len(shape) >= 2:
        scale = 8 if "clustering" in name else 0.5
        n = n * np.float32(scale / np.sqrt(np.prod(shape[1:])))
    elif name.endswith("weight"):
        n = 1 + np.float32(0.1) * n
    else:
        n = np.float32(0.1) * n
    return torch.from_numpy(n)


def golden_image(height: int, width: int) -> Tensor:
    noise = np.random.default_rng(height * 10000 + width).standard_normal((1, 3, height, width))
    return torch.from_numpy(noise.astype(np.float32))


@pytest.mark.parametrize("released", MODELS)
def test_every_name_is_converted(released: str) -> None:
    family, name = MODELS[released]
    found = convert(names_only(released), family)
    assert found.complete
    assert (found.model, found.classes) == (name, 1000)
    with torch.device("meta"):
        create_model(name).load_state_dict(found.state_dict)  # strict: every name and shape


@pytest.mark.parametrize("released", MODELS)
def test_outputs_equal_those_of_the_released_model(released: str) -> None:
    family, _ = MODELS[released]
    checkpoint = {name: golden_tensor(name, shape) for name, shape in released_shapes(released).items()}
    found = convert(checkpoint, family)
    with torch.device("meta"):  # all weights come from the checkpoint
        model = create_model(found.model, num_classes=found.classes, **found.options).eval()
    model.load_state_dict(found.state_dict, assign=True)
    outputs = json.loads((GOLDEN / f"{family}.json").read_text())
    sizes = [key.split("/")[1] for key in outputs if key.startswith(f"{released}/")]
    assert sizes
    for size in sizes:
        golden = outputs[f"{released}/{size}"]
        with torch.inference_mode():
            features = model.forward_features(golden_image(*map(int, size.split("x"))))
            pooled = model.forward_head(features, pre_logits=True)
            logits = model.get_classifier()(pooled)[0]
        assert torch.allclose(logits[:32], torch.tensor(golden["logits"]), atol=1e-4, rtol=0)
        assert logits.std().item() == pytest.approx(golden["logits_std"], abs=1e-4)
        if "features_sum" in golden:
            assert pooled.sum().item() == pytest.approx(golden["features_sum"], rel=1e-4)


def test_values_are_those_of_the_checkpoint() -> None:
    released = names_only()
    for name in ("stage2.1.attn.k.bias", "stage2.1.attn.v.bias", "norm3.weight"):
        released[name] = torch.randn(released[name].shape)
    found = convert(released, "paca").state_dict
    both = torch.cat([released["stage2.1.attn.k.bias"], released["stage2.1.attn.v.bias"]])
    assert torch.equal(found["stages.1.blocks.1.attn.kv.bias"], both)
    assert found["stages.2.norm.weight"] is released["norm3.weight"]


@pytest.mark.parametrize("wrapper", ["model", "state_dict_ema"])
def test_checkpoints_of_training_scripts(wrapper: str) -> None:
    saved = {wrapper: {f"module.{name}": t for name, t in names_only().items()}, "epoch": 299}
    assert convert(saved, "paca").complete


def test_other_or_no_classifier() -> None:
    backbone = {name: t for name, t in names_only().items() if not name.startswith("head")}
    head = {"head.weight": torch.zeros(10, 384), "head.bias": torch.zeros(10)}
    found = convert(backbone | head, "paca")
    assert (found.classes, found.complete) == (10, True)
    found = convert(backbone, "paca")
    assert (found.model, found.classes, found.missing) == ("paca_vit_tiny", 0, [])


def test_differences_are_listed() -> None:
    released = names_only()
    released["stage1.0.attn.relative.table"] = torch.zeros(3)
    del released["stage1.1.attn.v.weight"]  # a key without its value
    del released["norm2.bias"]
    released["stage3.0.mlp.fc1.bias"] = torch.zeros(7)
    found = convert(released, "paca")
    assert not found.complete
    assert found.unknown == ["stage1.0.attn.relative.table", "stage1.1.attn.k.weight"]
    assert found.missing == ["stages.0.blocks.1.attn.kv.weight", "stages.1.norm.bias"]
    assert found.misfits == ["stages.2.blocks.0.ffn.fc1.bias: 7 in the checkpoint, 1280 in paca_vit_tiny"]


# Files.


class TouchesFile:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self.path), "w")


def recommended_call(file: Path, model: str, folder: Path) -> str:
    """The call that loading a pickle recommends, with the names filled in."""
    with pytest.raises(UserError, match="is a pickle, which is not loaded") as caught:
        load(file)
    (call,) = re.findall(r"import visualtokens; .*?FOLDER\)", str(caught.value))
    return call.replace("MODEL", repr(model)).replace("FOLDER", repr(str(folder)))


@pytest.mark.parametrize("name", ["resnet18", "paca_vit_nano", "deit_tiny_distilled_patch16_224"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_call_recommended_for_a_pickle_converts_it(tmp_path: Path, name: str, wrapped: bool) -> None:
    model = create_model(name, num_classes=7).eval()
    state = model.state_dict()
    training = {"state_dict": state, "epoch": 3, "args": argparse.Namespace(lr=0.1)}
    torch.save(training if wrapped else state, tmp_path / "model.pth")
    exec(recommended_call(tmp_path / "model.pth", name, tmp_path / "run"), {})
    run = load(tmp_path / "run")
    assert run.classes == list("0123456")
    x = torch.randn(1, 3, *run.preprocess.size)
    with torch.inference_mode():
        torch.testing.assert_close(run.model(x), model(x), rtol=0, atol=0)


def test_the_recommended_call_runs_no_pickled_code(tmp_path: Path) -> None:
    state = create_model("resnet18", num_classes=7).state_dict()
    torch.save(state | {"code": TouchesFile(tmp_path / "unpickled")}, tmp_path / "model.pth")
    call = recommended_call(tmp_path / "model.pth", "resnet18", tmp_path / "run")
    with pytest.raises(UserError, match=r"model.pth holds more than tensors, and pickled code is never run"):
        exec(call, {})
    assert not (tmp_path / "unpickled").exists()
    assert not (tmp_path / "run").exists()


def test_released_files_are_saved_with_their_options(tmp_path: Path) -> None:
    shapes = released_shapes("stvit_small")
    torch.save({n: golden_tensor(n, shape) for n, shape in shapes.items()}, tmp_path / "released.pth")
    convert(tmp_path / "released.pth", "stvit").save(tmp_path / "run")
    run = load(tmp_path / "run")
    assert (run.config["architecture"], run.config["model_args"]) == ("stvit_small", {"border": "released"})


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Every single damage of a small file gives one line, or leaves tensors of the same names."""
    file = tmp_path / "model.pth"
    torch.save({"weight": torch.zeros(3), "epoch": 2}, file)
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    damaged = [whole[:size] for size in range(0, len(whole), 40)]
    for _ in range(300):
        changed = bytearray(whole)
        changed[rng.integers(len(whole))] = rng.integers(256)
        damaged.append(bytes(changed))
    messages = []
    for content in damaged:
        file.write_bytes(content)
        try:
            convert(file, "resnet18")
        except UserError as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert "\n" not in "".join(messages)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    state = create_model("resnet18", num_classes=7).state_dict()
    with pytest.raises(UserError, match="no classifier"):
        convert({n: w for n, w in state.items() if not n.startswith("fc.")}, "resnet18").save(tmp_path)
    with pytest.raises(UserError, match=r"weights differ from those of 'resnet34', the first is layer1"):
        convert(state, "resnet34").save(tmp_path)
    state["layer1.0.conv1.weight"][0] = torch.nan
    with pytest.raises(UserError, match=r"'layer1.0.conv1.weight' is not finite"):
        convert(state, "resnet18")
    with pytest.raises(UserError, match=r"no-such.pth is damaged: .*No such file"):
        convert(tmp_path / "no-such.pth", "resnet18")
    assert list(tmp_path.iterdir()) == []


def test_invalid_arguments() -> None:
    with pytest.raises(UserError, match="unknown family of checkpoints 'pacca'; did you mean 'paca'"):
        convert(names_only(), "pacca")
    with pytest.raises(UserError, match="not a checkpoint of 'paca': its names, such as 'layer1"):
        convert({"layer1.weight": torch.zeros(2)}, "paca")
    with pytest.raises(UserError, match="no tensors in the checkpoint, only 'epoch'"):
        convert({"epoch": 3}, "paca")
