"""An entry of the papers' tables: a model and how its costs are counted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import visualtokens.models  # noqa: F401  registers our models with timm
from visualtokens.papers.counting import DEFAULT_METRICS, Metric, Size

Build = Callable[[], nn.Module]


@dataclass(frozen=True, eq=False)
class Other:
    """A second way of counting a metric."""

    name: str
    count: Metric


@dataclass(frozen=True, eq=False)
class Entry:
    """A model and the functions that compute its published metrics, some of them in a second way."""

    build: Build
    metrics: Mapping[str, Metric] = field(default_factory=lambda: DEFAULT_METRICS)
    other: Mapping[str, Other] = field(default_factory=dict)
    size: Size | None = None  # of the image, where published.csv has none


class NoInit(TorchFunctionMode):
    """Skips the initialisation of weights, which takes time even on the meta device, without values."""

    SKIPPED = frozenset({"uniform_", "normal_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.SKIPPED and args and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


@functools.cache
def meta_model(constructor: Callable[..., nn.Module], *args: Any, **options: Any) -> nn.Module:
    """The model in eval mode on the meta device; the same object for the same arguments."""
    with torch.device("meta"), NoInit():
        return constructor(*args, **options).eval()


def timm_model(name: str, **options: Any) -> Build:
    """Builds a model that is registered with timm."""
    return functools.partial(meta_model, timm.create_model, name, **options)
