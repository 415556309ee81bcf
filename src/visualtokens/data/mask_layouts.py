"""The layouts of segmentation datasets: which images and masks belong to a split, and what masks hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from visualtokens.data.base import SPLIT_OF, Split, split_rows
from visualtokens.data.class_files import open_classes, read_classes, read_lines
from visualtokens.data.decode import EXTENSIONS, MASK_EXTENSIONS
from visualtokens.data.folder import Walk
from visualtokens.data.mask_classes import OPTION, Label
from visualtokens.data.published_classes import (
    ADE20K,
    CAMVID,
    CAMVID_COLOURS,
    CITYSCAPES,
    COCO_STUFF,
    LIP,
    PETS,
    VOC,
    voc_colour,
)
from visualtokens.data.segmentation import IGNORE
from visualtokens.errors import UserError, unknown


class Pair(NamedTuple):
    """An image file and its mask; ``id`` is the path of both inside their folders, without their endings."""

    id: str
    image: str
    mask: str


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of :class:`MaskFolder` that layouts interpret."""

    classes: Any = None
    colors: Any = None
    suffix: str | None = None
    val_share: float | None = None


@dataclass(frozen=True, eq=False)
class Layout:
    """The files of one split, and what marks the classes in its masks; None if only ``mapping`` says so."""

    labels: Sequence[Label] | None
    pairs: list[Pair]
    ignored: Iterable[int] = (IGNORE,)
    in_colour: bool = False
    keep_ratio: bool = True


def masks(root: Path, split: Split, options: Options) -> Layout:
    """``images/<split>/**.jpg`` and ``masks/<split>/**.png``, or ``<split>/images`` and ``<split>/masks``.

    With a ``suffix``, images and masks may lie together in ``<split>``. The folder of val may be called valid
    or validation. Without it, or without folders for any split, ``val_share`` of the images are held out.
    """
    suffix, share = options.suffix or "", options.val_share
    found: dict[str, tuple[Path, Path]] = {}
    for name, each in SPLIT_OF.items():
        if folders := _split_folders(root, name, suffix):
            if each in found:
                raise UserError(f"{root} has both {found[each][0]} and {folders[0]}; rename one of them")
            found[each] = folders
    own = split == "test" or "val" in found
    if share is not None and "val" in found:
        raise UserError(f"val_share={share} has no effect: {root} has a split val; leave it out")
    candidates = (f"images/{split}", f"{split}/images") if own else ("images/train", "train/images", "images")
    images, masks = found.get(split if own else "train") or (_folder(root, *candidates), root / "masks")
    pairs = _pairs(images, _folder(root, str(masks.relative_to(root))), suffix=suffix)
    if not own and (split == "val" or share is not None or "train" not in found):
        pairs = _part(pairs, split, share, root)
    labels = open_classes(options.classes, options.colors, root)
    return Layout(labels, pairs, in_colour=any(label.colour for label in labels or ()))


def _split_folders(root: Path, split: str, suffix: str) -> tuple[Path, Path] | None:
    """The folders of images and masks of a split, if it has one for its images."""
    candidates = [(f"images/{split}", f"masks/{split}"), (f"{split}/images", f"{split}/masks")]
    for images, masks in (*candidates, *([(split, split)] if suffix else [])):
        if (root / images).is_dir():
            return root / images, root / masks
    return None


def pets(root: Path, split: Split, options: Options) -> Layout:
    """``<split>/<breed>/*.jpg`` and ``trimaps/<split>/<breed>/*.png``, or the published layout.

    The published one has ``images``, ``annotations/trimaps`` and the lists ``trainval.txt`` and ``test.txt``,
    of which the second is both val and test.
    """
    if (root / "annotations").is_dir():
        pairs = _pairs(_folder(root, "images"), _folder(root, "annotations/trimaps"), every_image=False)
        listed = _listed_names(root / "annotations" / ("trainval.txt" if split == "train" else "test.txt"))
        pairs = _not_empty([pair for pair in pairs if pair.id in listed], root)
    else:
        pairs = _pairs(_folder(root, split), _folder(root, f"trimaps/{split}"))
    return Layout(_labels(PETS, first=1), pairs, ignored=())


def ade20k(root: Path, split: Split, options: Options) -> Layout:
    """``images/training`` and ``annotations/training``, likewise ``validation``; 0 is ignored."""
    name = {"train": "training", "val": "validation"}[split]
    pairs = _pairs(_folder(root, f"images/{name}"), _folder(root, f"annotations/{name}"))
    return Layout(_labels(ADE20K, first=1), pairs, ignored=(0,))


def cocostuff(root: Path, split: Split, options: Options) -> Layout:
    """``train2017`` (or ``images/train2017``) with ``stuffthingmaps/train2017`` (or ``annotations/…``).

    Masks hold COCO's category numbers minus one: 0 to 90 are things, 91 to 181 stuff, 255 is unlabelled.
    """
    year = f"{split}2017"
    images = _folder(root, year, f"images/{year}")
    maps = _folder(root, f"stuffthingmaps/{year}", f"annotations/{year}")
    return Layout(_labels(COCO_STUFF, first=91), _pairs(images, maps), ignored=(*range(91), IGNORE))


def lip(root: Path, split: Split, options: Options) -> Layout:
    """``train_images`` and ``train_segmentations``, at the top or nested as in the published archives.

    Each image is cropped around one person; models see it stretched to a square.
    """
    images = _folder(root, *_nested("TrainVal_images", f"{split}_images"))
    parts = _folder(root, *_nested("TrainVal_parsing_annotations", f"{split}_segmentations"))
    return Layout(_labels(LIP), _pairs(images, parts), keep_ratio=False)


def voc(root: Path, split: Split, options: Options) -> Layout:
    """``JPEGImages``, ``SegmentationClass`` and ``ImageSets/Segmentation/<split>.txt``; 255 is ignored.

    ``root`` is this folder or has it as ``VOCdevkit/VOC2012`` (or another year). If only ``trainval.txt`` is
    there, ``val_share`` of it are held out.
    """
    inner = (*sorted(root.glob("VOCdevkit/VOC20*"), reverse=True), *sorted(root.glob("VOC20*"), reverse=True))
    base = next((path for path in (root, *inner) if (path / "SegmentationClass").is_dir()), root)
    pairs = _pairs(_folder(base, "JPEGImages"), _folder(base, "SegmentationClass"), every_image=False)
    labels = [Label(name, i, voc_colour(i)) for i, name in enumerate(VOC)]
    return Layout(
        labels, _listed_pairs(base / "ImageSets/Segmentation", pairs, split, options, "trainval.txt")
    )


def cityscapes(root: Path, split: Split, options: Options) -> Layout:
    """``leftImg8bit/<split>/<city>`` and ``gtFine/<split>/<city>``, of which 19 classes are evaluated.

    Masks end in ``_gtFine_labelIds`` or, if there are none, ``_gtFine_labelTrainIds``; ``suffix`` selects
    others, such as ``_gtCoarse_labelIds``.
    """
    images = _folder(root, f"leftImg8bit/{split}")
    given = options.suffix or "_gtFine_labelIds"
    parts = given.split("_")
    if len(parts) != 3 or parts[0] or parts[2] not in ("labelIds", "labelTrainIds"):
        raise UserError(
            f"suffix={given!r}: write _gtFine_labelIds, _gtFine_labelTrainIds or _gtCoarse_labelIds"
        )
    folder = _folder(root, f"{parts[1]}/{split}")
    suffix = given
    if options.suffix is None and not _files(folder, MASK_EXTENSIONS, given):
        suffix = "_gtFine_labelTrainIds"
    pairs = _pairs(images, folder, image_suffix="_leftImg8bit", suffix=suffix)
    if suffix.endswith("TrainIds"):
        return Layout([Label(name, i, c) for i, (name, (_, c)) in enumerate(CITYSCAPES.items())], pairs)
    labels = [Label(name, number, colour) for name, (number, colour) in CITYSCAPES.items()]
    return Layout(labels, pairs, ignored=(*range(34), IGNORE))


def camvid(root: Path, split: Split, options: Options) -> Layout:
    """The 11 classes of CamVid that are usually evaluated, from one of three layouts.

    ``<split>`` and ``<split>annot`` hold masks of the numbers 0 to 11, of which 11 is ignored. ``<split>``
    and ``<split>_labels``, or ``701_StillsRaw_full`` and ``LabeledApproved_full``, hold masks ``*_L.png`` in
    the colours of the 32 original labels, as ``label_colors.txt`` or ``class_dict.csv`` names them. The last
    layout has the lists ``train.txt``, ``val.txt`` and ``test.txt``, or ``val_share`` of it are held out.
    """
    raw, coded = root / "701_StillsRaw_full", root / f"{split}_labels"
    if not raw.is_dir() and not coded.is_dir():
        pairs = _pairs(_folder(root, split, raw.name), _folder(root, f"{split}annot", coded.name))
        labels = [Label(name, i, CAMVID_COLOURS[parts[0]]) for i, (name, parts) in enumerate(CAMVID.items())]
        return Layout(labels, pairs, ignored=(len(CAMVID), IGNORE))
    if raw.is_dir():
        pairs = _pairs(raw, _folder(root, "LabeledApproved_full"), suffix="_L")
        pairs = _listed_pairs(root, pairs, split, options)
    else:
        pairs = _pairs(_folder(root, split), coded, suffix="_L")
    colours = dict(CAMVID_COLOURS)
    for file in (root / "label_colors.txt", root / "class_dict.csv"):
        for label in read_classes(file) if file.is_file() else ():
            name = str(label.name)
            if name not in CAMVID_COLOURS:
                raise unknown(f"label of CamVid in {file}", name, CAMVID_COLOURS)
            if label.colour is None:
                raise UserError(f"{file} has no colour for {name!r}; write it as 128,64,128")
            colours[name] = label.colour
    labels = [Label(name, None, colours[part]) for name, parts in CAMVID.items() for part in parts]
    return Layout([*labels, Label(None, None, colours["Void"])], pairs, in_colour=True)


LAYOUTS: Mapping[str, Callable[[Path, Split, Options], Layout]] = {
    "masks": masks,
    "camvid": camvid,
    "cityscapes": cityscapes,
    "voc": voc,
    "pets": pets,
    "ade20k": ade20k,
    "cocostuff": cocostuff,
    "lip": lip,
}
NO_TEST = ("ade20k", "cocostuff", "lip")  # the masks of their test images are not public
LAYOUT_OPTIONS = {
    "masks": ("classes", "colors", "suffix", "val_share"),
    "camvid": ("val_share",),
    "cityscapes": ("suffix",),
    "voc": ("val_share",),
}


def _labels(names: Sequence[str], *, first: int = 0) -> list[Label]:
    return [Label(name, first + i) for i, name in enumerate(names)]


# Files.


def _folder(root: Path, *candidates: str) -> Path:
    """The first candidate that exists."""
    for candidate in candidates:
        if (root / candidate).is_dir():
            return root / candidate
    raise UserError(f"{root} has no folder {' or '.join(candidates)}")


def _nested(outer: str, name: str) -> tuple[str, ...]:
    return name, f"{outer}/{name}", f"{outer}/{outer}/{name}"


def _pairs(
    images: Path, masks: Path, *, image_suffix: str = "", suffix: str = "", every_image: bool = True
) -> list[Pair]:
    """The images with their masks, sorted, so that an index means the same on every machine."""
    image_of, mask_of = _files(images, EXTENSIONS, image_suffix), _files(masks, MASK_EXTENSIONS, suffix)
    if images == masks:
        own = set(mask_of.values())
        image_of = {id: path for id, path in image_of.items() if path not in own}
    missing = sorted(set(image_of) - set(mask_of))
    if missing and every_image:
        first = missing[0]
        similar = next((path for id, path in sorted(mask_of.items()) if id.startswith(first)), None)
        named = (
            f"; {similar} has another ending, which {OPTION}suffix gives" if similar and not suffix else ""
        )
        raise UserError(
            f"{len(missing)} of {len(image_of)} images in {images} have no mask in {masks}, such as "
            f"{image_of[first]}; add {masks / first}{suffix}.png or remove the image{named}"
        )
    common = sorted(set(image_of) & set(mask_of))
    return _not_empty([Pair(id, image_of[id], mask_of[id]) for id in common], images)


def _not_empty(pairs: list[Pair], folder: Path) -> list[Pair]:
    if not pairs:
        raise UserError(f"{folder} holds no images with masks")
    return pairs


def _files(folder: Path, extensions: frozenset[str], suffix: str = "") -> dict[str, str]:
    """The files below a folder with this suffix, by their path inside it without suffix and extension."""
    found: dict[str, str] = {}
    for parent, names in Walk(folder)():
        for name in names:
            stem, extension = os.path.splitext(name)
            if extension.lower() not in extensions or name.startswith(".") or not stem.endswith(suffix):
                continue
            path = os.path.join(parent, name)
            id = os.path.relpath(os.path.join(parent, stem.removesuffix(suffix)), folder)
            if id in found:
                raise UserError(f"{path} and {found[id]} have the same name; rename one of them")
            found[id] = path
    return found


def _part(pairs: list[Pair], split: Split, val_share: float | None, source: Path) -> list[Pair]:
    """The pairs of a split where ``val_share`` of all are held out."""
    if val_share is None:
        raise UserError(
            f"{source} has no validation split; give --val_share 0.2 to hold out a fifth of its images"
        )
    if split == "test":
        raise UserError(f"{source} has no test split; its images are split into train and val by val_share")
    rows = split_rows(split, [pair.id for pair in pairs], val_share, source=str(source))
    return [pairs[row] for row in rows]


def _listed_pairs(
    folder: Path, pairs: list[Pair], split: Split, options: Options, whole: str | None = None
) -> list[Pair]:
    """The pairs that ``<split>.txt`` lists; without it and without val.txt, ``val_share`` are held out.

    If there is a list ``whole``, they are held out from its images.
    """
    listed = folder / f"{split}.txt"
    if not listed.is_file() and not (folder / "val.txt").is_file():
        if whole is not None:
            pairs = _only_listed(pairs, folder / whole)
        return _part(pairs, split, options.val_share, folder)
    if options.val_share is not None:
        raise UserError(
            f"val_share={options.val_share} has no effect: {listed} lists the images; leave it out"
        )
    return _only_listed(pairs, listed)


def _only_listed(pairs: list[Pair], listed: Path) -> list[Pair]:
    names = {_image_name(name) for name in _listed_names(listed)}
    found = [pair for pair in pairs if pair.id in names]
    if len(found) < len(names):
        missing = sorted(names - {pair.id for pair in found})
        raise UserError(
            f"{len(missing)} of {len(names)} names in {listed} have no image or no mask, such as "
            f"{missing[0]!r}"
        )
    return _not_empty(found, listed)


def _image_name(listed: str) -> str:
    """The name of an image that is listed by its name, its file, a path or its mask."""
    name = os.path.basename(listed)
    stem, extension = os.path.splitext(name)
    return (stem if extension.lower() in EXTENSIONS else name).removesuffix("_L")


def _listed_names(listed: Path) -> set[str]:
    """The first word of every line."""
    if not listed.is_file():
        raise UserError(f"{listed} does not exist; it lists the images of the split")
    return {line.split()[0] for line in read_lines(listed) if line.strip() and not line.startswith("#")}
