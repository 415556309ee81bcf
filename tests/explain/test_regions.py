from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from torch import nn

from visualtokens.errors import UserError
from visualtokens.explain.features import descriptors, record_features
from visualtokens.explain.regions import (
    Regions,
    adjacency,
    coarsen,
    consecutive,
    find_regions,
    merged_weights,
    regions_of_features,
    regions_of_groupings,
)
from visualtokens.grouping import Grouping


def soft(maps: torch.Tensor) -> Grouping:
    """A grouping of maps (K, h, w)."""
    return Grouping.soft(maps.flatten(1).T.unsqueeze(0), (maps.shape[1], maps.shape[2]))


def parts(labels: np.ndarray) -> int:
    """The number of connected parts of all regions together."""
    seen, found = np.zeros(labels.shape, dtype=bool), 0
    for start in np.ndindex(labels.shape):
        if seen[start]:
            continue
        found += 1
        stack = [start]
        while stack:
            y, x = stack.pop()
            if seen[y, x]:
                continue
            seen[y, x] = True
            around = [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
            inside = [p for p in around if 0 <= p[0] < labels.shape[0] and 0 <= p[1] < labels.shape[1]]
            stack += [p for p in inside if labels[p] == labels[y, x]]
    return found


def test_near_duplicate_clusters_are_one_region() -> None:
    torch.manual_seed(0)
    left, right = torch.zeros(4, 6), torch.zeros(4, 6)
    left[:, :3], right[:, 3:] = 1.0, 1.0
    maps = torch.stack([left, left * 0.9 + 0.02 * torch.rand(4, 6), right, right + 0.05 * torch.rand(4, 6)])
    assert merged_weights(soft(maps)).shape == (24, 2)
    found = regions_of_groupings([soft(maps)], count=10, source="tap")
    assert found.labels.tolist() == [[0, 0, 0, 1, 1, 1]] * 4
    assert found.sizes.tolist() == [12, 12]
    assert found.masks().sum(0).min() == 1


def test_hard_groupings_stay_as_they_are_and_dropped_patches_are_a_region() -> None:
    assignment = torch.tensor([[0, 0, 1, 1], [2, -1, 1, 0], [2, 2, 2, 0]]).flatten()
    found = regions_of_groupings([Grouping.hard_from(assignment[None], 3, (3, 4))], count=24, source="tap")
    assert np.array_equal(found.labels, consecutive(np.where(assignment < 0, 3, assignment).reshape(3, 4)))
    assert found.count == 4


def test_layers_are_intersected_on_the_finest_grid() -> None:
    rows = torch.tensor([[0, 0, 1, 1]])  # of a 2×2 grid: upper and lower half
    columns = torch.arange(16).remainder(4).div(2, rounding_mode="floor")[None]  # left and right half
    groupings = [Grouping.hard_from(rows, 2, (2, 2)), Grouping.hard_from(columns, 2, (4, 4))]
    found = regions_of_groupings(groupings, count=24, source="both")
    assert found.labels.tolist() == [[0, 0, 1, 1]] * 2 + [[2, 2, 3, 3]] * 2
    assert regions_of_groupings(groupings, count=3, source="both").count == 3


@pytest.mark.parametrize("count", [2, 7, 20])
def test_regions_of_features_are_connected_and_nested(count: int) -> None:
    torch.manual_seed(1)
    features = torch.randn(8, 9, 5)
    fine = regions_of_features(features, count=30, source="").labels
    found = regions_of_features(features, count=count, source="").labels
    assert parts(found) == found.max() + 1 == count
    assert all(len(np.unique(found[fine == k])) == 1 for k in range(30))


def test_regions_follow_the_features() -> None:
    features = torch.zeros(6, 6, 2)
    features[1:4, 2:5] = 1.0
    labels = regions_of_features(features, count=2, source="", place=0.1).labels
    assert np.array_equal(labels == labels[2, 3], features[..., 0].numpy() == 1)


def test_coarsen_merges_the_cheapest_adjacent_pair() -> None:
    """Against the sum of squares before and after each possible merge."""
    rng = np.random.default_rng(0)
    labels, points = np.arange(12).reshape(3, 4), rng.normal(size=(12, 2))

    def squares(division: np.ndarray) -> float:
        return sum(
            ((p - p.mean(0)) ** 2).sum() for k in np.unique(division) for p in [points[division.ravel() == k]]
        )

    current = labels
    for count in range(11, 1, -1):
        pairs = np.argwhere(np.triu(adjacency(current)))
        merges = [consecutive(np.where(current == b, a, current)) for a, b in pairs]
        current = min(merges, key=squares)
        assert np.array_equal(coarsen(labels, points, count), current)


class Untidy(nn.Module):
    """A CNN with maps of 16×16, 8×8 and 2×2, called more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 4, 2, 2), nn.Conv2d(4, 6, 2, 2)
        self.deep, self.head = nn.Conv2d(6, 5, 4, 4), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.deep(self.body(self.stem(x).relu()).relu()).mean((2, 3)))


def test_features_of_a_cnn_are_its_last_maps_of_every_resolution() -> None:
    model, x = Untidy().eval(), torch.randn(1, 3, 32, 32)
    layers = record_features(model, x)
    assert [(one.layer, tuple(one.values.shape)) for one in layers] == [
        ("stem", (16, 16, 4)),
        ("body", (8, 8, 6)),
        ("deep", (2, 2, 5)),
    ]
    joined, source = descriptors(layers)
    assert (tuple(joined.shape), source) == ((16, 16, 15), "deep")
    assert not any(module._forward_hooks for module in model.modules())


def test_given_labels_and_errors() -> None:
    x = torch.randn(1, 3, 32, 32)
    assert find_regions(Untidy(), x, {}, regions=np.array([[7, 3], [3, 9]])).labels.tolist() == [
        [0, 1],
        [1, 2],
    ]
    with pytest.raises(UserError, match="at least 2"):
        find_regions(Untidy(), x, {}, regions=1)
    with pytest.raises(UserError, match=r"integers \(h, w\)"):
        find_regions(Untidy(), x, {}, regions=np.zeros(4))
    with pytest.raises(UserError, match="neither transformer blocks nor feature maps"):
        find_regions(nn.Flatten(), x, {}, regions=4)


def test_default_numbers_of_regions() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=96, depth=2).eval()
    x = torch.randn(1, 3, 96, 96)
    with torch.no_grad():
        assert find_regions(vit, x, {}, regions=None).count == 12
        own = {"tap": Grouping.hard_from(torch.arange(36)[None] // 2, 18, (6, 6))}
        assert find_regions(vit, x, own, regions=None).count == 18
        assert find_regions(vit, x, own, regions=5).count == 5


def test_vague_groupings_give_way_to_features_if_there_are_any() -> None:
    x, weights = torch.randn(1, 3, 32, 32), torch.rand(1, 64, 2).softmax(2)
    groupings = {"layer": Grouping.soft(weights, (8, 8))}
    assert find_regions(Untidy().eval(), x, groupings, regions=6).source == "deep"
    assert find_regions(nn.Flatten(), x, groupings, regions=6).source == "layer"


def test_a_given_layer_is_used_even_if_its_groupings_are_vague() -> None:
    x, weights = torch.randn(1, 3, 32, 32), torch.rand(1, 64, 2).softmax(2)
    groupings = {"layer": Grouping.soft(weights, (8, 8))}
    assert find_regions(Untidy().eval(), x, groupings, regions=6, layer=-1).source == "layer"
    with pytest.raises(UserError, match="layer=-1, but Untidy does not group its patches"):
        find_regions(Untidy().eval(), x, {}, regions=6, layer=-1)


def test_scattered_regions() -> None:
    rng = np.random.default_rng(0)
    rows, columns = np.indices((40, 72))
    compact = Regions(rows // 10 * 4 + columns // 18, "blocks")
    assert not compact.scattered
    noise = compact.labels.copy()
    patches = rng.random(noise.shape) < 0.3
    noise[patches] = rng.integers(compact.count, size=int(patches.sum()))
    assert Regions(noise, "noise").scattered
    assert not Regions(np.arange(196).reshape(14, 14), "one patch each").scattered
