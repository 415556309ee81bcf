from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visualtokens.explain.importance import TIE, combine, entropy, mask, masked_probabilities, normalise, rank

from .stubs import MEAN, STD, upsample


def test_normalise_is_min_max_of_each_map() -> None:
    maps = torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1, 9, 0.01, 3]
    ).view(4, 1, 1)
    for one, got in zip(maps.tolist(), normalise(maps).tolist(), strict=True):
        flat = [v for row in one for v in row]
        want = [[(v - min(flat)) / (max(flat) - min(flat)) for v in row] for row in one]
        assert np.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, 1 / 3136, 1e-30])
def test_a_constant_map_becomes_zeros(value: float) -> None:
    assert normalise(torch.full((1, 4, 4), value)).eq(0).all()


def test_rounding_noise_on_a_constant_map_is_not_blown_up_to_a_region() -> None:
    noisy = torch.full((1, 4, 4), 1 / 16)
    noisy[0, 1, 2] = torch.nextafter(noisy[0, 1, 2], torch.tensor(1.0))
    assert normalise(noisy).eq(0).all()


def test_entropy_against_a_loop() -> None:
    maps = torch.rand(3, 2, 4, generator=torch.Generator().manual_seed(1))
    for one, got in zip(maps, entropy(maps), strict=True):
        shares = [float(v / one.sum()) for v in one.flatten()]
        assert float(got) == pytest.approx(-sum(p * math.log(p) for p in shares), rel=1e-5)


def test_entropy_of_one_place_of_all_places_and_of_none() -> None:
    one = torch.zeros(3, 2, 3)
    one[0, 1, 1] = 0.7
    one[1] = 0.2
    assert entropy(one).tolist() == pytest.approx([0, math.log(6), math.log(6)], abs=1e-6)


def test_mask_blackens_the_picture_and_not_the_normalised_values() -> None:
    generator = torch.Generator().manual_seed(2)
    picture = torch.rand(3, 6, 10, generator=generator).numpy()
    heat = torch.rand(2, 2, 3, generator=generator)
    mean, std = np.array(MEAN).reshape(3, 1, 1), np.array(STD).reshape(3, 1, 1)
    x = torch.tensor((picture - mean) / std, dtype=torch.float32)
    got = mask(x, torch.tensor(-mean / std, dtype=torch.float32), heat)
    for k in range(2):
        want = (picture * (1 - upsample(heat[k].numpy(), 6, 10)) - mean) / std
        assert np.allclose(got[k], want, atol=1e-5)


def test_a_map_of_zeros_leaves_every_bit_of_the_input() -> None:
    x = torch.randn(3, 8, 8)
    assert mask(x, torch.tensor(-1.7).view(1, 1, 1), torch.zeros(1, 2, 2))[0].equal(x)


@pytest.mark.parametrize("clusters", [0, 1, 4, 5])
def test_masks_are_evaluated_in_bounded_batches_and_in_order(clusters: int) -> None:
    sizes = []

    def probability(pictures: torch.Tensor) -> torch.Tensor:
        sizes.append(len(pictures))
        return pictures.mean((1, 2, 3))

    heat = torch.rand(clusters, 2, 2)
    got = masked_probabilities(probability, torch.ones(3, 4, 4), torch.zeros(3, 1, 1), heat, batch=2)
    assert sizes == [2] * (clusters // 2) + [1] * (clusters % 2)
    assert got.tolist() == pytest.approx([1 - float(h.mean()) for h in heat], abs=1e-6)


def test_near_equal_clusters_are_ranked_by_lower_entropy() -> None:
    importance = [0.30, 0.50, 0.50 - TIE / 2, 0.50 - TIE / 4]
    assert rank(importance, [0.0, 3.0, 1.0, 2.0]) == [2, 3, 1, 0]


def test_equal_in_everything_keeps_the_order_of_the_clusters() -> None:
    assert rank([0.1] * 4, [1.0] * 4) == [0, 1, 2, 3]


def test_a_slope_of_small_differences_is_not_one_tie() -> None:
    """Each is near the next, but the ends are far apart; low entropy must not lift the last to the top."""
    importance = [1.0 - 0.6 * TIE * k for k in range(10)]
    order = rank(importance, [float(-k) for k in range(10)])
    assert order == [1, 0, 3, 2, 5, 4, 7, 6, 9, 8]


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 8)), max_size=30))
def test_rank_is_a_permutation_that_never_puts_a_clearly_weaker_cluster_first(
    clusters: list[tuple[float, float]],
) -> None:
    importance = [c[0] for c in clusters]
    order = rank(importance, [c[1] for c in clusters])
    assert sorted(order) == list(range(len(clusters)))
    for position, k in enumerate(order):
        assert all(importance[later] - importance[k] < TIE for later in order[position + 1 :])


def test_combine_weighs_each_map_by_its_importance_and_leaves_out_what_speaks_against() -> None:
    maps = np.array([[[1.0, 0.0]], [[0.0, 1.0]], [[0.5, 1.0]]])
    importance = np.array([0.2, 0.1, -0.7])
    assert combine(maps, importance).tolist() == [[1.0, 0.0]]
    assert combine(maps, np.array([0.1, 0.3, 0.2])).tolist() == [[0.0, 1.0]]
    mixed = combine(np.array([[[1.0, 0.0, 0.5]], [[0.0, 1.0, 0.0]]]), np.array([0.4, 0.1]))  # 0.4, 0.1, 0.2
    assert mixed[0].tolist() == pytest.approx([1.0, 0.0, 1 / 3])


@pytest.mark.parametrize("importance", [[0.0, 0.0], [-0.1, -0.5]])
def test_nothing_that_matters_is_an_empty_map(importance: list[float]) -> None:
    assert combine(np.eye(2).reshape(2, 1, 2), np.array(importance)).tolist() == [[0.0, 0.0]]
