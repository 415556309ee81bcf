from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visualtokens.explain.importance import TIE, combine, entropy, mask, masked_probabilities, normalise, rank

from .stubs import MEAN, STD, slow_upsample


def test_normalise_is_the_min_max_of_each_map() -> None:
    scale = torch.tensor([1, 9, 0.01, 3]).view(4, 1, 1)
    maps = torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(0)) * scale
    for one, got in zip(maps.tolist(), normalise(maps).tolist(), strict=True):
        flat = [v for row in one for v in row]
        want = [[(v - min(flat)) / (max(flat) - min(flat)) for v in row] for row in one]
        assert np.allclose(got, want, atol=1e-6)


def test_constant_maps_become_zeros_despite_rounding() -> None:
    maps = torch.tensor([0.0, 1.0, 1 / 3136, 1e-30]).view(4, 1, 1).repeat(1, 4, 4)
    maps[1, 1, 2] = torch.nextafter(maps[1, 1, 2], torch.tensor(2.0))
    assert normalise(maps).eq(0).all()


def test_entropy_against_a_loop() -> None:
    maps = torch.rand(3, 2, 4, generator=torch.Generator().manual_seed(1))
    for one, got in zip(maps, entropy(maps), strict=True):
        shares = [float(v / one.sum()) for v in one.flatten()]
        assert float(got) == pytest.approx(-sum(p * math.log(p) for p in shares), rel=1e-5)


def test_entropy_of_a_point_a_uniform_map_and_zeros() -> None:
    maps = torch.zeros(3, 2, 3)
    maps[0, 1, 1] = 0.7
    maps[1] = 0.2
    assert entropy(maps).tolist() == pytest.approx([0, math.log(6), math.log(6)], abs=1e-6)


def test_mask_blackens_pixels_and_not_normalised_values() -> None:
    generator = torch.Generator().manual_seed(2)
    pixels = torch.rand(3, 6, 10, generator=generator).numpy()
    heat = torch.rand(2, 2, 3, generator=generator)
    mean, std = np.array(MEAN).reshape(3, 1, 1), np.array(STD).reshape(3, 1, 1)
    x = torch.tensor((pixels - mean) / std, dtype=torch.float32)
    got = mask(x, torch.tensor(-mean / std, dtype=torch.float32), heat)
    for k in range(2):
        want = (pixels * (1 - slow_upsample(heat[k].numpy(), 6, 10)) - mean) / std
        assert np.allclose(got[k], want, atol=1e-5)


@pytest.mark.parametrize("clusters", [0, 5])
def test_masked_copies_are_evaluated_in_order_and_in_batches(clusters: int) -> None:
    sizes = []

    def probability(images: torch.Tensor) -> torch.Tensor:
        sizes.append(len(images))
        return images.mean((1, 2, 3))

    heat = torch.rand(clusters, 2, 2)
    got = masked_probabilities(probability, torch.ones(3, 4, 4), torch.zeros(3, 1, 1), heat, batch=2)
    assert sizes == [2] * (clusters // 2) + [1] * (clusters % 2)
    assert got.tolist() == pytest.approx([1 - float(h.mean()) for h in heat], abs=1e-6)


def test_ties_are_broken_by_entropy_then_by_number() -> None:
    importance = [0.30, 0.50, 0.50 - TIE / 2, 0.50 - TIE / 4]
    assert rank(importance, [0.0, 3.0, 1.0, 2.0]) == [2, 3, 1, 0]
    assert rank([0.1] * 4, [1.0] * 4) == [0, 1, 2, 3]


def test_a_series_of_small_differences_is_not_one_tie() -> None:
    importance = [1.0 - 0.6 * TIE * k for k in range(10)]
    order = rank(importance, [float(-k) for k in range(10)])
    assert order == [1, 0, 3, 2, 5, 4, 7, 6, 9, 8]


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 8)), max_size=12))
def test_rank_never_puts_a_clearly_less_important_cluster_first(clusters: list[tuple[float, float]]) -> None:
    importance = [c[0] for c in clusters]
    order = rank(importance, [c[1] for c in clusters])
    assert sorted(order) == list(range(len(clusters)))
    for position, k in enumerate(order):
        assert all(importance[later] - importance[k] < TIE for later in order[position + 1 :])


def test_combine_weights_maps_by_positive_importance() -> None:
    maps = np.array([[[1.0, 0.0, 0.5]], [[0.0, 1.0, 0.0]], [[0.0, 0.0, 1.0]]])
    got = combine(maps, np.array([0.4, 0.1, -0.7]))  # 0.4, 0.1, 0.2 before scaling
    assert got[0].tolist() == pytest.approx([1.0, 0.0, 1 / 3])
    assert combine(maps, np.array([0.0, -0.1, -0.5])).tolist() == [[0.0, 0.0, 0.0]]
