"""Batches of images with masks: repeatable, complete, whatever the workers and processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from visualtokens.data.base import Share
from visualtokens.data.decode import BadImage
from visualtokens.data.segmentation import SegmentationDataset, open_segmentation
from visualtokens.data.segmentation_loader import SegmentBatch, create_segment_loader
from visualtokens.data.segmentation_transforms import BadAnnotation, Mask, SegmentPreprocess
from visualtokens.errors import UserError

PREPROCESS = SegmentPreprocess((32, 32), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


class Ragged(SegmentationDataset):
    """Ten images of different sizes; numbers 3 and 7 cannot be read."""

    def __init__(self, bad: tuple[int, ...] = (3, 7)) -> None:
        self.spec, self.classes = "ragged", ["a", "left b", "right b"]
        self.bad = bad

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Image.Image, Mask]:
        if index in self.bad:
            raise BadAnnotation(f"{index}.png", str(index), "size", "wrong")
        size = 20 + 4 * index, 30 + index
        mask = np.random.default_rng(index).integers(0, 3, (size[1], size[0]), dtype=np.uint8)
        return Image.fromarray(np.stack([mask * 80] * 3, axis=2)), mask

    def path(self, index: int) -> str:
        return f"{index}.png"


def batches(epoch: int = 0, **options: object) -> list[SegmentBatch]:
    given = dict(batch=4, train=True, augment="photo") | options
    loader = create_segment_loader(Ragged(), PREPROCESS, **given)  # type: ignore[arg-type]
    loader.set_epoch(epoch)
    found = list(loader)
    assert len(found) == len(loader)
    return found


def same(first: list[SegmentBatch], second: list[SegmentBatch]) -> bool:
    return all(
        torch.equal(a.images, b.images) and torch.equal(a.masks, b.masks) and torch.equal(a.index, b.index)
        for a, b in zip(first, second, strict=True)
    )


def test_training_batches_are_crops_of_every_item_once() -> None:
    found = batches()
    assert [len(b) + len(b.bad) for b in found] == [4, 4, 2]
    assert sorted(i for b in found for i in b.index.tolist()) == [0, 1, 2, 4, 5, 6, 8, 9]
    assert sorted(bad.path for b in found for bad in b.bad) == ["3.png", "7.png"]
    assert {bad.reason for b in found for bad in b.bad} == {
        "annotation of image 3, size: wrong",
        "annotation of image 7, size: wrong",
    }
    for batch in found:
        assert batch.images.shape[1:] == (3, 32, 32)
        assert batch.images.dtype == torch.float32
        assert batch.masks.shape[1:] == (32, 32)
        assert batch.masks.dtype == torch.uint8


def test_seed_and_epoch_decide() -> None:
    assert same(batches(), batches())
    assert same(batches(2, seed=5), batches(2, seed=5))
    assert not same(batches(0), batches(1))
    assert not same(batches(), batches(seed=1))


@pytest.mark.parametrize("train", [True, False])
def test_workers_change_nothing(train: bool) -> None:
    options = dict(train=train, augment="photo" if train else "none")
    assert same(batches(1, **options), batches(1, workers=2, **options))


def test_processes_share_every_batch() -> None:
    whole = batches()
    shares = [batches(share=Share(part, 3)) for part in range(3)]
    for number, batch in enumerate(whole):
        together = [s[number] for s in shares]
        assert sorted(i for b in together for i in b.index.tolist()) == sorted(batch.index.tolist())


def test_a_later_start_gives_the_rest() -> None:
    loader = create_segment_loader(Ragged(), PREPROCESS, batch=4, train=True)
    loader.set_epoch(1)
    whole = list(loader)
    loader.set_epoch(1, start=2)
    assert same(whole[2:], list(loader))
    for wrong in (dict(epoch=-1), dict(epoch=0, start=4)):
        with pytest.raises(UserError):
            loader.set_epoch(**wrong)


def test_to_judge_each_image_is_whole_and_its_mask_as_it_was() -> None:
    dataset = Ragged()
    (batch,) = batches(batch=10, train=False, augment="none")
    assert batch.index.tolist() == [0, 1, 2, 4, 5, 6, 8, 9]
    for i, (image, mask) in zip(batch.index.tolist(), batch, strict=True):
        original, truth = dataset[i]
        assert image.shape == (3, *PREPROCESS.seen_size(*original.size))
        torch.testing.assert_close(image, PREPROCESS(original))
        assert mask.tolist() == truth.tolist()
    inside = torch.zeros_like(batch.masks, dtype=torch.bool)
    for i, (rows, columns) in enumerate(batch.mask_sizes.tolist()):
        inside[i, :rows, :columns] = True
    assert (batch.masks[~inside] == 255).all()
    assert (batch.masks[inside] < 3).all()


def test_a_batch_without_readable_images() -> None:
    loader = create_segment_loader(Ragged(bad=tuple(range(10))), PREPROCESS, batch=10, train=False)
    (batch,) = loader
    assert (len(batch), len(batch.bad), list(batch)) == (0, 10, [])
    assert batch.images.shape == (0, 3, 32, 32)
    assert all(isinstance(bad, BadImage) for bad in batch.bad)


def test_splitting_and_moving() -> None:
    batch = batches()[0]
    pieces = batch.split(2)
    assert sorted(i for p in pieces for i in p.index.tolist()) == sorted(batch.index.tolist())
    assert [p.bad for p in pieces] == [batch.bad, ()]
    for piece in pieces:
        for i, image in zip(piece.index, piece.images, strict=True):
            assert torch.equal(image, batch.images[batch.index == i][0])
    assert batch.split(1) == [batch]
    moved = batch.to(torch.device("cpu"), memory_format=torch.channels_last)
    assert moved.images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moved.masks, batch.masks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(batch=0), "batch=0"),
        (dict(workers=-1), "workers=-1"),
        (dict(train=False), "for training only"),
        (dict(seed=-1), "seed=-1"),
        (dict(batch=2, share=Share(0, 3)), "less than one image for each of 3"),
    ],
)
def test_wrong_options(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        batches(**options)


def test_files_through_the_loader(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("a\nb")
    for split in ("train", "val"):
        for folder in ("images", "masks"):
            (tmp_path / folder / split).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (40, 30)).save(tmp_path / f"images/{split}/{i}.jpg")
            Image.fromarray(np.full((30, 40), i, np.uint8)).save(tmp_path / f"masks/{split}/{i}.png")
    loader = create_segment_loader(
        open_segmentation(f"masks:{tmp_path}", "val"), PREPROCESS, batch=8, train=False
    )
    (batch,) = loader
    assert batch.index.tolist() == [0, 1]
    assert "annotation of image 2, pixels: 2 at row 0, column 0" in batch.bad[0].reason
