"""Weights of the Hugging Face Hub and of timm, with local files in place of the network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import _registry
from torch import nn

from tests.tasks.initial import (
    PREFIX,
    Open,
    dense,
    equal,
    others,
    random_model,
    save_old_timm,
    save_timm,
)
from visualtokens.errors import UserError
from visualtokens.tasks import hub


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def metadata(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(hub, "get_hf_file_metadata", metadata)


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
        "pretrained: the weights of 'resnet10t'; their classifier is for 1,000 classes instead of 10: "
        "a new one starts from random weights"
    ]


def test_pretrained_weights_that_do_not_fit(start: Open, pretrained: nn.Module) -> None:
    with pytest.raises(UserError, match=r"the weights of 'resnet10t' do not fit its model_args: .*layer1\."):
        start(model="resnet10t", model_args={"channels": [8, 8, 8, 8]}, pretrained=True)


def test_models_without_pretrained_weights(start: Open) -> None:
    with pytest.raises(UserError) as caught:
        start(model="paca_vit_nano", model_args={}, pretrained=True)
    assert str(caught.value) == (
        "pretrained: the weights of 'paca_vit_nano' do not exist in timm; give others: --init FOLDER"
    )


def test_tag_without_pretrained_weights() -> None:
    message = r"^it do not exist in timm; give those of (resnext101_32x4d\.\w+)( or resnext101_32x4d\.\w+)*$"
    with pytest.raises(UserError, match=message):
        hub.pretrained_model(
            "resnext101_32x4d.untrained", origin="it", instead="x", model_args=dict(layers=[1, 1, 1, 1])
        )


def test_pretrained_weights_without_network(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's own error, without its waiting times."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        start(model="resnet18.a1_in1k", model_args={}, pretrained=True)
    assert str(caught.value) == (
        "pretrained: the weights of 'resnet18.a1_in1k' cannot be fetched: the Hugging Face Hub cannot be "
        "reached, and they are not in its cache on this machine; download timm/resnet18.a1_in1k where there "
        "is a network and give its folder: --init FOLDER, or set HF_HOME to a cache that has them"
    )


@pytest.mark.parametrize("task", PREFIX)
def test_pretrained_backbones(pretrained: nn.Module, task: str) -> None:
    training = dense(task, "resnet10t", {}, pretrained=True)
    body = {
        n.removeprefix(PREFIX[task]): w for n, w in training.model.state_dict().items() if PREFIX[task] in n
    }
    assert body
    assert all(torch.equal(weight, pretrained.state_dict()[name]) for name, weight in body.items())
    assert training.describe()["preprocess"]["mean"] in ([0.5, 0.5, 0.5], (0.5, 0.5, 0.5))
