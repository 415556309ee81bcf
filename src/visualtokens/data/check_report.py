"""The result of checking a dataset, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from visualtokens.tables import printable, table

SHOWN = 20  # bad files in the text, and
SHOWN_CLASSES = 40  # classes; the dictionary has all
TASKS = {"classify": "classification", "segment": "segmentation", "detect": "detection"}
COUNTED = {"classify": "images", "segment": "pixels", "detect": "objects"}


@dataclass(frozen=True)
class Spread:
    """Smallest, median and largest of some numbers; zeros if there are none."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        if not len(numbers):
            return cls(0, 0, 0)
        return cls(float(np.min(numbers)), float(np.median(numbers)), float(np.max(numbers)))

    def __str__(self) -> str:
        return " / ".join(f"{value:g}" for value in (self.min, self.median, self.max))


@dataclass(frozen=True)
class PixelCounts:
    """The pixels of a split for segmentation."""

    of_class: tuple[int, ...]
    ignored: int

    @property
    def total(self) -> int:
        return sum(self.of_class) + self.ignored


@dataclass(frozen=True)
class ObjectCounts:
    """The objects of a split for detection."""

    of_class: tuple[int, ...]  # without excluded ones
    excluded: int  # crowds and difficult objects, which training and evaluation leave out
    per_image: Spread
    of_size: dict[str, int]  # small, medium and large ones by COCO's limits
    images_without: int


@dataclass(frozen=True)
class SplitReport:
    """What was found in one split. Counts of classes are in the order of the classes."""

    images: int
    decoded: int  # of the images, with their annotations; of the others only the header was read
    images_of_class: tuple[int, ...]  # that are of the class, or show it
    width: Spread
    height: Spread
    formats: dict[str, int]  # images of each file format
    partial: bool  # whether the classes were counted on the decoded images only
    pixels: PixelCounts | None = None
    objects: ObjectCounts | None = None

    def class_cells(self, number: int) -> tuple[str, str]:
        """The two columns of a class: how much there is of it, and on how many images or which share."""
        count, images = self.count_of_class[number], self.images_of_class[number]
        if self.pixels is not None:
            return f"{count / max(self.pixels.total, 1):.1%}", f"{images:,}"
        if self.objects is not None:
            return f"{count:,}", f"{images:,}"
        return f"{images:,}", f"{images / max(sum(self.images_of_class), 1):.1%}"

    @property
    def count_of_class(self) -> tuple[int, ...]:
        """Pixels, objects or images of each class, depending on the task."""
        if self.pixels is not None:
            return self.pixels.of_class
        return self.images_of_class if self.objects is None else self.objects.of_class


@dataclass(frozen=True)
class BadFile:
    """A file that cannot be used."""

    split: str
    path: str
    reason: str


@dataclass(frozen=True)
class DataReport:
    """The result of :func:`visualtokens.data.check`."""

    data: str
    task: str
    classes: tuple[str, ...]
    splits: dict[str, SplitReport]
    absent: dict[str, str]  # splits that could not be opened, and why
    without_masks: str  # detection: why not all objects have masks; empty if they have
    bad: tuple[BadFile, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """Tables of the splits and the classes, warnings, and the first bad files."""
        parts = [self._title(), self._splits()]
        if self.task == "detect":
            parts.append(self._objects())
        parts.append(self._classes())
        if self.warnings:
            parts.append("\n".join(["warnings", *(f"  {printable(warning)}" for warning in self.warnings)]))
        lines = [f"  {bad.split}: {printable(bad.path)}: {printable(bad.reason)}" for bad in self.bad]
        more = [f"  and {len(lines) - SHOWN} more; --json lists all"] if len(lines) > SHOWN else []
        parts.append(
            "\n".join([f"bad files ({len(lines)})", *lines[:SHOWN], *more] if lines else ["no bad files"])
        )
        return "\n\n".join(parts)

    def _title(self) -> str:
        count = f"{len(self.classes)} class{'es' if len(self.classes) > 1 else ''}"
        title = f"{printable(self.data)}: {TASKS[self.task]}, {count}"
        if self.task == "detect":
            title += "\n" + (
                f"boxes without masks: {printable(self.without_masks)}"
                if self.without_masks
                else "boxes and masks"
            )
        return title

    def _splits(self) -> str:
        rows = []
        for name, split in self.splits.items():
            formats = ", ".join(f"{format} {count:,}" for format, count in split.formats.items()) or "–"
            rows.append(
                (
                    name,
                    f"{split.images:,}",
                    f"{split.decoded:,}",
                    str(split.width),
                    str(split.height),
                    formats,
                )
            )
        header = ("split", "images", "decoded", "width: min / median / max", "height", "formats")
        reasons = dict(self.absent)
        if "test" in reasons:  # is not needed for training: without what to do about it
            reasons["test"] = reasons["test"].partition("; ")[0]
        missing = [f"no {name}: {printable(reason)}" for name, reason in reasons.items()]
        return "\n".join([table(rows, header=header, right=(1, 2)), *missing])

    def _objects(self) -> str:
        rows = []
        for name, split in self.splits.items():
            found = split.objects
            assert found is not None
            total = sum(found.of_class) + found.excluded
            counts = (total, found.excluded, *found.of_size.values(), found.images_without)
            rows.append((name, *(f"{count:,}" for count in counts), str(found.per_image)))
        sizes = ("small", "medium", "large")
        header = ("split", "objects", "excluded", *sizes, "images without", "per image: min / median / max")
        return table(rows, header=header, right=range(1, 7))

    def _classes(self) -> str:
        """Counts of each class in each split: images, objects or the share of the pixels."""
        train = self.splits["train"].count_of_class
        order = list(range(len(self.classes)))
        if len(order) > SHOWN_CLASSES:
            order = sorted(order, key=lambda i: train[i])[:SHOWN_CLASSES]
        header, rows = ["class"], [[self.classes[i]] for i in order]
        for name, split in self.splits.items():
            header += [f"{name} {COUNTED[self.task]}", "share" if self.task == "classify" else "images"]
            for row, i in zip(rows, order, strict=True):
                row += split.class_cells(i)
        lines = [table(rows, header=header, right=range(1, len(header)))]
        if any(split.pixels is not None for split in self.splits.values()):
            shares = [
                f"{name} {split.pixels.ignored / max(split.pixels.total, 1):.1%}"
                for name, split in self.splits.items()
                if split.pixels is not None
            ]
            lines.append(f"ignored pixels: {', '.join(shares)}")
        partial = [name for name, split in self.splits.items() if split.partial]
        if partial:
            lines.append(f"counted on the decoded images of {' and '.join(partial)} only")
        if len(order) < len(self.classes):
            lines.append(f"the {len(order)} rarest of {len(self.classes):,} classes; --json lists all")
        return "\n".join([*lines, *self._balance(train)])

    def _balance(self, train: Sequence[int]) -> list[str]:
        present = [i for i, count in enumerate(train) if count]
        if len(present) < 2:
            return []
        most, least = max(present, key=lambda i: train[i]), min(present, key=lambda i: train[i])
        names = [printable(self.classes[i]) for i in (most, least)]
        ratio, what = f"{train[most] / train[least]:.3g}", COUNTED[self.task]
        if train[most] == train[least]:
            return [f"balance: train has the same number of {what} of every class"]
        return [f"balance: train has {ratio} times as many {what} of {names[0]} as of {names[1]}"]
