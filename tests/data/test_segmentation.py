"""Segmentation: augmenting images with their masks, and batches of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from visualtokens.data import Share, open_segmentation
from visualtokens.data.decode import BadAnnotation
from visualtokens.data.published_classes import ADE20K, COCO_STUFF, LIP
from visualtokens.data.segmentation import (
    SEGMENT_PRESETS,
    Mask,
    SegmentationDataset,
    SegmentAugment,
    SegmentBatch,
    SegmentPreprocess,
    create_segment_loader,
    mirrored_classes,
)
from visualtokens.data.transforms import as_augment
from visualtokens.errors import UserError

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def preprocess(*size: int, **options: object) -> SegmentPreprocess:
    return SegmentPreprocess((size[0], size[-1]), MEAN, STD, **options)  # type: ignore[arg-type]


def marked(height: int, width: int) -> tuple[Image.Image, np.ndarray]:
    """Coloured blocks of 8×8 pixels, and a mask of their classes: class = red // 16."""
    blocks = np.random.default_rng(1).integers(0, 15, (-(-height // 8), -(-width // 8)), dtype=np.uint8)
    mask = np.kron(blocks, np.ones((8, 8), np.uint8))[:height, :width]
    pixels = np.stack([mask * 16, 200 - mask, np.full_like(mask, 90)], axis=2)
    return Image.fromarray(pixels), mask


@pytest.mark.parametrize(
    ("width", "height", "seen"),
    [(200, 100, (64, 128)), (100, 200, (128, 64)), (64, 64, (64, 64)), (10, 10, (64, 64))],
)
def test_the_short_side_is_that_of_the_model(width: int, height: int, seen: tuple[int, int]) -> None:
    assert preprocess(64).seen_size(width, height) == seen


def test_images_of_any_size_are_resized() -> None:
    small = preprocess(64)
    assert small.seen_size(1, 1) == (64, 64)
    assert small.seen_size(2000, 1) == (1, 256)  # the long side is at most four times as long
    assert small.seen_size(1, 2000) == (256, 1)
    assert preprocess(64, longest=100).seen_size(300, 100) == (33, 100)
    for size in ((1, 1), (2000, 1)):
        x = small(Image.new("RGB", size, "white"))
        assert x.shape == (3, *small.seen_size(*size))
        torch.testing.assert_close(x[:, 0, 0], (1 - torch.tensor(MEAN)) / torch.tensor(STD))


def test_images_are_stretched_without_keep_ratio() -> None:
    stretch = preprocess(30, 50, keep_ratio=False)
    assert stretch.seen_size(7, 900) == (30, 50)
    assert stretch(Image.new("RGB", (7, 9))).shape == (3, 30, 50)


def test_the_default_crop_is_the_image() -> None:
    image, mask = marked(64, 64)
    pixels, truth = SegmentAugment()(image, mask, preprocess(64), np.random.default_rng(0), mirror=range(15))
    assert pixels.dtype == truth.dtype == torch.uint8
    assert type(pixels) is type(truth) is torch.Tensor
    assert torch.equal(pixels, torch.from_numpy(np.array(image)).permute(2, 0, 1))
    assert torch.equal(truth, torch.from_numpy(mask))


def test_image_and_mask_change_together() -> None:
    """After random scaling, cropping and flipping, the colour of a pixel still determines its class."""
    image, mask = marked(64, 96)
    augment = SegmentAugment(scale=(1.0, 3.0), flip=0.5)
    for seed in range(8):
        pixels, truth = augment(image, mask, preprocess(64), np.random.default_rng(seed), mirror=range(15))
        assert pixels.shape == (3, 64, 64)
        agree = (pixels[0].float() / 16).round() == truth
        assert agree.float().mean() > 0.7  # all but the antialiased edges of the blocks
        assert len(truth.unique()) > 3


def test_padding_is_ignored() -> None:
    image, mask = marked(64, 64)
    half = SegmentAugment(scale=(0.5, 0.5))
    pixels, truth = half(image, mask, preprocess(64), np.random.default_rng(0), mirror=range(15))
    assert (truth != 255).nonzero().amax(0).tolist() == [31, 31]
    assert (truth[:32, :32] != 255).all()
    assert pixels[:, -1, -1].tolist() == [round(255 * m) for m in MEAN]


def test_a_flip_swaps_left_and_right_classes() -> None:
    image, mask = marked(32, 32)
    mirror = [1, 0, *range(2, 15)]
    flip = SegmentAugment(flip=1.0)
    pixels, truth = flip(image, mask, preprocess(32), np.random.default_rng(0), mirror=mirror)
    expected = np.array([*mirror], np.uint8)[mask[:, ::-1]]
    assert truth.tolist() == expected.tolist()
    assert torch.equal(pixels.flip(2), torch.from_numpy(np.array(image)).permute(2, 0, 1))
    mask[:] = 255
    assert flip(image, mask, preprocess(32), np.random.default_rng(0), mirror=mirror)[1].unique() == 255


def test_colour_jitter_keeps_the_mask() -> None:
    image, mask = marked(32, 32)
    jitter = SegmentAugment(brightness=0.5, contrast=0.5, saturation=0.5, hue=0.3)
    pixels, truth = jitter(image, mask, preprocess(32), np.random.default_rng(0), mirror=range(15))
    assert truth.tolist() == mask.tolist()
    assert not torch.equal(pixels, torch.from_numpy(np.array(image)).permute(2, 0, 1))


@pytest.mark.parametrize("preset", SEGMENT_PRESETS)
@pytest.mark.parametrize("size", [(1, 200), (40, 30)])
def test_every_preset_is_repeatable_for_any_size(preset: str, size: tuple[int, int]) -> None:
    image, mask = Image.new("RGB", size), np.zeros((size[1], size[0]), np.uint8)
    augment = SEGMENT_PRESETS[preset]
    first = augment(image, mask, preprocess(48, 64), np.random.default_rng(5), mirror=[0])
    again = augment(image, mask, preprocess(48, 64), np.random.default_rng(5), mirror=[0])
    assert first[0].shape == (3, 48, 64)
    assert first[1].shape == (48, 64)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_digits_are_never_mirrored() -> None:
    assert SEGMENT_PRESETS["digits"].flip == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(scale=(2.0, 1.0)), r"scale=\(2.0, 1.0\) is not a range"),
        (dict(flip=1.5), "flip=1.5 is not between 0 and 1"),
        (dict(hue=0.6), "hue=0.6 is not between 0 and 0.5"),
    ],
)
def test_invalid_augmentation_is_rejected(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SegmentAugment(**options)


def test_invalid_preprocessing_and_presets_are_rejected() -> None:
    with pytest.raises(UserError, match="size="):
        preprocess(0)
    with pytest.raises(UserError, match="std above 0"):
        SegmentPreprocess((1, 1), MEAN, (0, 1, 1))
    with pytest.raises(UserError, match="longest=10 is less than the short side, 64"):
        preprocess(64, longest=10)
    with pytest.raises(UserError, match="unknown augmentation 'phot'; did you mean 'photo'"):
        as_augment("phot", SEGMENT_PRESETS)


def test_left_and_right_classes_are_mirrored() -> None:
    mirrored = mirrored_classes(LIP)
    assert {LIP[i]: LIP[j] for i, j in enumerate(mirrored) if i != j} == {
        "left arm": "right arm",
        "right arm": "left arm",
        "left leg": "right leg",
        "right leg": "left leg",
        "left shoe": "right shoe",
        "right shoe": "left shoe",
    }
    assert [mirrored[mirrored[i]] for i in range(20)] == list(range(20))
    assert mirrored_classes(["leftover", "rightover", "left eye", "Left-arm", "Right-arm"]) == [0, 1, 2, 4, 3]
    for names in (ADE20K, COCO_STUFF):
        assert mirrored_classes(names) == list(range(len(names)))


def test_scenes_have_their_digits_as_classes() -> None:
    scenes = open_segmentation("digit_scenes:48x64", "val", seed=3)
    assert scenes.classes == ["background", *"0123456789"]
    image, mask = scenes[2]
    assert image.size == (64, 48)
    scene = scenes.scenes.scene(2)  # type: ignore[attr-defined]
    assert mask.tolist() == scene.semantic.tolist()
    assert set(mask.ravel().tolist()) == {0, *(scene.labels + 1).tolist()}
    assert scenes.path(2) == "digit_scenes/val[2]"


PREPROCESS = SegmentPreprocess((32, 32), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


class Ragged(SegmentationDataset):
    """Ten images of different sizes; numbers 3 and 7 are unreadable."""

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


def test_training_batches_hold_one_crop_of_every_item() -> None:
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


def test_batches_depend_on_seed_and_epoch_only() -> None:
    assert same(batches(2, seed=5), batches(2, seed=5, workers=2))
    assert not same(batches(0), batches(1))
    assert not same(batches(), batches(seed=1))


def test_shares_make_up_the_batch() -> None:
    whole = batches()
    shares = [batches(share=Share(part, 3)) for part in range(3)]
    for number, batch in enumerate(whole):
        together = [s[number] for s in shares]
        assert sorted(i for b in together for i in b.index.tolist()) == sorted(batch.index.tolist())


def test_evaluation_batches_hold_whole_images_with_original_masks() -> None:
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


def test_a_batch_may_have_no_images() -> None:
    loader = create_segment_loader(Ragged(bad=tuple(range(10))), PREPROCESS, batch=10, train=False)
    (batch,) = loader
    assert (len(batch), len(batch.bad), list(batch)) == (0, 10, [])
    assert batch.images.shape == (0, 3, 32, 32)


def test_augmentation_is_for_training_only() -> None:
    with pytest.raises(UserError, match="for training only"):
        batches(train=False)
