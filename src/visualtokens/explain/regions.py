"""Disjoint regions of the patch grid: the players of an explanation.

They come from the groupings of one or several layers, or from the features of a model that groups nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.explain.features import descriptors, record_features
from visualtokens.grouping import Grouping

Ints = NDArray[np.int64]
Floats = NDArray[np.floating]

SAME = 0.8  # correlation of two maps above which their clusters count as one
LAST = -1  # layer
FEW = 3  # regions: with no more, there is little to choose from
# Regions by default, at most: a model's own tokens, and regions made from its features. After 128 forward
# passes of a ViT-B/16, the intervals of the three largest values are ±9 to 42 % of the value with 12 regions,
# ±30 to 71 % with 16 and ±53 to 131 % with 24 (two photos, hide="tokens").
OWN, MADE = 24, 12


@dataclass(frozen=True, eq=False)
class Regions:
    """K disjoint regions that cover the patch grid."""

    labels: Ints  # (h, w): the region of each patch, 0 to K - 1
    source: str  # the layer that they come from

    @property
    def count(self) -> int:
        """K."""
        return int(self.labels.max()) + 1

    @property
    def sizes(self) -> Ints:
        """``(K,)``: the number of patches of each region."""
        return np.bincount(self.labels.ravel(), minlength=self.count)

    @property
    def scattered(self) -> bool:
        """Whether the regions consist of many small pieces, as the clusters of an untrained model do.

        K compact regions on N patches separate about √(K / N) of the pairs of neighbours; four times as many
        count as scattered.
        """
        across, down = self.labels[:, 1:] != self.labels[:, :-1], self.labels[1:] != self.labels[:-1]
        apart = np.concatenate((across.ravel(), down.ravel())).mean()
        return bool(apart > 4 * np.sqrt(self.count / self.labels.size))

    @property
    def vague(self) -> bool:
        """Whether the regions all show the same few places, or many places at once."""
        return self.count <= FEW or self.scattered

    def masks(self) -> NDArray[np.float32]:
        """``(K, h, w)``: 1 inside each region, 0 outside."""
        return (self.labels == np.arange(self.count)[:, None, None]).astype(np.float32)


def find_regions(
    model: nn.Module,
    x: Tensor,
    groupings: Mapping[str, Grouping],
    *,
    regions: int | Ints | None,
    layer: int | Sequence[int] | None = None,
) -> Regions:
    """At most ``regions`` regions of the image ``x (1, 3, H, W)``, or those of the given labels ``(h, w)``.

    From the model's ``groupings`` of this image at ``layer``, or from its features if there are none. By
    default the last layer, or the features if its regions are vague and the model has feature maps.
    """
    if regions is not None and not isinstance(regions, int):
        labels = np.asarray(regions)
        if labels.ndim != 2 or not np.issubdtype(labels.dtype, np.integer):
            raise UserError(f"regions has shape {labels.shape} and type {labels.dtype}; give integers (h, w)")
        return Regions(consecutive(labels), "given")
    if regions is not None and regions < 2:
        raise UserError(f"regions={regions}; give at least 2")
    kind, grouped = type(model).__name__, None
    if groupings:
        taps = select_layers(groupings, layer, kind)
        chosen, source = [groupings[tap] for tap in taps], ", ".join(taps)
        grouped = regions_of_groupings(chosen, count=OWN if regions is None else regions, source=source)
        if layer is not None or not grouped.vague or (regions is not None and regions <= FEW):
            return grouped
    elif layer is not None:
        raise UserError(f"layer={layer}, but {kind} does not group its patches; leave layer out")
    layers = record_features(model, x)
    if layers:
        features, source = descriptors(layers)
        return regions_of_features(features, count=MADE if regions is None else regions, source=source)
    if grouped is None:
        raise UserError(
            f"{kind} has neither transformer blocks nor feature maps on a grid of the image; "
            "give regions=labels (h, w)"
        )
    return grouped


def select_layers(
    groupings: Mapping[str, Grouping], layer: int | Sequence[int] | None, kind: str
) -> list[str]:
    """The taps of one or several layers, by default the last, counted among those that have tokens.

    Published reduction schedules end with the class token alone, so the last blocks may have none.
    """
    taps = [tap for tap, grouping in groupings.items() if grouping.tokens]
    count = len(taps)
    if not count:
        raise UserError(f"{kind} has no tokens left on this image; reduce it with a larger keep")
    layer = LAST if layer is None else layer
    chosen = [layer] if isinstance(layer, int) else list(layer)
    for one in chosen:
        if not -count <= one < count:
            raise UserError(f"layer={one}, but {kind} made {count} groupings; give {-count} to {count - 1}")
    return [taps[one] for one in chosen]


def regions_of_groupings(groupings: Sequence[Grouping], *, count: int, source: str) -> Regions:
    """At most ``count`` regions from the groupings of one image, of one or several layers.

    Soft clusters become disjoint by the largest weight, after near-duplicates are merged; hard groupings are
    used as they are. The divisions of several layers are intersected on the finest grid. If there are more
    regions than ``count``, adjacent ones that belong to similar tokens are merged. Patches that no token
    represents are a region of their own.
    """
    grid = max((grouping.grid for grouping in groupings), key=lambda g: g[0] * g[1])
    labels = np.zeros(grid, dtype=np.int64)
    membership = []
    for grouping in groupings:
        weights = merged_weights(grouping)  # (N, K)
        own = np.where(weights.max(1, initial=0) > 0, weights.argmax(1), weights.shape[1])
        fine = _resize_labels(own.reshape(grouping.grid), grid)
        labels = labels * (int(fine.max()) + 1) + fine
        shares = weights / np.maximum(weights.sum(1, keepdims=True), 1e-12)
        rows = _resize_labels(np.arange(len(shares)).reshape(grouping.grid), grid)
        membership.append(shares[rows.ravel()])
    labels = consecutive(labels)
    return Regions(coarsen(labels, np.concatenate(membership, axis=1), count), source)


def merged_weights(grouping: Grouping) -> Floats:
    """``(N, K')``: the weights of the first image, with the columns of near-duplicate clusters added up.

    Two clusters are near-duplicates if the correlation of their maps is above ``SAME``.
    """
    weights = grouping.dense()[0].float().cpu()  # (N, K)
    if weights.shape[1] < 2:
        return weights.numpy()
    unit = F.normalize(weights - weights.mean(0), dim=0)
    leader = distinct((unit.T @ unit).numpy(), order=torch.argsort(-weights.sum(0), stable=True).tolist())
    merged = np.zeros((len(weights), weights.shape[1]), dtype=np.float32)
    np.add.at(merged.T, leader, weights.numpy().T)
    return merged[:, np.unique(leader)]


def distinct(similarity: Floats, *, order: Sequence[int], above: float = SAME) -> Ints:
    """``(K,)``: the first cluster in ``order`` to which each is more similar than ``above``, or itself."""
    leader = np.full(len(similarity), -1)
    leaders: list[int] = []
    for k in order:
        close = [other for other in leaders if similarity[k, other] > above]
        leader[k] = close[0] if close else k
        leaders += [] if close else [k]
    return leader


def regions_of_features(features: Tensor, *, count: int, source: str, place: float = 0.5) -> Regions:
    """``count`` connected regions of patches with similar features ``(h, w, C)``.

    ``place`` is the weight of a patch's position in the distance: without it, regions would have long arms.
    """
    h, w, channels = features.shape
    points = features.reshape(h * w, channels).float().cpu().numpy()
    spread = float(np.sqrt(((points - points.mean(0)) ** 2).sum(1).mean()))
    rows, columns = np.meshgrid(np.arange(h), np.arange(w), indexing="ij")
    position = np.stack((rows, columns), axis=2).reshape(-1, 2) / max(h, w)  # 0 to 1
    position = (position - position.mean(0)) / max(float(position.std()) * 2**0.5, 1e-12)
    points = np.concatenate((points, place * spread * position), axis=1)
    return Regions(coarsen(np.arange(h * w).reshape(h, w), points, count), source)


def coarsen(labels: Ints, points: Floats, count: int) -> Ints:
    """Merge adjacent regions of ``labels (h, w)`` until ``count`` remain, by Ward's criterion.

    Each merge is the one that adds least to the squared distances of the patches' ``points (N, C)`` from the
    means of their regions, so a division into fewer regions consists of unions of those of a finer one.
    """
    sizes = np.bincount(labels.ravel()).astype(np.float64)  # (K,)
    k = len(sizes)
    means = np.zeros((k, points.shape[1]))
    np.add.at(means, labels.ravel(), points)
    means /= sizes[:, None]
    squares = (means**2).sum(1)
    distance = np.maximum(squares[:, None] + squares - 2 * means @ means.T, 0)
    adjacent = adjacency(labels)
    leader = np.arange(k)
    alive = np.ones(k, dtype=bool)
    cost = np.where(adjacent, _ward(distance, sizes), np.inf)
    while alive.sum() > count:
        if not np.isfinite(cost.min()):  # no two regions touch: consider all pairs
            adjacent = alive[:, None] & alive & ~np.eye(k, dtype=bool)
            cost = np.where(adjacent, _ward(distance, sizes), np.inf)
        a, b = sorted(divmod(int(cost.argmin()), k))
        _merge(a, b, means, sizes, distance, adjacent, cost)
        alive[b] = False
        leader[leader == b] = a
    return consecutive(leader[labels])


def _ward(distance: Floats, sizes: Floats) -> Floats:
    return sizes[:, None] * sizes / (sizes[:, None] + sizes) * distance


def _merge(
    a: int, b: int, means: Floats, sizes: Floats, distance: Floats, adjacent: NDArray[np.bool_], cost: Floats
) -> None:
    """Join region b to region a, in place."""
    means[a] = (sizes[a] * means[a] + sizes[b] * means[b]) / (sizes[a] + sizes[b])
    sizes[a] += sizes[b]
    distance[a] = distance[:, a] = ((means - means[a]) ** 2).sum(1)
    adjacent[a] |= adjacent[b]
    adjacent[:, a] |= adjacent[:, b]
    adjacent[b] = adjacent[:, b] = False
    adjacent[a, a] = False
    cost[b] = cost[:, b] = np.inf
    row = np.where(adjacent[a], sizes[a] * sizes / (sizes[a] + sizes) * distance[a], np.inf)
    cost[a] = cost[:, a] = row


def adjacency(labels: Ints) -> NDArray[np.bool_]:
    """``(K, K)``: whether two regions share an edge of the grid."""
    k = int(labels.max()) + 1
    out = np.zeros((k, k), dtype=bool)
    for one, other in ((labels[:-1], labels[1:]), (labels[:, :-1], labels[:, 1:])):
        out[one, other] = out[other, one] = True
    np.fill_diagonal(out, False)
    return out


def consecutive(labels: Ints) -> Ints:
    """The labels as 0 to K - 1, in the order of their first patches."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse].reshape(labels.shape)


def _resize_labels(labels: Ints, grid: tuple[int, int]) -> Ints:
    """Nearest-neighbour resizing."""
    rows = (np.arange(grid[0]) + 0.5) * labels.shape[0] / grid[0]
    columns = (np.arange(grid[1]) + 0.5) * labels.shape[1] / grid[1]
    return labels[rows.astype(int)[:, None], columns.astype(int)]
