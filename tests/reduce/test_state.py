"""What travels from block to block: sources, sizes and positions."""

from __future__ import annotations

import pytest
import torch

import visualtokens
from tests.reduce.helpers import randn
from visualtokens.errors import UserError
from visualtokens.reduce import Pooled
from visualtokens.reduce.state import State, advance


def test_source_and_positions() -> None:
    """A joined token has the position of the patch nearest to its centroid, the first on ties."""
    # 0 0 1 2
    # 0 0 1 -
    # 3 1 1 4
    source = torch.tensor([[0, 0, 1, 2, 0, 0, 1, -1, 3, 1, 1, 4]])
    start = State(grid=(3, 4), cells=(3, 4), track=True)
    joined = Pooled(tokens=torch.zeros(1, 5, 2), assignment=source)
    state = advance(start, joined, 5, carry=True, joins=False, anchored=True)
    assert state.anchor.tolist() == [[0, 6, 3, 8, 11]]
    chosen = Pooled(chosen=torch.tensor([[1, 4]]), assignment=torch.tensor([[-1, 0, -1, -1, 1]]))
    state = advance(state, chosen, 2, carry=True, joins=False, anchored=True)
    assert state.anchor.tolist() == [[6, 11]]
    assert state.source.tolist() == [[-1, -1, 0, -1, -1, -1, 0, -1, -1, 0, 0, 1]]


def test_sizes_add_up_from_block_to_block() -> None:
    state = State(grid=(2, 2), cells=(2, 2), track=False)
    for assignment, sizes in (([[0, 1, 1, 2]], [[1, 2, 1]]), ([[1, 0, 1]], [[2, 2]])):
        k = len(sizes[0])
        pooled = Pooled(tokens=torch.zeros(1, k, 2), assignment=torch.tensor(assignment))
        state = advance(state, pooled, k, carry=True, joins=True, anchored=False)
        assert state.size.tolist() == sizes
        assert state.source is None


def test_pools_must_return_the_assignment_if_asked() -> None:
    state = State(grid=(2, 2), cells=(2, 2), track=True)
    with pytest.raises(ValueError, match="no assignment"):
        advance(state, Pooled(chosen=torch.tensor([[0]])), 1, carry=False, joins=False, anchored=False)


def test_unmerge_skips_the_prefix() -> None:
    grouping = visualtokens.Grouping.hard_from(torch.tensor([[1, 0, -1, 1]]), 2, (2, 2))
    features = randn(1, 3, 5)
    expected = torch.stack((features[0, 2], features[0, 1], torch.zeros(5), features[0, 2]))
    assert torch.equal(visualtokens.unmerge(features, grouping)[0], expected)
    with pytest.raises(UserError, match="1 features for 2 tokens"):
        visualtokens.unmerge(features[:, :1], grouping)
