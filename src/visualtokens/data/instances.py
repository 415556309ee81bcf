"""Instance masks: a mask file per image, in which every number except 0 is an object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from visualtokens.data.annotations import boxes_as_objects, check_names, count_error, divide, files_by_name
from visualtokens.data.base import Split, check_split
from visualtokens.data.decode import MASK_EXTENSIONS, BadAnnotation, read_image, read_mask
from visualtokens.data.detection import DetectionDataset, Objects
from visualtokens.errors import UserError


@dataclass(frozen=True)
class Layout:
    """The folders of a dataset, the ending of a mask's name after that of its image, and the class."""

    images: str
    masks: str
    suffix: str
    name: str


LAYOUTS: Mapping[str, Layout] = {
    "instances": Layout("images", "masks", "", "object"),
    "pennfudan": Layout("PNGImages", "PedMasks", "_mask", "pedestrian"),
}


class InstanceMasks(DetectionDataset):
    """``images/train/a.jpg`` and ``masks/train/a.png``, likewise val and test.

    ``kind`` is one of :data:`LAYOUTS`, which name other folders and the class.
    Each number from 1 in a mask is one object, 0 is background. All objects are of one class, ``classes``.
    A mask has the name of its image, or ends in ``_mask``. ``images`` and ``masks`` may also hold the files
    of all splits, of which ``val_share`` are held out for validation. Boxes enclose the masks.
    """

    def __init__(
        self,
        kind: str,
        root: str | Path,
        split: Split,
        *,
        masks: bool = True,
        val_share: float | None = None,
        classes: list[str] | None = None,
    ) -> None:
        check_split(split)
        layout = LAYOUTS[kind]
        self.spec = f"{kind}:{root}"
        self.classes = check_names(classes or [layout.name], "classes")
        if len(self.classes) != 1:
            raise UserError(f"classes={self.classes}: the objects of {kind} are of one class; give one name")
        self.masks = masks
        self.pairs = _pairs(Path(root).expanduser(), layout, split, val_share)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Image.Image, Objects]:
        path, mask = self.pairs[index]
        image = read_image(path)
        numbers = read_mask(mask, image_id=path.stem)
        height, width = numbers.shape
        if image.size != (width, height):
            why = f"{width}×{height}, but {path} is {image.width}×{image.height}"
            raise BadAnnotation(str(mask), path.stem, "size", why)
        return image, self._objects(numbers, mask, path.stem)

    def path(self, index: int) -> str:
        return str(self.pairs[index][0])

    def _objects(self, numbers: NDArray[np.integer], file: Path, image_id: str) -> Objects:
        """The objects in a mask ``(H, W)``, in the order of their numbers."""
        present, inverse = np.unique(numbers, return_inverse=True)
        if present[0] < 0:
            raise BadAnnotation(
                str(file), image_id, "pixels", f"{present[0]} is negative; objects count from 1"
            )
        first = 1 if present[0] == 0 else 0
        count, (height, width) = len(present) - first, numbers.shape
        _, why = count_error(count, (width, height), masks=self.masks)
        if why:
            raise BadAnnotation(str(file), image_id, "pixels", why)
        of_object = inverse.reshape(numbers.shape) - first  # (H, W): position of the object, -1 is background
        boxes, area = _boxes(of_object, count)
        labels = np.zeros(count, np.int64)
        masks = torch.from_numpy(of_object == np.arange(count)[:, None, None]) if self.masks else None
        return boxes_as_objects(boxes, labels, masks=masks, area=area)


def _boxes(of_object: NDArray[np.intp], count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The boxes ``(n, 4)`` around the pixels of each of ``count`` objects, and their areas ``(n,)``."""
    rows, columns = np.nonzero(of_object >= 0)
    owner = of_object[rows, columns]
    boxes = np.empty((count, 4), np.float64)
    for i, values in enumerate((columns, rows)):
        low, high = np.full(count, values.max(initial=0)), np.zeros(count, np.int64)
        np.minimum.at(low, owner, values)
        np.maximum.at(high, owner, values)
        boxes[:, i], boxes[:, i + 2] = low, high + 1
    return boxes, np.bincount(owner, minlength=count).astype(np.float64)


def _pairs(base: Path, layout: Layout, split: Split, val_share: float | None) -> list[tuple[Path, Path]]:
    """The images of a split with their masks, sorted by name."""
    folders = base / layout.images, base / layout.masks
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"{base} has no folder {folder.name}; expected {layout.images} and {layout.masks}"
            )
    has = [s for s in ("train", "val", "test") if all((folder / s).is_dir() for folder in folders)]
    if "val" in has and val_share is not None:
        raise UserError(f"{base} has a validation split, {folders[0] / 'val'}; leave val_share out")
    divided = "val" not in has and split != "test"
    if has:
        wanted = "train" if divided else split
        if wanted not in has:
            raise UserError(f"{base} has no {wanted} split, only {', '.join(has)}")
        folders = folders[0] / wanted, folders[1] / wanted
    pairs = _match(*folders, layout.suffix)
    if has and not divided:
        return list(pairs.values())
    names = list(pairs)
    return [pairs[names[i]] for i in divide(names, split, val_share, source=str(base))]


def _match(images: Path, masks: Path, suffix: str) -> dict[str, tuple[Path, Path]]:
    image_of, mask_of = files_by_name(images), files_by_name(masks, MASK_EXTENSIONS)
    pairs, missing = {}, []
    for name, image in image_of.items():
        mask = mask_of.get(name + suffix) or mask_of.get(name) or mask_of.get(f"{name}_mask")
        if mask is None:
            missing.append(image)
        else:
            pairs[name] = (image, mask)
    if missing:
        expected = masks / f"{missing[0].stem}{suffix}.png"
        raise UserError(
            f"{len(missing)} of {len(image_of)} images in {images} have no mask in {masks}, such as "
            f"{missing[0]}; add {expected} or remove the image"
        )
    if not pairs:
        raise UserError(f"{images} holds no images")
    return pairs
