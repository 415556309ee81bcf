"""PaCa-ViT, Sec. 3.5, on a dataset: how much a metric drops when one cluster is masked in every image."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.explain.importance import normalise
from visualtokens.explain.regions import select_layers
from visualtokens.grouping import Grouping, Tap, record_groupings


@dataclass(frozen=True)
class Ranking:
    """A metric of a model on a dataset, with all of each image and without one cluster at a time."""

    layer: str  # the tap of the clusters
    full: float
    masked: tuple[float, ...]  # for each cluster

    @property
    def drops(self) -> tuple[float, ...]:
        """The importance of each cluster."""
        return tuple(self.full - value for value in self.masked)

    @property
    def order(self) -> list[int]:
        """The clusters, most important first."""
        return sorted(range(len(self.masked)), key=lambda k: (self.masked[k], k))


def rank_clusters(
    model: nn.Module, black: Tensor, evaluate: Callable[[], float], *, layer: int | None = None
) -> Ranking:
    """Evaluate once as it is and once for each cluster of ``layer``, masked with black in every image.

    ``model`` takes normalised images ``(B, 3, H, W)``, of which ``black (3, 1, 1)`` is the black pixel;
    ``evaluate`` runs it on a dataset, with whatever follows it, and returns a metric. ``layer`` is by default
    the last.
    """
    if not any(isinstance(module, Tap) for module in model.modules()):
        raise UserError(f"{type(model).__name__} has no clusters to rank: it does not group its patches")
    with record_groupings(model) as groupings:
        full = evaluate()
    (tap,) = select_layers(groupings, layer, type(model).__name__)
    masked = []
    for cluster in range(groupings[tap].tokens):
        with cluster_masked(model, black, tap=tap, cluster=cluster):
            masked.append(evaluate())
    return Ranking(tap, full, tuple(masked))


@contextlib.contextmanager
def cluster_masked(model: nn.Module, black: Tensor, *, tap: str, cluster: int) -> Iterator[None]:
    """Inside the block, the model sees its images with one cluster of a tap masked."""
    recording = False

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        nonlocal recording
        if recording:
            return None
        recording = True
        try:
            with torch.no_grad(), record_groupings(model) as groupings:
                model(*args)
        finally:
            recording = False
        return masked_images(args[0], black, groupings[tap], cluster), *args[1:]

    handle = model.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def masked_images(x: Tensor, black: Tensor, grouping: Grouping, cluster: int) -> Tensor:
    """The images ``x (B, 3, H, W)`` times 1 - H, where H is the map of a cluster in each."""
    heat = normalise(grouping.maps()[:, cluster]).unsqueeze(1).to(x)  # (B, 1, h, w)
    heat = F.interpolate(heat, size=x.shape[2:], mode="bilinear", align_corners=False)
    return x * (1 - heat) + black.to(x) * heat
