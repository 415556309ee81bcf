"""Segmentation data: images with a class per pixel, augmenting both together, and batches of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from visualtokens.data.base import AnnotatedImages, Share
from visualtokens.data.batch import ImageBatch
from visualtokens.data.decode import BadImage
from visualtokens.data.loader import Loader, Pipeline, choose_augment, load_items
from visualtokens.data.preprocess import IGNORE, Colour, SegmentPreprocess
from visualtokens.data.scenes import DigitScenes
from visualtokens.data.transforms import COLOUR_LIMITS, Range, check_factors, check_limit, jitter_colours

Mask = NDArray[np.uint8]  # (H, W): class of every pixel


class SegmentationDataset(AnnotatedImages[Mask]):
    """RGB images with the class of every pixel, 255 where it is ignored.

    An item with an unusable mask raises ``BadAnnotation``.
    """

    keep_ratio: bool = True  # False: models see images stretched to their input size
    colours: Sequence[Colour] | None = None  # of the classes in pictures, if the dataset has any


class SceneMasks(SegmentationDataset):
    """The digits of :class:`DigitScenes` as classes, and the background."""

    def __init__(self, scenes: DigitScenes) -> None:
        self.spec = scenes.spec
        self.classes = ["background", *scenes.classes]
        self.scenes = scenes

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> tuple[Image.Image, Mask]:
        scene = self.scenes.scene(index)
        return scene.image, scene.semantic.numpy().astype(np.uint8)

    def path(self, index: int) -> str:
        return self.scenes.path(index)


def mirrored_classes(classes: Sequence[str]) -> list[int]:
    """The class of each class in a mirrored image: left and right arm swap, most classes stay the same."""
    numbers = {name: i for i, name in enumerate(classes)}
    return [numbers.get(_swap_side(name), i) for i, name in enumerate(classes)]


def _swap_side(name: str) -> str:
    words = {"left": "right", "right": "left", "Left": "Right", "Right": "Left"}
    for word, other in words.items():
        if name.startswith(word) and not name[len(word) : len(word) + 1].islower():
            return other + name[len(word) :]
    return name


@dataclass(frozen=True)
class SegmentAugment:
    """Random changes to training images and their masks; the defaults only crop.

    Flips are off by default: mirrored digits and letters have another meaning, or none.
    """

    scale: Range = (1.0, 1.0)  # relative to the evaluation size
    flip: float = 0.0  # probability of a left-right flip
    brightness: float = 0.0  # 0.2: a factor of 0.8 to 1.2; likewise contrast and saturation
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # fraction of the colour circle, in either direction, at most 0.5

    def __post_init__(self) -> None:
        check_factors("scale", self.scale)
        for name, limit in ({"flip": 1.0} | COLOUR_LIMITS).items():
            check_limit(name, getattr(self, name), limit)

    def __call__(
        self,
        image: Image.Image,
        mask: Mask,
        preprocess: SegmentPreprocess,
        rng: np.random.Generator,
        *,
        mirror: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """A random crop of the model's size: pixels ``(3, H, W)`` and classes ``(H, W)``, both uint8.

        Where the image is smaller than the crop, it is padded with the mean colour and ``IGNORE``. ``mirror``
        is the class of each class in a mirrored image (see :func:`mirrored_classes`).
        """
        factor = rng.uniform(*self.scale)
        size = [max(1, round(side * factor)) for side in preprocess.seen_size(*image.size)]
        pixels = functional.resize(functional.pil_to_tensor(image), size, antialias=True)
        target = functional.resize(tv_tensors.Mask(torch.from_numpy(mask.copy())), size)  # nearest
        pixels, target = _pad(pixels, target.as_subclass(Tensor), preprocess)
        pixels, target = _crop(pixels, target, preprocess.size, rng)
        if self.flip and rng.random() < self.flip:
            pixels, target = pixels.flip(2), _class_lookup(mirror)[target.flip(1).long()]
        pixels = jitter_colours(
            pixels,
            rng,
            brightness=self.brightness,
            contrast=self.contrast,
            saturation=self.saturation,
            hue=self.hue,
        )
        return pixels, target


def _pad(pixels: Tensor, target: Tensor, preprocess: SegmentPreprocess) -> tuple[Tensor, Tensor]:
    """Pixels and target padded at the right and the bottom, to at least the size of the crop."""
    down, right = (max(0, want - have) for want, have in zip(preprocess.size, target.shape, strict=True))
    if not (down or right):
        return pixels, target
    mean = [round(255 * channel) for channel in preprocess.mean]
    return (
        functional.pad(pixels, [0, 0, right, down], fill=mean),
        F.pad(target, (0, right, 0, down), value=IGNORE),
    )


def _crop(
    pixels: Tensor, target: Tensor, size: tuple[int, int], rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    top, left = (int(rng.integers(have - want + 1)) for have, want in zip(target.shape, size, strict=True))
    rows, columns = slice(top, top + size[0]), slice(left, left + size[1])
    return pixels[:, rows, columns], target[rows, columns]


def _class_lookup(mirror: Sequence[int]) -> Tensor:
    table = torch.full((IGNORE + 1,), IGNORE, dtype=torch.uint8)
    table[: len(mirror)] = torch.tensor(mirror, dtype=torch.uint8)
    return table


SEGMENT_PRESETS: Mapping[str, SegmentAugment] = {
    "none": SegmentAugment(),
    "digits": SegmentAugment(scale=(0.75, 1.5)),
    "photo": SegmentAugment(scale=(0.5, 2.0), flip=0.5),
    "coco": SegmentAugment(scale=(0.8, 1.0), flip=0.5),  # short sides of 640 to 800, as in Detectron2
    # The photometric distortion of mmsegmentation, with which UperNet is trained on ADE20K.
    "ade20k": SegmentAugment(
        scale=(0.5, 2.0), flip=0.5, brightness=0.125, contrast=0.5, saturation=0.5, hue=0.05
    ),
}


@dataclass(frozen=True, eq=False)
class SegmentBatch(ImageBatch):
    """Images with masks.

    In training, images and masks are crops of one size. In evaluation, each image has its own size, and its
    mask the size of the original; both are padded at the right and the bottom to the largest of the batch.
    """

    images: Tensor  # (B, 3, H, W) float32
    masks: Tensor  # (B, H', W') uint8, 255 where ignored
    image_sizes: Tensor  # (B, 2) int64: height and width without padding
    mask_sizes: Tensor  # (B, 2) int64
    index: Tensor
    bad: tuple[BadImage, ...]

    on_device = ("images", "masks")

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each image ``(3, H, W)`` and its mask ``(H', W')``, without padding."""
        for i in range(len(self)):
            (height, width), (rows, columns) = self.image_sizes[i].tolist(), self.mask_sizes[i].tolist()
            yield self.images[i, :, :height, :width], self.masks[i, :rows, :columns]


@dataclass(frozen=True)
class SegmentationPipeline(Pipeline[Mask, tuple[Tensor, Tensor], SegmentBatch]):
    """Random crops of images and masks; without ``augment``, whole images with their original masks."""

    preprocess: SegmentPreprocess
    augment: SegmentAugment | None
    mirror: Sequence[int]

    def prepare(self, image: Image.Image, mask: Mask, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        if self.augment is None:
            return self.preprocess(image), torch.from_numpy(mask.copy())
        pixels, target = self.augment(image, mask, self.preprocess, rng, mirror=self.mirror)
        return self.preprocess.normalise(pixels), target

    def collate(
        self, prepared: list[tuple[Tensor, Tensor]], index: Tensor, bad: tuple[BadImage, ...]
    ) -> SegmentBatch:
        if not prepared:
            height, width = self.preprocess.size
            images, masks = torch.empty(0, 3, height, width), torch.empty(0, height, width, dtype=torch.uint8)
            sizes = torch.empty(0, 2, dtype=torch.int64)
            return SegmentBatch(images, masks, sizes, sizes.clone(), index, bad)
        images, image_sizes = _stack_padded([image for image, _ in prepared], 0)
        masks, mask_sizes = _stack_padded([mask for _, mask in prepared], IGNORE)
        return SegmentBatch(images, masks, image_sizes, mask_sizes, index, bad)


def _stack_padded(tensors: list[Tensor], fill: int) -> tuple[Tensor, Tensor]:
    """Tensors ``(…, H, W)`` padded to the largest size and stacked, and their original sizes ``(B, 2)``."""
    sizes = torch.tensor([t.shape[-2:] for t in tensors])  # (B, 2)
    height, width = sizes.amax(0).tolist()
    padded = [F.pad(t, (0, width - t.shape[-1], 0, height - t.shape[-2]), value=fill) for t in tensors]
    return torch.stack(padded), sizes


def create_segment_loader(
    dataset: SegmentationDataset,
    preprocess: SegmentPreprocess,
    *,
    batch: int,
    train: bool,
    seed: int = 0,
    workers: int = 0,
    augment: SegmentAugment | str = "none",
    share: Share | None = None,
    pin_memory: bool = False,
) -> Loader[SegmentBatch]:
    """A loader of :class:`SegmentBatch`.

    For training, items are shuffled, cropped to the model's size and augmented with random numbers that
    depend on ``seed``, epoch and item only. For evaluation, they come in order, whole and unchanged. An
    unreadable item is listed in ``bad`` and not replaced. Processes that train together each load a ``share``
    of every batch.
    """
    chosen = choose_augment(augment, SEGMENT_PRESETS, train=train)
    mirror = mirrored_classes(dataset.classes)
    return load_items(
        dataset,
        SegmentationPipeline(preprocess, chosen if train else None, mirror),
        batch=batch,
        train=train,
        seed=seed,
        workers=workers,
        share=share or Share(),
        pin_memory=pin_memory,
    )
