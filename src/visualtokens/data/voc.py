"""Pascal VOC's annotations: one XML file of boxes per image, and lists of the images of each split."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree
from xml.parsers import expat

import numpy as np
from PIL import Image

from visualtokens.data.annotations import (
    BOXES_ONLY,
    Ragged,
    box_error,
    boxes_as_objects,
    check_names,
    count_error,
    divide,
    files_by_name,
    is_too_long,
    raise_first,
    read_bytes,
    read_lines,
    to_number,
    warn_dropped,
)
from visualtokens.data.base import SPLIT_OF, Split, brief, check_split, is_inside
from visualtokens.data.decode import (
    EXTENSIONS,
    BadAnnotation,
    BadImage,
    max_pixels,
    read_header,
    read_image,
)
from visualtokens.data.detection import DetectionDataset, Objects
from visualtokens.errors import UserError

ANNOTATIONS = ("Annotations", "annotations", ".")  # folders, in order of preference
IMAGES = ("JPEGImages", "images", ".")
LISTS = "ImageSets/Main"
MAX_ELEMENTS = 500_000  # of an XML file; an object has about ten
CORNERS = ("xmin", "ymin", "xmax", "ymax")


class VocObjects(DetectionDataset):
    """``JPEGImages``, ``Annotations/*.xml`` and ``ImageSets/Main/train.txt``, likewise val and test.

    The folder may be that of one year inside ``VOCdevkit``. Images and XML files may also be in ``images``
    and ``annotations``, or together in ``train``, ``valid`` and ``test`` or in one folder. Where there is no
    validation split, ``val_share`` of the training images are held out: of those in ``train.txt``, else in
    ``trainval.txt``, else of all with an XML file.

    An image has the name of its XML file, or that in ``filename``. ``classes`` are given, or all names in the
    XML files of all splits, sorted. Corners count from 1 and belong to the box: ``xmin`` 1 and ``xmax`` 2 are
    a box from 0 to 2. Objects marked as ``difficult`` are excluded from training and evaluation, like COCO's
    crowds, unless ``difficult=True``. Parts of objects are ignored. Boxes must overlap with the image, and
    may extend beyond it by at most its width or height.

    With ``strict=False``, an invalid XML file raises when its image is read, and not on opening.
    """

    def __init__(
        self,
        root: str | Path,
        split: Split,
        *,
        masks: bool = True,
        val_share: float | None = None,
        classes: list[str] | None = None,
        difficult: bool = False,
        strict: bool = True,
    ) -> None:
        check_split(split)
        self.spec = f"voc:{root}"
        if masks:
            raise UserError(f"{self.spec} has boxes without masks; {BOXES_ONLY}")
        base = _dataset_folder(Path(root).expanduser())
        folder, xml_files = _first_with_files(base, ANNOTATIONS, {".xml"})
        _, image_files = _first_with_files(base, IMAGES, EXTENSIONS)
        names = _names_of(base, split, val_share, list(xml_files))
        # Without given classes, the files of all splits are read, so that all splits have the same classes.
        parsed, bad = {}, {}
        for name in names if classes is not None else dict.fromkeys([*names, *xml_files]):
            try:
                parsed[name] = _parse(folder, name, image_files)
            except BadAnnotation as error:
                bad[name] = error.with_traceback(None)
        invalid = {i: bad[name] for i, name in enumerate(names) if name in bad}
        if strict or not parsed:
            raise_first(invalid)
        labels = sorted({label for each in parsed.values() for label in each.names})
        self.classes = check_names(labels if classes is None else classes, f"the XML files of {base}")
        self.files = [parsed[name].image if name in parsed else folder / f"{name}.jpg" for name in names]
        self.xml_files = [folder / f"{name}.xml" for name in names]
        self._keep_difficult = difficult
        self.bad = self._store([parsed.get(name, _EMPTY) for name in names]) | invalid
        if strict:
            raise_first(self.bad)

    def _store(self, items: Sequence[_Annotation]) -> dict[int, BadAnnotation]:
        """Keep the objects as arrays, without those of zero area; return the errors of unknown classes."""
        bad: dict[int, BadAnnotation] = {}
        number_of = {name: number for number, name in enumerate(self.classes)}
        labels, boxes, difficult = [], [], []
        dropped, first = 0, ""
        for index, item in enumerate(items):
            kept = [
                i for i, (left, top, right, bottom) in enumerate(item.boxes) if left < right and top < bottom
            ]
            if len(kept) < len(item.boxes):
                dropped, first = dropped + len(item.boxes) - len(kept), first or str(self.xml_files[index])
            for i in kept:
                if item.names[i] not in number_of:
                    why = f"{brief(item.names[i])} is none of the classes {brief(self.classes)}"
                    bad.setdefault(index, _wrong(self.xml_files[index], f"object {i + 1}, name", why))
            labels.append(np.array([number_of.get(item.names[i], -1) for i in kept], np.int64))
            boxes.append(np.array([item.boxes[i] for i in kept], np.float64).reshape(-1, 4))
            difficult.append(np.array([item.difficult[i] for i in kept], np.bool_))
        warn_dropped(dropped, first, self.spec)
        self._sizes = [item.size for item in items]
        self._labels = Ragged(labels, like=np.empty(0, np.int64))
        self._boxes = Ragged(boxes, like=np.empty((0, 4), np.float64))
        self._difficult = Ragged(difficult, like=np.empty(0, np.bool_))
        return bad

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, Objects]:
        if index in self.bad:
            raise self.bad[index].with_traceback(None)
        image = read_image(self.files[index])
        width, height = self._sizes[index]
        if image.size != (width, height):
            annotated = f"{self.xml_files[index]} has {width}×{height} in 'size'"
            raise BadImage(self.path(index), f"is {image.width}×{image.height}, but {annotated}")
        difficult = self._difficult[index]
        crowd = np.zeros_like(difficult) if self._keep_difficult else difficult
        return image, boxes_as_objects(self._boxes[index], self._labels[index], crowd=crowd)

    def path(self, index: int) -> str:
        return str(self.files[index])


# XML files.


@dataclass(frozen=True)
class _Annotation:
    """The content of an XML file."""

    image: Path
    size: tuple[int, int]  # width, height
    names: list[str]
    boxes: list[tuple[float, float, float, float]]  # left, top, right, bottom in pixels from 0
    difficult: list[bool]


_EMPTY = _Annotation(Path(), (0, 0), [], [], [])


def _parse(folder: Path, name: str, image_files: Mapping[str, Path]) -> _Annotation:
    """The content of an XML file; the first error is raised with file, object and field."""
    file = folder / f"{name}.xml"
    root = _read_xml(file)
    image = image_files.get(name)
    if image is None:
        given = (root.findtext("filename") or "").strip()
        image = image_files.get(os.path.join(os.path.dirname(name), Path(given).stem))
        if image is None:
            raise _wrong(file, "filename", f"there is neither an image {brief(name)} nor {brief(given)}")
    size = _size(root, file, image)
    objects = root.findall("object")
    _, why = count_error(len(objects), size, masks=False)
    if why:
        raise _wrong(file, "objects", why)
    found = _Annotation(image, size, [], [], [])
    for number, element in enumerate(objects, 1):
        label = (element.findtext("name") or "").strip()
        if not label:
            raise _wrong(file, f"object {number}, name", "is missing")
        difficult = (element.findtext("difficult") or "0").strip()
        if difficult not in ("0", "1"):
            raise _wrong(file, f"object {number}, difficult", f"{brief(difficult)} is neither 0 nor 1")
        corners = [to_number(element.findtext(f"bndbox/{corner}")) for corner in CORNERS]
        for corner, value in zip(CORNERS, corners, strict=True):
            if value is None:
                text = element.findtext(f"bndbox/{corner}")
                raise _wrong(file, f"object {number}, bndbox/{corner}", f"{brief(text)} is not a number")
        left, top, right, bottom = (value for value in corners if value is not None)
        left, top = left - 1, top - 1  # from 1, and both corners are inside
        if right < left or bottom < top:
            why = f"{brief(corners)}: {'xmax' if right < left else 'ymax'} is less than the minimum"
            raise _wrong(file, f"object {number}, bndbox", why)
        if why := box_error((left, top, right - left, bottom - top), size):
            raise _wrong(file, f"object {number}, bndbox", why)
        found.names.append(label)
        found.boxes.append((left, top, right, bottom))
        found.difficult.append(difficult == "1")
    return found


def _size(root: ElementTree.Element, file: Path, image: Path) -> tuple[int, int]:
    """Width and height of the image: those in the XML file, or the image's own if they are absent or 0."""
    texts = [root.findtext(f"size/{side}") for side in ("width", "height")]
    numbers = [to_number(text or "0") for text in texts]
    for side, text, number in zip(("width", "height"), texts, numbers, strict=True):
        if number is None or number < 0 or number != int(number):
            raise _wrong(file, f"size/{side}", f"{brief(text)} is not a number of pixels")
    width, height = (int(number or 0) for number in numbers)
    if not width or not height:
        try:
            return read_header(image).size
        except BadImage as bad:
            raise _wrong(file, "size", f"is missing, and {bad.path} cannot be read: {bad.reason}") from bad
    if width * height > max_pixels():
        why = f"{width}×{height} is more than {max_pixels() / 1e6:g} megapixels"
        raise _wrong(file, "size", why)
    return width, height


def _read_xml(file: Path) -> ElementTree.Element:
    """The root of an XML file without a document type, whose entities could expand to gigabytes."""
    elements = 0

    def count(*element: object) -> None:
        nonlocal elements
        elements += 1
        if elements > MAX_ELEMENTS:
            raise UserError(f"it has more than {MAX_ELEMENTS:,} elements")

    try:
        data = read_bytes(file)
        scan = expat.ParserCreate()
        scan.StartDoctypeDeclHandler = _refuse_doctype
        scan.StartElementHandler = count
        scan.Parse(data, True)
        return ElementTree.fromstring(data)
    except UserError as error:
        raise _wrong(file, "file", str(error)) from error
    except (expat.ExpatError, ElementTree.ParseError, ValueError, LookupError) as error:
        raise _wrong(file, "file", f"is not XML: {error}") from error


def _refuse_doctype(*declaration: object) -> None:
    raise UserError("it declares a document type (<!DOCTYPE …>); remove the declaration")


def _wrong(file: Path, field: str, why: str) -> BadAnnotation:
    return BadAnnotation(str(file), file.stem, field, why)


# Files and lists.


def _dataset_folder(root: Path) -> Path:
    """The folder with the annotations: ``root``, or that of the only year in it."""
    if not root.is_dir():
        raise UserError(f"{root} {'is a file, not a folder' if root.exists() else 'does not exist'}")
    if any((root / name).is_dir() for name in ANNOTATIONS[:2]):
        return root
    years = sorted({f.parent for pattern in ("*", "*/*") for f in root.glob(f"{pattern}/{ANNOTATIONS[0]}")})
    if len(years) > 1:
        names = ", ".join(str(year.relative_to(root)) for year in years[:5])
        raise UserError(f"{root} holds several datasets ({names}); name one, such as 'voc:{years[0]}'")
    return years[0] if years else root


def _first_with_files(
    base: Path, folders: Sequence[str], extensions: Collection[str]
) -> tuple[Path, dict[str, Path]]:
    """The first folder that holds such files, and the files by name."""
    for name in folders:
        found = files_by_name(base / name, extensions) if (base / name).is_dir() else {}
        if found:
            return base / name, found
    kinds = " ".join(sorted(extensions))
    raise UserError(f"{base} holds no {kinds} in {', '.join(folders[:2])} or beside them")


def _names_of(base: Path, split: Split, val_share: float | None, all_names: list[str]) -> list[str]:
    """The names of the images of a split."""
    places = {s: base / LISTS / f"{s}.txt" for s in ("train", "val", "test", "trainval")}
    names = {s: _listed(file) for s, file in places.items() if file.is_file()}
    if not names:  # a folder for each split
        for name in all_names:
            folder, inside, _ = name.partition(os.sep)
            if inside and folder in SPLIT_OF:
                names.setdefault(SPLIT_OF[folder], []).append(name)
    if "val" in names and val_share is not None:
        raise UserError(f"{base} has a validation split of {len(names['val'])} images; leave val_share out")
    if "val" in names and "train" not in names and "trainval" in names:
        held_out = set(names["val"])
        names["train"] = [name for name in names["trainval"] if name not in held_out]
    if split in names and (split == "test" or "val" in names):
        return names[split]
    if split == "test":
        raise UserError(f"{base} has no test split; expected {places['test']}")
    undivided = names.get("train") or names.get("trainval") or all_names
    return [undivided[i] for i in divide(undivided, split, val_share, source=str(base))]


def _listed(file: Path) -> list[str]:
    """The first word of every line: lists of one class have a second one."""
    names = list(dict.fromkeys(line.split()[0] for line in read_lines(file) if line.strip()))
    outside = next((name for name in names if not is_inside(name)), None)
    if outside is not None:
        raise UserError(f"{file}: {brief(outside)} lies outside the dataset")
    long = next(filter(is_too_long, names), None)
    if long is not None:
        raise UserError(f"{file}: {brief(long)} is too long for the name of a file")
    if not names:
        raise UserError(f"{file} lists no images")
    return names
