"""Opening datasets by name, as given on the command line."""

from __future__ import annotations

import re
from pathlib import Path

from visualtokens.data.arrays import Digits, NpzImages
from visualtokens.data.base import ImageDataset, Split, check_split
from visualtokens.data.coco import CocoObjects
from visualtokens.data.decode import max_pixels
from visualtokens.data.detection import DetectionDataset, SceneObjects
from visualtokens.data.folder import ImageFolder
from visualtokens.data.mask_folders import LAYOUTS, MaskFolder
from visualtokens.data.scenes import DigitScenes
from visualtokens.data.segmentation import SceneMasks, SegmentationDataset
from visualtokens.data.timm_readers import HubImages, TarShards
from visualtokens.errors import UserError, unknown

KINDS = ("digits", "digit_scenes", "folder", "npz", "wds", "hfds")
DETECTION_KINDS = ("digit_scenes", "coco")
SEGMENTATION_KINDS = ("digit_scenes", *LAYOUTS)


def open_dataset(spec: str, split: Split, *, seed: int = 0) -> ImageDataset:
    """The classification dataset with the name ``spec``.

    ======================  =================================================================
    ``digits``              scikit-learn's handwritten digits, 8×8
    ``digit_scenes``        those digits on cluttered canvases of 128×128
    ``digit_scenes:96x160`` the same, 96 high and 160 wide
    ``folder:/path``        ``/path/train/<class>/*.jpg`` and ``/path/val/<class>/*.jpg``
    ``npz:/path/file.npz``  uint8 arrays, see :class:`~visualtokens.data.arrays.NpzImages`
    ``wds:/path``           tar shards, see :class:`~visualtokens.data.timm_readers.TarShards`
    ``hfds:name``           Hugging Face, see :class:`~visualtokens.data.timm_readers.HubImages`
    ======================  =================================================================

    ``seed`` selects the scenes of ``digit_scenes``; the other datasets do not depend on it.
    """
    kind, _, rest = spec.partition(":")
    if kind == "digits":
        if rest:
            raise UserError(f"{spec!r}: digits has no options; write 'digits'")
        return Digits(split)
    if kind == "digit_scenes":
        return _digit_scenes(spec, split, seed)
    if kind in KINDS:
        path = _path(spec)
        if kind == "folder":
            return ImageFolder(path, split)
        if kind == "npz":
            return NpzImages(path, split)
        return TarShards(path, split) if kind == "wds" else HubImages(path, split)
    if Path(spec).expanduser().exists():
        prefix = "npz" if spec.endswith(".npz") else "folder"
        raise UserError(f"{spec!r} is a path without its kind; write '{prefix}:{spec}'")
    raise unknown("dataset", kind, KINDS)


def open_detection(spec: str, split: Split, *, masks: bool = True, seed: int = 0) -> DetectionDataset:
    """The detection dataset with the name ``spec``.

    ======================  =================================================================
    ``digit_scenes``        handwritten digits on cluttered canvases of 128×128
    ``digit_scenes:96x160`` the same, 96 high and 160 wide
    ``coco:/path``          COCO's layout, see :class:`~visualtokens.data.coco.CocoObjects`
    ======================  =================================================================

    ``masks=False`` omits the masks, for a detector of boxes. ``seed`` selects the scenes of ``digit_scenes``.
    """
    kind = spec.partition(":")[0]
    if kind == "digit_scenes":
        return SceneObjects(_digit_scenes(spec, split, seed), masks=masks)
    if kind == "coco":
        return CocoObjects(_path(spec), split, masks=masks)
    raise unknown("detection dataset", kind, DETECTION_KINDS)


def open_segmentation(spec: str, split: Split, *, seed: int = 0) -> SegmentationDataset:
    """The segmentation dataset with the name ``spec``.

    ======================  ==================================================================
    ``digit_scenes``        handwritten digits on cluttered canvases of 128×128
    ``digit_scenes:96x160`` the same, 96 high and 160 wide
    ``masks:/path``         ``images/train/*.jpg``, ``masks/train/*.png``, ``classes.txt``
    ``pets:/path``          Oxford-IIIT Pet with its trimaps: pet, background, border
    ``ade20k:/path``        ``ADEChallengeData2016``: ``images/training``, ``annotations/…``
    ``cocostuff:/path``     ``train2017`` and its stuff maps; things are ignored
    ``lip:/path``           Look Into Person: ``train_images``, ``train_segmentations``
    ======================  ==================================================================

    The validation split lies beside the training split. ``seed`` selects the scenes of ``digit_scenes``; the
    other datasets do not depend on it.
    """
    check_split(split)
    kind = spec.partition(":")[0]
    if kind == "digit_scenes":
        return SceneMasks(_digit_scenes(spec, split, seed))
    if kind not in LAYOUTS:
        raise unknown("segmentation dataset", kind, SEGMENTATION_KINDS)
    return MaskFolder(kind, _path(spec), split)


def _path(spec: str) -> str:
    kind, _, path = spec.partition(":")
    if not path:
        raise UserError(f"{spec!r} names no path; write '{kind}:/path'")
    return path


def _digit_scenes(spec: str, split: Split, seed: int) -> DigitScenes:
    size = spec.partition(":")[2] or "128x128"
    match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", size)
    if match is None:
        raise UserError(
            f"{spec!r}: {size!r} is not a size; write HEIGHTxWIDTH, such as 'digit_scenes:96x160'"
        )
    height, width = int(match[1]), int(match[2])
    if height * width > max_pixels():
        raise UserError(f"{spec!r}: {size} is more than {max_pixels():,} pixels; give a smaller size")
    return DigitScenes(split, size=(height, width), seed=seed)
