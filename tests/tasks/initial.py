"""Small models and the files from which their weights can be loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from torch import Tensor, nn

from tests.test_converters import released_shapes
from visualtokens.checkpoint import save_checkpoint
from visualtokens.data import Preprocess
from visualtokens.tasks.options import TaskOptions
from visualtokens.tasks.task import Training, open_training
from visualtokens.tasks.timm_models import build_model

DIGITS = [str(i) for i in range(10)]
RESNET: dict[str, Any] = dict(channels=[8, 8, 8, 8])
VIT: dict[str, Any] = dict(embed_dim=24, depth=2, num_heads=3)

Open = Callable[..., Training[Any]]


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


def others(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in model.state_dict().items() if not name.startswith("fc.")}


def dense(task: str, backbone: str, args: dict[str, Any], **changes: Any) -> Training[Any]:
    small = dict(backbone=backbone, backbone_args=args)
    if task == "segment":
        given = dict(model="fpn", model_args=small | dict(head_args=dict(dim=8, width=8)), size=64)
    else:
        given = dict(model="retinanet", model_args=small | dict(width=8), size=64)
    torch.manual_seed(0)
    return open_training(TaskOptions(**given | dict(task=task, data="digit_scenes") | changes))


PREFIX = {"segment": "backbone.body.", "detect": "backbone.body.body."}


def save_released(path: Path, released: str, classes: int = 1000) -> dict[str, float]:
    """Write a checkpoint in which every weight has a value of its own, and return the values."""
    weights, values = {}, {}
    for i, (name, shape) in enumerate(released_shapes(released).items()):
        values[name] = float(i)
        shape = (classes, *shape[1:]) if name.startswith("head.") else shape
        weights[name] = torch.tensor(values[name]).expand(shape)  # one number in the file
    torch.save({"model": weights}, path)
    return values
