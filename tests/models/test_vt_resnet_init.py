"""VT-ResNets initialised from ResNets: layer names, checkpoints, and sources that do not fit."""

from __future__ import annotations

import pickle
from pathlib import Path

import huggingface_hub.constants
import pytest
import safetensors.torch
import timm
import torch
import torchvision
from torch import nn

from visualtokens.errors import UserError
from visualtokens.models.vt_resnet import RESNET_LAYERS


def resnet_layers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in state.items() if k.partition(".")[0] in RESNET_LAYERS}


def resnet(library: str, name: str) -> nn.Module:
    torch.manual_seed(7)
    model = timm.create_model(name) if library == "timm" else torchvision.models.get_model(name)
    for module in model.modules():  # as after training
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.eval()


def test_layers_are_initialised_like_timms() -> None:
    ours, theirs = timm.create_model("vt_resnet18"), timm.create_model("resnet18")
    for name in resnet_layers(dict(theirs.named_parameters())):
        a, b = ours.get_parameter(name).detach(), theirs.get_parameter(name).detach()
        assert float(a.std(correction=0)) == pytest.approx(float(b.std(correction=0)), rel=0.1), name
        assert float(a.mean()) == pytest.approx(float(b.mean()), abs=0.02), name


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_layers_have_the_names_of_resnets(depth: int, library: str) -> None:
    with torch.device("meta"):
        theirs = resnet_layers(resnet(library, f"resnet{depth}").state_dict())
        ours = resnet_layers(timm.create_model(f"vt_resnet{depth}").state_dict())
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}


@pytest.mark.parametrize(
    ("library", "suffix", "depth"), [("timm", ".safetensors", 18), ("torchvision", ".pth", 50)]
)
def test_initialisation_from_a_checkpoint(tmp_path: Path, library: str, suffix: str, depth: int) -> None:
    source, path = resnet(library, f"resnet{depth}"), tmp_path / f"resnet{suffix}"
    if suffix == ".pth":
        torch.save(source.state_dict(), path)
    else:
        safetensors.torch.save_file(source.state_dict(), path)
    model = timm.create_model(f"vt_resnet{depth}", init_from=str(path), num_classes=3).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        y = source.maxpool(torch.relu(source.bn1(source.conv1(x))))
        y = source.layer3(source.layer2(source.layer1(y)))
        # Channels-last kernels round differently.
        assert torch.allclose(model.forward_intermediates(x)[1][3], y, atol=1e-5 * y.abs().max().item())


def test_initialisation_from_wrapped_and_old_checkpoints(tmp_path: Path) -> None:
    state = resnet("timm", "resnet18").state_dict()
    old = {f"module.{k}": v for k, v in state.items() if not k.endswith("num_batches_tracked")}
    torch.save({"state_dict": old, "epoch": 3}, tmp_path / "x.pth")
    model = timm.create_model("vt_resnet18", init_from=tmp_path / "x.pth")
    assert torch.equal(model.layer3[1].conv2.weight, state["layer3.1.conv2.weight"])


@pytest.mark.parametrize(
    ("source", "name", "options", "messages"),
    [
        ("resnet34", "vt_resnet18", {}, ["unexpected: layer1.2.bn1.bias", "more"]),
        ("resnet18", "vt_resnet34", {}, ["missing: layer1.2.bn1.bias", "more"]),
        (
            "resnet18",
            "vt_resnet18",
            dict(stem="small"),
            ["different shape: conv1.weight (64, 3, 7, 7) instead of (64, 3, 3, 3)"],
        ),
        (
            "resnet18",
            "vt_resnet18",
            dict(in_chans=1),
            ["conv1.weight (64, 3, 7, 7) instead of (64, 1, 7, 7)"],
        ),
    ],
)
def test_checkpoints_that_do_not_fit(
    tmp_path: Path, source: str, name: str, options: dict[str, object], messages: list[str]
) -> None:
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(timm.create_model(source).state_dict(), path)
    with pytest.raises(UserError) as error:
        timm.create_model(name, init_from=path, **options)
    assert all(message in str(error.value) for message in messages)
    assert "\n" not in str(error.value)


class Trap:
    """Runs code when unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("trapped"),)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.pth", b""),
        ("x.pth", b"not a checkpoint"),
        ("x.safetensors", b"not a checkpoint"),
        ("x.pth", pickle.dumps(Trap(), protocol=2)),
        ("x.pth", [1, 2]),
        ("x.pth", {"epoch": 3}),
    ],
)
def test_files_that_are_not_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: object
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UserError, match="is not a checkpoint"):
        timm.create_model("vt_resnet18", init_from=path)
    assert not Path("trapped").exists()


def test_pretrained_weights_that_cannot_be_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        UserError, match=r"weights of 'resnet18' cannot be downloaded: .* path of a checkpoint"
    ):
        timm.create_model("vt_resnet18", init_from="resnet18")


def test_pretrained_weights_are_timms(monkeypatch: pytest.MonkeyPatch) -> None:
    source, create = resnet("timm", "resnet18"), timm.create_model
    calls = []

    def download(name: str, **options: object) -> nn.Module:
        calls.append((name, options))
        return source

    monkeypatch.setattr(timm, "create_model", download)
    model = create("vt_resnet18", init_from="resnet18.a1_in1k", in_chans=3)
    assert calls == [("resnet18.a1_in1k", dict(pretrained=True, in_chans=3))]
    assert torch.equal(model.conv1.weight, source.conv1.weight)


def test_source_is_neither_file_nor_model() -> None:
    with pytest.raises(UserError, match="init_from='resnet19' is neither a file nor a timm model"):
        timm.create_model("vt_resnet18", init_from="resnet19")
