"""Compression of the tokens between two models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import visualtokens
from tests.reduce.helpers import rand, randn
from visualtokens.errors import UserError
from visualtokens.reduce import METHODS

COMPRESSING = [method for method in METHODS if method != "conv"]


def blobs() -> Tensor:
    """Two images of 4 × 4 tokens in four quadrants, whose tokens differ by noise only."""
    centres = 10 * randn(2, 4, 8)
    rows, columns = torch.arange(16) // 4, torch.arange(16) % 4
    quadrant = 2 * (rows // 2) + columns // 2
    return centres[:, quadrant] + 0.01 * randn(2, 16, 8, seed=1)


@pytest.mark.parametrize("method", COMPRESSING)
def test_order_positions_and_grouping(method: str) -> None:
    torch.manual_seed(0)
    features = torch.cat((randn(2, 1, 8, seed=3), blobs()), dim=1)
    tokens, positions, grouping = visualtokens.compress(
        features, 6, method=method, significance=rand(2, 16), prefix=1
    )
    assert tokens.shape == (2, 7, 8)
    assert torch.equal(tokens[:, :1], features[:, :1])
    assert (positions.diff(dim=1) > 0).all()
    hard = grouping.hard()  # (B, N)
    assert torch.equal(hard.gather(1, positions), torch.arange(6).expand(2, 6))
    if "merge" not in method and "kmeans" not in method:
        assert torch.equal(tokens[:, 1:], features[:, 1:].gather(1, positions.unsqueeze(2).expand(-1, -1, 8)))


@pytest.mark.parametrize("method", ["kmedoids", "kmeans"])
def test_four_groups_of_equal_tokens_become_four_tokens(method: str) -> None:
    x = blobs()
    tokens, _, grouping = visualtokens.compress(x, 4, method=method)
    assert_close(visualtokens.unmerge(tokens, grouping), x, atol=0.1, rtol=0)
    assert [g.tolist() for g in grouping.size] == [[4.0] * 4] * 2


def test_all_tokens_are_kept_unchanged() -> None:
    x = randn(2, 16, 8)
    tokens, positions, _ = visualtokens.compress(x, 16)
    assert torch.equal(tokens, x)
    assert torch.equal(positions, torch.arange(16).expand(2, 16))


def test_gradients_reach_the_tokens() -> None:
    x = randn(2, 16, 8).requires_grad_()
    visualtokens.compress(x, 4, method="kmeans").tokens.sum().backward()
    assert x.grad is not None
    assert (x.grad.abs().sum(2) > 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(k=0), "k=0 of 16 tokens; give 1 to 16"),
        (dict(k=17), "k=17 of 16 tokens"),
        (dict(k=4, prefix=1), "15 tokens do not form a square"),
        (dict(k=4, grid=(3, 5)), "15 places for 16 tokens"),
        (dict(k=4, method="weighted_merge"), "weighted_merge weighs tokens; give significance"),
        (dict(k=4, method="power_bert", significance=torch.ones(2, 15)), r"give \(2, 16\)"),
        (dict(k=4, method="conv"), "conv learns its weights"),
        (dict(k=4, method="tome"), "unknown method 'tome'"),
    ],
)
def test_wrong_arguments(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        visualtokens.compress(randn(2, 16, 8), **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="give \\(B, N, C\\)"):
        visualtokens.compress(randn(16, 8), 4)
