"""Checking a dataset before training: what it holds, which files are bad, and what may go wrong."""

from __future__ import annotations

import hashlib
import inspect
import io
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from visualtokens.data.base import AnnotatedImages, ImageStream, Share, Split, brief
from visualtokens.data.catalog import (
    CLASSIFICATION,
    DETECTION,
    SEGMENTATION,
    open_dataset,
    open_detection,
    open_segmentation,
)
from visualtokens.data.check_report import BadFile, DataReport, ObjectCounts, PixelCounts, SplitReport, Spread
from visualtokens.data.decode import BadImage, decode_image, read_header
from visualtokens.data.detection import DetectionDataset, Objects
from visualtokens.data.segmentation import IGNORE, Mask
from visualtokens.errors import UserError, unknown
from visualtokens.progress import count as number_of
from visualtokens.progress import one_image, track

MIN_IMAGES = 10  # of a class in training; fewer are worth a warning
MAX_RATIO = 4  # of the sides of an image; more is worth a warning
AREAS = {"small": 32**2, "medium": 96**2, "large": float("inf")}  # COCO's limits, in pixels

OPEN: Mapping[str, Callable[..., AnnotatedImages[Any]]] = {
    "classify": open_dataset,
    "segment": open_segmentation,
    "detect": open_detection,
}
KINDS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "classify": CLASSIFICATION,
    "segment": SEGMENTATION,
    "detect": DETECTION,
}


# Opening.


@dataclass(frozen=True, eq=False)
class Splits:
    """The splits of a dataset that can be opened, and why the others cannot."""

    spec: str
    task: str
    datasets: dict[Split, AnnotatedImages[Any]]
    absent: dict[Split, str]
    without_masks: str = ""  # detection: why the objects have no masks, if they have none

    @property
    def classes(self) -> list[str]:
        return next(iter(self.datasets.values())).classes


def open_splits(spec: str, /, *, task: str | None = None, **options: Any) -> Splits:
    """Open every split of a dataset with its ``options``; without a training split, its error is raised.

    ``task`` is classify, segment or detect; by default the one that the dataset is for, or classify.
    Detection data are opened with masks if all objects have one. Invalid annotations raise when their image
    is read, and not here, if the dataset has the option ``strict``.
    """
    kind = spec.partition(":")[0]
    task = guess_task(kind) if task is None else task
    if task not in OPEN:
        raise unknown("task", task, OPEN)
    if kind in KINDS[task] and "strict" in inspect.signature(KINDS[task][kind]).parameters:
        options = {"strict": False, **options}
    without_masks = ""
    if task == "detect":
        train, without_masks = _open_objects(spec, options)
        options = {**options, "masks": not without_masks}
    else:
        train = OPEN[task](spec, "train", **options)
    datasets: dict[Split, AnnotatedImages[Any]] = {"train": train}
    absent: dict[Split, str] = {}
    others: tuple[Split, ...] = ("val", "test")
    for split in others:
        try:
            dataset = OPEN[task](spec, split, **options)
        except UserError as error:
            absent[split] = str(error)
            continue
        if dataset.classes == train.classes:
            datasets[split] = dataset
        else:
            names = [brief(each.classes) for each in (dataset, train)]
            absent[split] = f"its classes are {names[0]}, but those of train {names[1]}"
    return Splits(spec, task, datasets, absent, without_masks)


def _open_objects(spec: str, options: Mapping[str, Any]) -> tuple[AnnotatedImages[Any], str]:
    """The training images of a detection dataset, and why they have no masks, if not all objects have one."""
    if "masks" in options:
        raise UserError("data_args may not hold 'masks': they are read if there are any")
    try:
        masks = open_detection(spec, "train", **options)
    except UserError as error:
        return open_detection(spec, "train", masks=False, **options), str(error)
    if not masks.bad:
        return masks, ""
    boxes = open_detection(spec, "train", masks=False, **options)
    missing = [index for index in masks.bad if index not in boxes.bad]
    if not missing:
        return masks, ""
    first = masks.bad[missing[0]]
    return boxes, f"on {len(missing)} of {len(boxes)} training images, first {first.path}: {first.reason}"


def guess_task(kind: str) -> str:
    """The only task that datasets of this kind are for, or classify."""
    tasks = [task for task, kinds in KINDS.items() if kind in kinds]
    if len(tasks) > 1 and "classify" not in tasks:
        raise UserError(f"{kind} has annotations for several tasks; choose one: --task {' or '.join(tasks)}")
    return tasks[0] if len(tasks) == 1 else "classify"


# Reading.


def check(
    data: str | Splits,
    *,
    task: str | None = None,
    limit: int | None = None,
    progress: bool | None = None,
    **options: Any,
) -> DataReport:
    """Read the images and annotations of every split of a dataset, and describe them.

    >>> report = visualtokens.data.check("yolo:/path")
    >>> print(report.text())

    ``data`` and ``options`` are as for :func:`open_splits`. Of each split at most ``limit`` images, evenly
    spread, are decoded; of the others only the header is read.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit} must be at least 1")
    opened = open_splits(data, task=task, **options) if isinstance(data, str) else data
    tallies: dict[str, _Tally] = {}
    for split, dataset in opened.datasets.items():
        tallies[split] = tally = _Tally(opened.task, len(dataset.classes))
        name, items = f"check {split}", _items(dataset, limit)
        for item in track(items, name, total=len(dataset), unit="image", images=one_image, shown=progress):
            tally.add(item)
        tally.partial = limit is not None and limit < len(dataset)
        labels = getattr(dataset, "labels", None)
        if opened.task == "classify" and labels is not None and len(labels) == len(dataset):
            tally.images_of_class = np.bincount(labels, minlength=len(dataset.classes))
            tally.partial = False
    return DataReport(
        data=opened.spec,
        task=opened.task,
        classes=tuple(opened.classes),
        splits={
            split: tally.report(len(opened.datasets[split]))  # type: ignore[index]
            for split, tally in tallies.items()
        },
        absent={str(split): reason for split, reason in opened.absent.items()},
        without_masks=opened.without_masks,
        bad=tuple(
            BadFile(split, bad.path, bad.reason) for split, tally in tallies.items() for bad in tally.bad
        ),
        warnings=tuple(_warnings(opened.classes, tallies)),
    )


@dataclass(frozen=True, eq=False)
class _Item:
    """One image; ``annotation`` and ``digest`` are only there if it was decoded."""

    path: str
    size: tuple[int, int]
    format: str
    annotation: Any = None
    digest: bytes = b""


def _items(dataset: AnnotatedImages[Any], limit: int | None) -> Iterator[_Item | BadImage]:
    """Every image of a dataset, ``limit`` of them decoded."""
    if isinstance(dataset, ImageStream):
        yield from _streamed(dataset, limit)
        return
    count = len(dataset)
    decoded = range(count) if limit is None or limit >= count else set(evenly_spread(count, limit))
    for index in range(count):
        try:
            item = _read(dataset, index, decode=index in decoded)
        except BadImage as bad:
            yield BadImage(bad.path, bad.reason)  # without the traceback, which holds the decoded pixels
        else:
            if item is not None:
                yield item


def evenly_spread(count: int, wanted: int) -> list[int]:
    """At most ``wanted`` of ``count`` positions, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(wanted, count)).round().astype(int)).tolist()


def _read(dataset: AnnotatedImages[Any], index: int, *, decode: bool) -> _Item | None:
    """One image, or only its header if it has one."""
    if isinstance(dataset, DetectionDataset) and index in dataset.bad:
        raise dataset.bad[index]
    path = dataset.path(index)
    header = read_header(path) if os.path.lexists(path) else None
    if not decode:
        return None if header is None else _Item(path, header.size, header.format)
    image, annotation = dataset[index]
    if header is None:  # a row of an array or a synthetic image
        return _Item(path, image.size, "", annotation, hashlib.sha1(image.tobytes()).digest())
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha1").digest()
    return _Item(path, image.size, header.format, annotation, digest)


def _streamed(dataset: ImageStream, limit: int | None) -> Iterator[_Item | BadImage]:
    for index, encoded in enumerate(dataset.read(Share())):
        if limit is not None and index >= limit:
            return
        try:
            image = decode_image(io.BytesIO(encoded.data), encoded.name)
        except BadImage as bad:
            yield BadImage(bad.path, bad.reason)
            continue
        digest = hashlib.sha1(encoded.data).digest()
        yield _Item(encoded.name, image.size, "", encoded.label, digest)


# Counting.


class _Tally:
    """Counts what the images of one split show."""

    def __init__(self, task: str, classes: int) -> None:
        self.task = task
        self.partial = False  # whether some annotations were not read
        self.bad: list[BadImage] = []
        self.decoded = 0
        self.sizes: list[tuple[int, int]] = []
        self.formats: Counter[str] = Counter()
        self.images_of_class = np.zeros(classes, np.int64)
        self.pixels = np.zeros(256, np.int64)
        self.objects_of_class = np.zeros(classes, np.int64)
        self.objects_of_image: list[int] = []
        self.objects_of_size = dict.fromkeys(AREAS, 0)
        self.excluded = 0
        self.paths: dict[bytes, str] = {}  # of the first image with this content
        self.repeated: list[tuple[str, str]] = []  # pairs of images with the same content
        self.stretched: list[str] = []  # images with extreme sides

    def add(self, item: _Item | BadImage) -> None:
        if isinstance(item, BadImage):
            self.bad.append(item)
            return
        self.sizes.append(item.size)
        if item.format:
            self.formats[item.format] += 1
        if max(item.size) > MAX_RATIO * min(item.size):
            self.stretched.append(item.path)
        if item.annotation is None:
            return
        self.decoded += 1
        first = self.paths.setdefault(item.digest, item.path)
        if first is not item.path:
            self.repeated.append((first, item.path))
        if self.task == "classify":
            self.images_of_class[item.annotation] += 1
        elif self.task == "segment":
            self._add_mask(item.annotation)
        else:
            self._add_objects(item.annotation)

    def _add_mask(self, mask: Mask) -> None:
        counts = np.bincount(mask.ravel(), minlength=256)
        self.pixels += counts
        self.images_of_class += counts[: len(self.images_of_class)] > 0

    def _add_objects(self, objects: Objects) -> None:
        self.excluded += int(objects.crowd.sum())
        kept = objects.take(~objects.crowd)
        counts = np.bincount(kept.labels.numpy(), minlength=len(self.objects_of_class))
        self.objects_of_class += counts
        self.images_of_class += counts > 0
        self.objects_of_image.append(len(objects))
        for area in objects.area.tolist():
            self.objects_of_size[next(name for name, limit in AREAS.items() if area < limit)] += 1

    def report(self, images: int) -> SplitReport:
        """The counts, of a split of this many images."""
        pixels = objects = None
        if self.task == "segment":
            counts = self.pixels[: len(self.images_of_class)]
            pixels = PixelCounts(tuple(counts.tolist()), int(self.pixels[IGNORE]))
        if self.task == "detect":
            objects = ObjectCounts(
                tuple(self.objects_of_class.tolist()),
                self.excluded,
                Spread.of(self.objects_of_image),
                self.objects_of_size,
                self.objects_of_image.count(0),
            )
        return SplitReport(
            images=images,
            decoded=self.decoded,
            images_of_class=tuple(self.images_of_class.tolist()),
            width=Spread.of([width for width, _ in self.sizes]),
            height=Spread.of([height for _, height in self.sizes]),
            formats=dict(self.formats.most_common()),
            partial=self.partial,
            pixels=pixels,
            objects=objects,
        )


# Warnings.


def _warnings(classes: list[str], tallies: Mapping[str, _Tally]) -> Iterator[str]:
    """One sentence for everything that is likely to be a mistake or to hurt the training."""
    train = tallies["train"].images_of_class
    if not tallies["train"].partial:
        few = [name for name, count in zip(classes, train, strict=True) if 0 < count < MIN_IMAGES]
        if few:
            yield f"{_some(few)} in fewer than {MIN_IMAGES} training images"
        none = [name for name, count in zip(classes, train, strict=True) if not count]
        if none:
            yield f"{_some(none)} in no training image"
        for split, tally in tallies.items():
            unseen = [name for i, name in enumerate(classes) if tally.images_of_class[i] and not train[i]]
            if unseen:
                yield f"{_some(unseen)} in {split}, but not in train"
    for split, tally in tallies.items():
        if tally.repeated:
            first, second = tally.repeated[0]
            yield f"{split} holds {_images(tally.repeated)} more than once, such as {first} and {second}"
    for first_split, second_split in itertools.combinations(tallies, 2):
        first_paths, second_paths = tallies[first_split].paths, tallies[second_split].paths
        common = [digest for digest in second_paths if digest in first_paths]
        if common:
            pair = f"{first_paths[common[0]]} and {second_paths[common[0]]}"
            yield f"{first_split} and {second_split} have {_images(common)} in common, such as {pair}"
    for split, tally in tallies.items():
        if tally.stretched:
            sides = f"with one side more than {MAX_RATIO} times the other"
            yield f"{split} has {_images(tally.stretched)} {sides}, such as {tally.stretched[0]}"
        if tally.task == "segment" and tally.pixels[IGNORE] > tally.pixels.sum() / 2:
            yield f"{tally.pixels[IGNORE] / tally.pixels.sum():.0%} of the pixels of {split} are ignored"
        if tally.task == "detect" and tally.objects_of_image.count(0) > len(tally.objects_of_image) / 2:
            empty = tally.objects_of_image.count(0)
            images = number_of(len(tally.objects_of_image), "image")
            yield f"{empty} of {images} of {split} without objects"


def _images(found: Sequence[Any]) -> str:
    return number_of(len(found), "image")


def _some(names: list[str]) -> str:
    """Such as ``3 classes (cat, dog, cow)``; at most five are named."""
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f"{number_of(len(names), 'class')} ({shown})"
