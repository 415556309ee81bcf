from __future__ import annotations

import pytest
import torch

from visualtokens.data import BadImage, Batch


def make(count: int) -> Batch:
    images = torch.randn(count, 3, 4, 4)
    return Batch(images, torch.arange(count) % 3, torch.arange(count) + 100, (BadImage("x.png", "damaged"),))


@pytest.mark.parametrize(("count", "parts"), [(8, 1), (8, 2), (7, 3), (5, 5)])
def test_pieces_make_up_the_batch(count: int, parts: int) -> None:
    batch = make(count)
    pieces = batch.split(parts)
    assert len(pieces) == parts
    assert min(map(len, pieces)) >= 1
    assert sum(map(len, pieces)) == len(batch) == count
    for piece in pieces:
        places = piece.index - 100
        assert torch.equal(piece.images, batch.images[places])
        assert torch.equal(piece.labels, batch.labels[places])
    assert sum((piece.bad for piece in pieces), ()) == batch.bad


def test_moving_keeps_everything_and_can_change_the_order_of_memory() -> None:
    batch = make(4)
    moved = batch.to(torch.device("cpu"), memory_format=torch.channels_last)
    assert moved.images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moved.images, batch.images)
    assert torch.equal(moved.labels, batch.labels)
    assert moved.bad == batch.bad
