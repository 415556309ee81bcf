"""Opening datasets by name, as given on the command line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args

from visualtokens.data.arrays import Digits, NpzImages
from visualtokens.data.base import ImageDataset, Split, check_split
from visualtokens.data.coco import CocoObjects
from visualtokens.data.decode import max_pixels
from visualtokens.data.detection import DetectionDataset, SceneObjects
from visualtokens.data.folder import ImageFolder
from visualtokens.data.instances import LAYOUTS as INSTANCE_LAYOUTS
from visualtokens.data.instances import InstanceMasks
from visualtokens.data.listed import ListedImages
from visualtokens.data.mask_folders import MaskFolder
from visualtokens.data.mask_layouts import LAYOUTS
from visualtokens.data.scenes import DigitScenes
from visualtokens.data.segmentation import SceneMasks, SegmentationDataset
from visualtokens.data.timm_readers import HubImages, TarShards
from visualtokens.data.voc import VocObjects
from visualtokens.data.yolo import YoloObjects
from visualtokens.errors import UserError, unknown

D = TypeVar("D")

# Datasets with a path, by their kind. Each is opened by ``create(path, split, **options)``; its options are
# its keyword-only arguments. The digits, which need no path, are opened by the functions below.
CLASSIFICATION: dict[str, Callable[..., ImageDataset]] = {
    "folder": ImageFolder,
    "csv": partial(ListedImages, "csv"),
    "parquet": partial(ListedImages, "parquet"),
    "npz": NpzImages,
    "wds": TarShards,
    "hfds": HubImages,
}
SEGMENTATION: dict[str, Callable[..., SegmentationDataset]] = {
    kind: partial(MaskFolder, kind) for kind in LAYOUTS
}
DETECTION: dict[str, Callable[..., DetectionDataset]] = {  # these take ``masks`` as well
    "coco": CocoObjects,
    "yolo": YoloObjects,
    "voc": VocObjects,
    **{kind: partial(InstanceMasks, kind) for kind in INSTANCE_LAYOUTS},
}


def open_dataset(spec: str, split: Split, /, *, seed: int = 0, **options: Any) -> ImageDataset:
    """The classification dataset with the name ``spec``.

    ======================  =================================================================
    ``digits``              scikit-learn's handwritten digits, 8×8
    ``digit_scenes``        those digits on cluttered canvases of 128×128
    ``digit_scenes:96x160`` the same, 96 high and 160 wide
    ``folder:/path``        ``/path/train/<class>/*.jpg`` and ``/path/val/<class>/*.jpg``
    ``csv:/path/file.csv``  paths and labels, see :class:`~visualtokens.data.listed.ListedImages`
    ``parquet:/path/file``  the same in a Parquet file
    ``npz:/path/file.npz``  uint8 arrays, see :class:`~visualtokens.data.arrays.NpzImages`
    ``wds:/path``           tar shards, see :class:`~visualtokens.data.timm_readers.TarShards`
    ``hfds:name``           Hugging Face, see :class:`~visualtokens.data.timm_readers.HubImages`
    ======================  =================================================================

    ``options`` are the keyword-only arguments of these classes. ``seed`` selects the scenes of
    ``digit_scenes``; the other datasets do not depend on it.
    """
    check_split(split)
    kind, _, rest = spec.partition(":")
    if kind == "digits":
        if rest:
            raise UserError(f"{spec!r}: digits has no options; write 'digits'")
        return Digits(split, **_checked_options(kind, Digits, options))
    if kind == "digit_scenes":
        return _digit_scenes(spec, split, seed, options)
    return _open("dataset", CLASSIFICATION, spec, split, options, without_path=("digits", "digit_scenes"))


def open_detection(
    spec: str, split: Split, /, *, masks: bool = True, seed: int = 0, **options: Any
) -> DetectionDataset:
    """The detection dataset with the name ``spec``.

    ======================  =================================================================
    ``digit_scenes``        handwritten digits on cluttered canvases of 128×128
    ``digit_scenes:96x160`` the same, 96 high and 160 wide
    ``coco:/path``          COCO's layout, see :class:`~visualtokens.data.coco.CocoObjects`
    ``yolo:/path``          YOLO's layout, see :class:`~visualtokens.data.yolo.YoloObjects`
    ``voc:/path``           Pascal VOC's boxes, see :class:`~visualtokens.data.voc.VocObjects`
    ``instances:/path``     a mask of object numbers per image: ``images``, ``masks``
    ``pennfudan:/path``     Penn-Fudan's pedestrians: ``PNGImages``, ``PedMasks``
    ======================  =================================================================

    ``masks=False`` omits the masks, for a detector of boxes. ``options`` are the other keyword-only arguments
    of these classes. ``seed`` selects the scenes of ``digit_scenes``.
    """
    check_split(split)
    if spec.partition(":")[0] == "digit_scenes":
        return SceneObjects(_digit_scenes(spec, split, seed, options), masks=masks)
    return _open("detection dataset", DETECTION, spec, split, options, masks=masks)


def open_segmentation(spec: str, split: Split, /, *, seed: int = 0, **options: Any) -> SegmentationDataset:
    """The segmentation dataset with the name ``spec``.

    ======================  ==================================================================
    ``digit_scenes``        handwritten digits on cluttered canvases of 128×128
    ``digit_scenes:96x160`` the same, 96 high and 160 wide
    ``masks:/path``         ``images/train/*.jpg``, ``masks/train/*.png``, ``classes.txt``
    ``camvid:/path``        CamVid with 11 classes: ``train`` and ``trainannot``, or the original
    ``cityscapes:/path``    ``leftImg8bit`` and ``gtFine`` with 19 classes
    ``voc:/path``           ``VOCdevkit/VOC2012`` with 21 classes
    ``pets:/path``          Oxford-IIIT Pet with its trimaps: pet, background, border
    ``ade20k:/path``        ``ADEChallengeData2016``: ``images/training``, ``annotations/…``
    ``cocostuff:/path``     ``train2017`` and its stuff maps; things are ignored
    ``lip:/path``           Look Into Person: ``train_images``, ``train_segmentations``
    ======================  ==================================================================

    The validation split lies beside the training split. ``options`` are the keyword-only arguments of
    :class:`~visualtokens.data.mask_folders.MaskFolder`. ``seed`` selects the scenes of ``digit_scenes``; the
    other datasets do not depend on it.
    """
    check_split(split)
    if spec.partition(":")[0] == "digit_scenes":
        return SceneMasks(_digit_scenes(spec, split, seed, options))
    return _open("segmentation dataset", SEGMENTATION, spec, split, options)


def _open(
    what: str,
    table: Mapping[str, Callable[..., D]],
    spec: str,
    split: Split,
    options: Mapping[str, Any],
    *,
    without_path: Sequence[str] = ("digit_scenes",),
    **given: Any,
) -> D:
    """The dataset of a kind in ``table``; ``given`` are further arguments, which are not options."""
    kind, _, path = spec.partition(":")
    if kind not in table:
        if Path(spec).expanduser().exists():
            raise _without_kind(spec, table)
        if task := _tasks_of(kind):
            raise UserError(f"{spec!r} is for --task {task}; give it, or another --data")
        raise unknown(what, kind, (*without_path, *table))
    if not path:
        raise UserError(f"{spec!r} names no path; write '{kind}:/path'")
    create = table[kind]
    return create(path, split, **_checked_options(kind, create, options, given=tuple(given)), **given)


def _tasks_of(kind: str) -> str:
    """The tasks that have the kind, such as ``segment or detect``."""
    tables: tuple[tuple[str, Mapping[str, Any]], ...] = (
        ("classify", CLASSIFICATION),
        ("segment", SEGMENTATION),
        ("detect", DETECTION),
    )
    return " or ".join(task for task, table in tables if kind in table)


_KIND_OF_SUFFIX = {".npz": "npz", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}


def _without_kind(spec: str, table: Mapping[str, Any]) -> UserError:
    """The error for a path, with the kind of the data that are there."""
    path = Path(spec).expanduser()
    kind = _KIND_OF_SUFFIX.get(path.suffix.lower(), next(iter(table)))
    if path.suffix.lower() == ".json" or any(path.glob("annotations/*.json")):
        kind = "coco"
        path = path.parent if path.is_file() else path
        spec = str(path.parent if path.name == "annotations" else path)
    elif (path / "masks").is_dir():
        kind = "masks"
    elif (path / "_info.json").is_file():
        kind = "wds"
    task = "" if kind in table else f" with --task {_tasks_of(kind)}"
    return UserError(f"{spec!r} is a path without its kind; write '{kind}:{spec}'{task}")


def _digit_scenes(spec: str, split: Split, seed: int, options: Mapping[str, Any]) -> DigitScenes:
    size = spec.partition(":")[2] or "128x128"
    match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", size)
    if match is None:
        raise UserError(
            f"{spec!r}: {size!r} is not a size; write HEIGHTxWIDTH, such as 'digit_scenes:96x160'"
        )
    height, width = int(match[1]), int(match[2])
    if height * width > max_pixels():
        raise UserError(f"{spec!r}: {size} is more than {max_pixels():,} pixels; give a smaller size")
    checked = _checked_options("digit_scenes", DigitScenes, options, given=("size", "seed"))
    return DigitScenes(split, size=(height, width), seed=seed, **checked)


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}


def _checked_options(
    kind: str, create: Callable[..., Any], options: Mapping[str, Any], *, given: Sequence[str] = ()
) -> dict[str, Any]:
    """``options`` as ``create`` takes them.

    Raises :class:`UserError` for an option that is no keyword-only argument of ``create``, or that is one of
    ``given``, and for a value that is not of the annotated type, where that is one of the plain types.
    """
    parameters = inspect.signature(create, eval_str=True).parameters.values()
    known = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in given}
    for name in options:
        if name == "val_share" and name not in known:
            raise UserError(f"val_share is no option of {kind}, which has splits of its own; leave it out")
        if not known:
            raise UserError(f"{kind} has no options; leave {name} out")
        if name not in known:
            raise unknown(f"option of {kind}", name, known)
    return {name: _checked_value(name, value, known[name]) for name, value in options.items()}


def _checked_value(name: str, value: Any, hint: Any) -> Any:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if type(value) in kinds or not all(kind in _WORDS for kind in kinds):
        return value
    if float in kinds and type(value) is int:
        return float(value)
    if str in kinds and type(value) in (int, float):  # a command line makes a number of a column named 1
        return str(value)
    raise UserError(f"{name}={value!r} must be {' or '.join(_WORDS[kind] for kind in kinds)}")
