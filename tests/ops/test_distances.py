"""Squared distances against differences; symmetric and non-negative, as k-medoids requires."""

from __future__ import annotations

import torch
from torch import Tensor

from visualtokens.ops.distances import nearest_distance, nearest_index, origin, squared_distances

from .helpers import assert_close, randn


def differences(x: Tensor, y: Tensor) -> Tensor:
    return (x.unsqueeze(2) - y.unsqueeze(1)).square().sum(3)


def test_squared_distances() -> None:
    x = randn(2, 17, 5, seed=5)
    x[:, 9] = x[:, 4]
    result = squared_distances(x)
    assert_close(result, differences(x, x))
    assert torch.equal(result, result.mT)
    assert (result.diagonal(dim1=1, dim2=2) == 0).all()


def test_squared_distances_are_never_negative() -> None:
    """Between nearly equal tokens the rounding error exceeds the distance, in either direction."""
    close = randn(1, 2, 64, seed=6).repeat(1, 30, 1) + 1e-5 * randn(1, 60, 64, seed=7)
    assert (squared_distances(close.float()) >= 0).all()


def test_nearest() -> None:
    x, others = randn(2, 17, 5, seed=5), randn(2, 6, 5, seed=6)
    expected = differences(x, others).min(2)
    assert_close(nearest_distance(x, others), expected.values)
    assert torch.equal(nearest_index(x, others), expected.indices)


def test_origin_is_the_median_of_the_first_middle_and_last_token() -> None:
    x = randn(2, 9, 5, seed=7)
    assert torch.equal(origin(x), x[:, [0, 4, 8]].median(1, keepdim=True).values)
    assert torch.equal(origin(x[:, :1]), x[:, :1])
