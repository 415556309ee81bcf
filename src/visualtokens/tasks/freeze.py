"""Freezing layers for fine-tuning: which parameters are not trained, eval mode and BatchNorm of the rest."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from timm.layers import convert_sync_batchnorm
from timm.models import group_parameters
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from visualtokens.errors import UserError
from visualtokens.tasks.timm_models import require_layers


def freeze(model: nn.Module, layers: int | Literal["backbone"], *, heads: Collection[str], name: str) -> str:
    """Exclude layers from training; return how much is trained, in words.

    ``layers`` is ``"backbone"``, everything but ``heads``, or a number N: the stem and the first N stages, of
    a plain vision transformer blocks, as the model's ``group_matcher`` groups them. ``heads`` are the names
    of the parameters outside the backbone, ``name`` that of the model.
    """
    if not heads:
        raise UserError(f"freeze={layers}: {name!r} has no head that would be trained; leave freeze out")
    parameters = dict(model.named_parameters())
    frozen = [each for each in parameters if each not in heads]
    if layers != "backbone":
        frozen = _first_layers(model, layers, heads=heads, name=name)
    for each in frozen:
        parameters[each].requires_grad_(False)
    trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
    return f"{trained:,} of {sum(p.numel() for p in parameters.values()):,} parameters are trained"


def freeze_norms(model: nn.Module, *, heads: Collection[str], name: str) -> str:
    """Exclude BatchNorm outside ``heads`` from training; return how many layers these are, in words."""
    norms = [
        module
        for prefix, module in model.named_modules()
        if isinstance(module, _BatchNorm) and f"{prefix}.weight" not in heads
    ]
    if not norms:
        raise UserError(f"freeze_norms: the backbone of {name!r} has no BatchNorm; leave it out")
    for norm in norms:
        norm.requires_grad_(False)
    return f"{len(norms)} BatchNorm layers of the backbone are not trained"


def sync_trained_norms(module: nn.Module) -> nn.Module:
    """Replace every BatchNorm that is trained by one that is synchronised over all processes.

    Frozen ones do not compute statistics.
    """
    if isinstance(module, _BatchNorm):
        trained = any(parameter.requires_grad for parameter in module.parameters())
        return convert_sync_batchnorm(module) if trained else module
    for name, child in module.named_children():
        setattr(module, name, sync_trained_norms(child))
    return module


def _first_layers(model: nn.Module, count: int, *, heads: Collection[str], name: str) -> list[str]:
    """Return the names of the parameters of the stem and of the first ``count`` stages or blocks."""
    require_layers(model, f"freeze={count}: {name!r}")
    groups = _groups(model)
    layers = [names for _, names in sorted(groups.items()) if not any(each in heads for each in names)]
    most = len(layers) - 1
    if most < 1:
        raise UserError(f"freeze={count}: {name!r} is not divided into stages or blocks; give backbone")
    if count > most:
        raise UserError(
            f"freeze={count}: {name!r} has a stem and {most} stages or blocks; give 0 to {most}, or backbone"
        )
    return [each for names in layers[: count + 1] for each in names]


def _groups(model: Any) -> dict[int, list[str]]:
    """Return the names of the parameters of each stage or block by its position, that of the stem first."""
    try:
        return group_parameters(model, model.group_matcher(coarse=True))
    except (AssertionError, NotImplementedError):  # a few timm models have no coarse groups
        return {}


def eval_frozen(module: nn.Module) -> None:
    """Put the modules of which no parameter is trained in eval mode.

    Their BatchNorm keeps its statistics, and they have no dropout or stochastic depth.
    """
    parameters = list(module.parameters())
    if not parameters:
        return
    if not any(parameter.requires_grad for parameter in parameters):
        module.eval()
        return
    for child in module.children():
        eval_frozen(child)
