"""Objects annotated the way COCO does it: one json file per split."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from visualtokens.data.base import Split, check_split
from visualtokens.data.coco_checks import Records, check_records
from visualtokens.data.coco_masks import to_mask
from visualtokens.data.decode import BadImage, read_image
from visualtokens.data.detection import DetectionDataset, Objects
from visualtokens.data.masks import BadAnnotation
from visualtokens.errors import UserError

logger = logging.getLogger(__name__)

ANNOTATIONS = ("annotations/instances_{split}2017.json", "annotations/instances_{split}.json")
IMAGES = ("{split}2017", "{split}", "images/{split}2017", "images/{split}", "images")


class CocoObjects(DetectionDataset):
    """``/path/annotations/instances_train2017.json`` and the images in ``/path/train2017``; val likewise.

    The names may lack the 2017, and the folders of images may be in ``/path/images``. Masks are polygons or
    run lengths, written out or compressed. What the files say is checked at once; what is wrong is told by
    file, image and field. A box of zero area is left out, with a warning: nothing can be found there.
    ``classes`` are the categories in the order of the file. ``ids`` are the numbers of the images in it.
    """

    def __init__(self, root: str | Path, split: Split, *, masks: bool = True) -> None:
        check_split(split)
        base = Path(root).expanduser()
        self.spec = f"coco:{root}"
        self.file = _find(base, ANNOTATIONS, split, folder=False)
        self.folder = _find(base, IMAGES, split, folder=True)
        records = check_records(read_json(self.file), str(self.file), masks=masks)
        self.classes = list(records.categories.values())
        self.masks = masks
        self.ids = list(records.images)
        if not self.ids:
            raise UserError(f"{self.file} holds no images")
        self._names = [image["file_name"] for image in records.images.values()]
        self._sizes = np.array([(i["height"], i["width"]) for i in records.images.values()])  # (images, 2)
        self._annotations = _Annotations(records, str(self.file))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Image.Image, Objects]:
        image = read_image(self.path(index))
        height, width = self._sizes[index].tolist()
        if image.size != (width, height):
            told = f"{self.file} says {width}×{height} in 'width' and 'height' of image {self.ids[index]}"
            raise BadImage(self.path(index), f"is {image.width}×{image.height}, but {told}")
        return image, self.objects(index)

    def objects(self, index: int) -> Objects:
        """The annotations of an image, without reading it."""
        place = self._annotations.of(self.ids[index])
        height, width = self._sizes[index].tolist()
        masks = None
        if self.masks:
            masks = torch.zeros(len(place), height, width, dtype=torch.bool)
            for mask, annotation in zip(masks, place, strict=True):
                mask[:] = torch.from_numpy(self._mask(index, int(annotation), height, width))
        boxes = self._annotations.boxes[place]  # (n, 4): left, top, width, height
        corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
        return Objects(
            torch.from_numpy(corners.astype(np.float32)),
            torch.from_numpy(self._annotations.labels[place]),
            masks,
            torch.from_numpy(self._annotations.crowd[place]),
            torch.from_numpy(self._annotations.area[place].astype(np.float32)),
        )

    def path(self, index: int) -> str:
        return str(self.folder / self._names[index])

    def _mask(self, index: int, annotation: int, height: int, width: int) -> NDArray[np.bool_]:
        try:
            return to_mask(self._annotations.segmentation(annotation), height, width)
        except ValueError as error:
            why = f"{error} (annotation {self._annotations.ids[annotation]})"
            raise BadAnnotation(str(self.file), str(self.ids[index]), "segmentation", why) from error


class _Annotations:
    """All annotations of a file in a few arrays, which worker processes share; dicts would be copied."""

    def __init__(self, records: Records, file: str) -> None:
        kept = [a for a in records.annotations if a["bbox"][2] > 0 and a["bbox"][3] > 0]
        _warn_empty(records.annotations, kept, file)
        label_of = {category: label for label, category in enumerate(records.categories)}
        self.ids = np.array([a.get("id", 0) for a in kept])
        self.boxes = np.array([a["bbox"] for a in kept], np.float64).reshape(-1, 4)
        self.labels = np.array([label_of[a["category_id"]] for a in kept], np.int64)
        self.crowd = np.array([a.get("iscrowd", 0) for a in kept], np.bool_)
        self.area = np.array([a.get("area", a["bbox"][2] * a["bbox"][3]) for a in kept], np.float64)
        self._images = np.array([a["image_id"] for a in kept], np.int64)
        self._order = np.argsort(self._images, kind="stable")
        self._sorted = self._images[self._order]
        texts = [json.dumps(a.get("segmentation")).encode() for a in kept]
        self._ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        self._text = np.frombuffer(b"".join(texts), np.uint8)

    def of(self, image: int) -> NDArray[np.int64]:
        """Which annotations belong to an image."""
        begin, end = np.searchsorted(self._sorted, [image, image + 1])
        return self._order[begin:end]

    def segmentation(self, annotation: int) -> Any:
        begin = self._ends[annotation - 1] if annotation else 0
        return json.loads(self._text[begin : self._ends[annotation]].tobytes())


def _warn_empty(annotations: Sequence[dict[str, Any]], kept: Sequence[dict[str, Any]], file: str) -> None:
    if len(kept) < len(annotations):
        first = next(a for a in annotations if not (a["bbox"][2] > 0 and a["bbox"][3] > 0))
        logger.warning(
            "%s: %d boxes of zero area are left out, the first on image %s",
            file,
            len(annotations) - len(kept),
            first["image_id"],
        )


def _find(base: Path, patterns: Sequence[str], split: Split, *, folder: bool) -> Path:
    places = [base / pattern.format(split=split) for pattern in patterns]
    for place in places:
        if place.is_dir() if folder else place.is_file():
            return place
    wanted = ", ".join(str(place.relative_to(base)) for place in places)
    what = "folder of images" if folder else "annotation file"
    raise UserError(f"{base} has no {what} for {split}; looked for {wanted}")


def read_json(file: Path) -> Any:
    """What a json file holds; UserError if it is none."""
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON: {error}") from error
