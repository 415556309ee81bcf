"""Batches of all tasks: splitting and moving; and the count of unreadable images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from visualtokens.data import BadImage, BadImages, Batch
from visualtokens.data.batch import ImageBatch
from visualtokens.data.detection import DetectionBatch, Objects
from visualtokens.data.segmentation import SegmentBatch
from visualtokens.errors import UserError

BAD = (BadImage("x.png", "damaged"),)


def objects(i: int) -> Objects:
    masks = torch.full((1, 4, 4), i % 2 == 0)
    return Objects(torch.full((1, 4), i), torch.tensor([i]), masks, torch.tensor([False]), torch.ones(1))


def make(kind: type[ImageBatch], count: int) -> ImageBatch:
    """A batch in which every entry of image i has the value i."""
    index = torch.arange(count)
    images = index.float().view(-1, 1, 1, 1).expand(count, 3, 4, 4).clone()
    if kind is Batch:
        return Batch(images, index.clone(), index, BAD)
    if kind is SegmentBatch:
        masks = index.to(torch.uint8).view(-1, 1, 1).expand(count, 4, 4).clone()
        sizes = index.view(-1, 1).expand(count, 2)
        return SegmentBatch(images, masks, sizes.clone(), sizes.clone(), index, BAD)
    return DetectionBatch(tuple(images), tuple(objects(i) for i in range(count)), index, BAD)


def targets(batch: ImageBatch) -> list[Tensor]:
    """The first target tensor of every image."""
    if isinstance(batch, DetectionBatch):
        return [each.boxes for each in batch.objects]
    return list(batch.labels if isinstance(batch, Batch) else batch.masks)  # type: ignore[attr-defined]


KINDS = pytest.mark.parametrize("kind", [Batch, SegmentBatch, DetectionBatch])


@KINDS
@pytest.mark.parametrize(("count", "parts"), [(8, 1), (8, 2), (7, 3)])
def test_split_keeps_images_with_their_targets(kind: type[ImageBatch], count: int, parts: int) -> None:
    batch = make(kind, count)
    pieces = batch.split(parts)
    assert len(pieces) == parts
    assert min(map(len, pieces)) >= 1
    assert sorted(i for piece in pieces for i in piece.index.tolist()) == list(range(count))
    assert [piece.bad for piece in pieces] == [BAD] + [()] * (parts - 1)
    for piece in pieces:
        for i, image, target in zip(piece.index.tolist(), piece.images, targets(piece), strict=True):
            assert (image == i).all()
            assert (target == i).all()


@KINDS
def test_images_and_targets_move_to_the_device(kind: type[ImageBatch]) -> None:
    moved = make(kind, 4).to(torch.device("meta"), memory_format=torch.channels_last)
    assert all(t.is_meta for t in (*moved.images, *targets(moved)))
    assert not moved.index.is_meta  # not used by model or loss
    assert moved.bad == BAD
    if isinstance(moved, DetectionBatch):
        assert all(t.is_meta for each in moved.objects for t in (each.labels, each.masks))


@pytest.mark.parametrize("kind", [Batch, SegmentBatch])
def test_stacked_images_take_the_memory_format(kind: type[ImageBatch]) -> None:
    batch = make(kind, 4)
    moved = batch.to(torch.device("cpu"), memory_format=torch.channels_last)
    assert moved.images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moved.images, batch.images)


def unreadable(*paths: str) -> Batch:
    nothing = torch.empty(0, dtype=torch.int64)
    bad = tuple(BadImage(path, "empty file") for path in paths)
    return Batch(torch.empty(0, 3, 4, 4), nothing, nothing, bad)


def test_each_unreadable_image_counts_once() -> None:
    bad = BadImages(100)
    for _ in range(20):
        bad.add(unreadable("a.jpg", "b.jpg"))
    bad.add(unreadable("c.jpg"))
    assert len(bad) == 3
    assert [image.path for image in bad.images] == ["a.jpg", "b.jpg", "c.jpg"]


@pytest.mark.parametrize("total", [20, 60, 140])  # 0.05 · total is not always exact in floating point
def test_exactly_the_allowed_share_is_allowed(total: int) -> None:
    bad = BadImages(total)
    bad.add(unreadable(*(str(n) for n in range(total // 20))))
    with pytest.raises(UserError):
        bad.add(unreadable("one more"))


def test_the_error_names_the_first_three_images() -> None:
    bad = BadImages(10, share=0.3)
    bad.add(unreadable("a.jpg", "b.jpg", "c.jpg"))
    with pytest.raises(UserError) as caught:
        bad.add(unreadable("d.jpg"))
    message = str(caught.value)
    assert "4 of 10 images cannot be read, more than the 30.0% allowed" in message
    assert "a.jpg (empty file); b.jpg (empty file); c.jpg (empty file); …" in message
    assert "d.jpg" not in message


def test_processes_share_one_count() -> None:
    """Each process has found one image; together they exceed the limit."""
    counts = [BadImages(10, share=0.1) for _ in range(2)]
    for count, path in zip(counts, "ab", strict=True):
        count.collect(unreadable(f"{path}.jpg").bad)

    class Team:
        def gather(self, item: list[BadImage]) -> list[list[BadImage]]:
            return [list(unreadable("a.jpg").bad), list(unreadable("b.jpg").bad)]

    for count in counts:
        count.check(Team(), 1)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="2 of 10 images"):
            count.check(Team(), 2)  # type: ignore[arg-type]
        assert (count.new, len(count)) == (0, 2)


def test_invalid_limits_are_rejected() -> None:
    with pytest.raises(UserError, match="total=0"):
        BadImages(0)
    with pytest.raises(UserError, match="share=5"):
        BadImages(10, share=5)
