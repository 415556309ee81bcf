"""``vtok convert``: a checkpoint folder from a file of weights, or nothing and what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision

from tests.test_converters import TouchesFile
from visualtokens.checkpoint import load

Vtok = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def resnet() -> torchvision.models.ResNet:
    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=7).eval()


def test_folder_of_a_released_file(vtok: Vtok, resnet: torchvision.models.ResNet, tmp_path: Path) -> None:
    torch.save({"state_dict": resnet.state_dict(), "epoch": 90}, tmp_path / "resnet.pth")
    code, text, err = vtok("convert", "--from", "torchvision", tmp_path / "resnet.pth", tmp_path / "run")
    assert (code, err) == (0, "")
    assert text.splitlines() == [
        f"resnet18, 7 classes, saved as {tmp_path / 'run'}",
        f"try: vtok predict photo.jpg --checkpoint {tmp_path / 'run'}",
    ]
    run = load(tmp_path / "run")
    x = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(run.model(x), resnet(x))
    assert (run.preprocess.crop, run.preprocess.interpolation) == (0.875, "bilinear")
    code, _, err = vtok("convert", "--from", "torchvision", tmp_path / "resnet.pth", tmp_path / "run")
    assert code == 2
    assert "exists already; give a new or empty folder" in err


def test_weights_that_do_not_fit_are_listed(
    vtok: Vtok, resnet: torchvision.models.ResNet, tmp_path: Path
) -> None:
    state = dict(resnet.state_dict())
    del state["bn1.bias"]
    state["conv1.weight"] = torch.zeros(64, 4, 7, 7)
    state["extra\x1b"] = torch.zeros(1)
    torch.save(state, tmp_path / "resnet.pth")
    code, text, err = vtok("convert", tmp_path / "resnet.pth", tmp_path / "run", "--from", "torchvision")
    assert (code, text) == (2, "")
    assert err.splitlines() == [
        "missing: bn1.bias",
        "unknown: extra\\x1b",
        "of another shape: conv1.weight: 64×4×7×7 in the checkpoint, 64×3×7×7 in resnet18",
        f"error: '{tmp_path / 'resnet.pth'}' does not fit 'resnet18', so nothing was written: 1 missing, "
        "1 unknown, 1 of another shape",
    ]
    assert not (tmp_path / "run").exists()


def test_json(vtok: Vtok, resnet: torchvision.models.ResNet, tmp_path: Path) -> None:
    torch.save(resnet.state_dict(), tmp_path / "x.pth")
    arguments = ("convert", tmp_path / "x.pth", tmp_path / "run", "--from", "resnet18", "--json")
    assert json.loads(vtok(*arguments)[1]) == {
        "model": "resnet18",
        "model_args": {},
        "classes": 7,
        "saved": str(tmp_path / "run"),
    }


def test_no_pickled_code_is_run(vtok: Vtok, tmp_path: Path) -> None:
    torch.save({"code": TouchesFile(tmp_path / "unpickled")}, tmp_path / "x.pth")
    code, _, err = vtok("convert", tmp_path / "x.pth", tmp_path / "run", "--from", "stvit")
    assert code == 2
    assert "holds more than tensors, and pickled code is never run" in err
    assert not (tmp_path / "unpickled").exists()


def test_wrong_arguments(vtok: Vtok, tmp_path: Path) -> None:
    code, _, err = vtok("convert", tmp_path / "none.pth", tmp_path / "run", "--from", "stvit")
    assert (code, err) == (
        2,
        f"error: '{tmp_path / 'none.pth'}' is not a file; give a .pth or .safetensors file of weights\n",
    )
    torch.save({"a": torch.zeros(1)}, tmp_path / "x.pth")
    code, _, err = vtok("convert", tmp_path / "x.pth", tmp_path / "run", "--from", "torchvison")
    assert (code, "did you mean 'torchvision'?" in err) == (2, True)
    code, _, err = vtok("convert", tmp_path / "x.pth", tmp_path / "run", "--from", "swin")
    assert (code, "not a checkpoint of 'swin': its names, such as 'a', are different" in err) == (2, True)
    code, _, err = vtok("convert", tmp_path / "x.pth", "--from", "swin")
    assert (code, err) == (2, "error: OUT must be given; --help shows an example\n")
