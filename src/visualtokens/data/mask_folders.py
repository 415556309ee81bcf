"""Segmentation datasets on disk: image files, each with a mask of numbers or colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from visualtokens.data.base import SPLITS, Split, check_split
from visualtokens.data.class_files import CLASS_FILES
from visualtokens.data.decode import BadAnnotation, read_image, read_mask
from visualtokens.data.mask_classes import OPTION, create_legend
from visualtokens.data.mask_layouts import LAYOUT_OPTIONS, LAYOUTS, NO_TEST, Options
from visualtokens.data.segmentation import IGNORE, Mask, SegmentationDataset
from visualtokens.errors import UserError

CHECKED_MASKS = 8  # masks that are read on opening where 255 may be meant as a class


class MaskFolder(SegmentationDataset):
    """Image files, each with a mask file of numbers or colours.

    ``kind`` is one of :data:`~visualtokens.data.mask_layouts.LAYOUTS`. With all kinds, ``mapping`` merges
    classes (``{truck: vehicle, bus: vehicle}``) and ``ignore`` leaves pixels out of training and evaluation:
    names of classes, numbers or colours in the masks, one or a list. The kind ``masks``, in which 255 is
    ignored unless it has a class, also has these options:

    ``classes``
        names of the classes, or a file with names and perhaps numbers or colours (see
        :func:`~visualtokens.data.class_files.open_classes`)
    ``colors``
        their colours in the masks, by name or in the same order
    ``mapping``
        also from numbers in the masks, ``{0: background, 255: object}``; it then gives all of them
    ``suffix``
        what follows the name of an image in the name of its mask, such as ``_mask``
    ``val_share``
        share of the training images, or of all, that are held out as the validation split

    Links are followed as in :class:`~visualtokens.data.folder.ImageFolder`.
    """

    def __init__(
        self,
        kind: str,
        root: str | Path,
        split: Split,
        *,
        classes: str | Sequence[Any] | Mapping[Any, Any] | None = None,
        colors: Sequence[Any] | Mapping[str, Any] | None = None,
        mapping: Mapping[Any, str] | None = None,
        ignore: int | str | Sequence[Any] = (),
        suffix: str | None = None,
        val_share: float | None = None,
    ) -> None:
        check_split(split, source=f"{kind}:{root}", has=("train", "val") if kind in NO_TEST else SPLITS)
        base = Path(root).expanduser()
        if not base.is_dir():
            raise UserError(f"{base} {'is a file, not a folder' if base.exists() else 'does not exist'}")
        options = Options(classes=classes, colors=colors, suffix=suffix, val_share=val_share)
        for name, value in vars(options).items():
            if value is not None and name not in LAYOUT_OPTIONS.get(kind, ()):
                raise UserError(f"{name}={value!r} has no effect on {kind}:{root}; leave it out")
        layout = LAYOUTS[kind](base, split, options)
        if layout.labels is None and mapping is None:
            raise UserError(
                f"{base / CLASS_FILES[0]} does not exist; write the name of each class on a line of its own, "
                f"or give {OPTION}classes"
            )
        legend = create_legend(
            layout.labels,
            in_colour=layout.in_colour,
            ignored=layout.ignored,
            mapping=mapping,
            ignore=ignore,
        )
        self.spec = f"{kind}:{root}"
        self.classes, self.colours = legend.classes, legend.colours
        self.pairs = layout.pairs
        self.legend = legend
        self.keep_ratio = layout.keep_ratio
        if kind == "masks" and mapping is None and ignore == ():
            self._check_white()

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Image.Image, Mask]:
        pair = self.pairs[index]
        image = read_image(pair.image)
        values = read_mask(pair.mask, image_id=pair.id, colours="rgb" if self.legend.in_colour else "refuse")
        height, width = values.shape[:2]
        if image.size != (width, height):
            why = f"{width}×{height}, but {pair.image} is {image.width}×{image.height}"
            raise BadAnnotation(pair.mask, pair.id, "size", why)
        return image, self.legend.to_mask(values, path=pair.mask, image_id=pair.id)

    def path(self, index: int) -> str:
        return self.pairs[index].image

    def _check_white(self) -> None:
        """Raise :class:`UserError` if masks of two classes hold 0 and 255, of which 255 would be ignored."""
        if len(self.classes) != 2 or self.legend.in_colour or self.legend.numbers[IGNORE] != IGNORE:
            return
        found: set[int] = set()
        for pair in self.pairs[:CHECKED_MASKS]:
            try:
                found |= set(np.unique(read_mask(pair.mask)).tolist())
            except BadAnnotation:  # reported when it is needed
                continue
        if IGNORE in found and found <= {0, IGNORE}:
            first, second = self.classes
            raise UserError(
                f"masks such as {self.pairs[0].mask} hold {' and '.join(map(str, sorted(found)))}, but "
                f"{second!r} is 1 and 255 is ignored; if 255 is {second!r}, give {OPTION}mapping "
                f"'{{0: {first}, 255: {second}}}', otherwise {OPTION}ignore 255"
            )
