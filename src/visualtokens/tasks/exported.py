"""The tasks of exported models: from images to predictions by numpy and Pillow. Needs no torch."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visualtokens.data.preprocess import Preprocess, SegmentPreprocess, normalised
from visualtokens.errors import UserError, unknown
from visualtokens.files import as_dataclass, one_line
from visualtokens.tasks.prediction import TOP, Classification, Prediction, check_top, top_columns

Array = NDArray[Any]
T = TypeVar("T")
MAX_SIDE = 8_192  # pixels of an input image
LEAST = 32  # pixels of a side that a segmentation model sees; it pads smaller images
STRIP = 8_000_000  # scores that are computed at once


class ExportedModel(Protocol):
    """A file of unknown origin, as a function from a batch of images to the output."""

    @property
    def classes(self) -> list[str]: ...

    @property
    def described(self) -> Mapping[str, Any]:
        """Its metadata: preprocess, input, size, dynamic, multiple, source."""

    def __call__(self, images: Array) -> Array: ...


class ExportedTask(ABC):
    """The part of a ``Task`` that predicts."""

    name: str
    predict_options: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()
    eval_batch: int = 1
    predicts_batches: bool = False

    @abstractmethod
    def prepare(self, model: Any, image: Image.Image) -> Any:
        """Return an RGB image as :meth:`predict_batch` takes it; called from threads."""

    @abstractmethod
    def predict_batch(
        self, model: Any, prepared: Sequence[Any], *_: Any, **options: Any
    ) -> Sequence[Prediction]:
        """Predict images that :meth:`prepare` returned."""

    @abstractmethod
    def columns(self, model: Any, *_: Any, **options: Any) -> dict[str, type]:
        """Return the columns of :meth:`Prediction.rows` with their types."""

    @abstractmethod
    def check(self, model: Any) -> None:
        """Raise :class:`UserError` for a file whose metadata this task cannot use."""


class ExportedClassify(ExportedTask):
    """One label per image."""

    name = "classify"
    predict_options = ("top",)
    eval_batch = 64
    predicts_batches = True

    def check(self, model: ExportedModel) -> None:
        _preprocess(Preprocess, model)
        if not model.classes:
            raise UserError("it names no classes; write it with `vtok export`")

    def prepare(self, model: ExportedModel, image: Image.Image) -> Array:
        preprocess = _preprocess(Preprocess, model)
        return preprocess.pixels(image) if _takes_pixels(model) else preprocess.array(image)

    def predict_batch(
        self, model: ExportedModel, prepared: Sequence[Array], *, top: int = TOP
    ) -> list[Classification]:
        check_top(top)
        step = len(prepared) if "batch" in model.described["dynamic"] else 1
        found: list[Classification] = []
        for start in range(0, len(prepared), max(step, 1)):
            logits = _logits(model, np.stack(prepared[start : start + step]), axes=2)
            found += [Classification(each, model.classes, top) for each in softmax(logits)]
        return found

    def columns(self, model: ExportedModel, *, top: int = TOP) -> dict[str, type]:
        return top_columns(top, len(model.classes))


class _Seen(NamedTuple):
    values: Array
    size: tuple[int, int]  # (H, W) of the image


class ExportedSegment(ExportedTask):
    """One class per pixel; the model sees the whole image once."""

    name = "segment"
    pictures = ("overlay", "classes")

    def check(self, model: ExportedModel) -> None:
        preprocess = _preprocess(SegmentPreprocess, model)
        if preprocess.longest is not None and preprocess.longest > MAX_SIDE:
            raise UserError(f"longest={preprocess.longest} is more than {MAX_SIDE:,} pixels")
        if preprocess.keep_ratio and "size" not in model.described["dynamic"]:
            raise UserError("it takes images of one size only; write it with --dynamic batch,size")
        if not 1 <= len(model.classes) <= 255:
            raise UserError(f"it names {len(model.classes)} classes; 1 to 255 are possible")

    def prepare(self, model: ExportedModel, image: Image.Image) -> _Seen:
        preprocess = _preprocess(SegmentPreprocess, model)
        values: Array = preprocess.pixels(image, least=LEAST, multiple=model.described["multiple"])
        if not _takes_pixels(model):
            values = normalised(values, preprocess.mean, preprocess.std)
        return _Seen(values, (image.height, image.width))

    def predict_batch(
        self, model: ExportedModel, prepared: Sequence[_Seen], *_: Any, **options: Any
    ) -> list[Prediction]:
        from visualtokens.tasks.segment.prediction import Segmentation

        found: list[Prediction] = []
        for seen in prepared:
            logits = _logits(model, seen.values[None], axes=4)
            colours = model.described["source"].get("label_colors")
            found.append(Segmentation(labels_of(logits[0], seen.size), model.classes, colours))
        return found

    def columns(self, model: ExportedModel, *_: Any, **options: Any) -> dict[str, type]:
        return {"label": str, "share": float}


_TASKS = {task.name: task for task in (ExportedClassify(), ExportedSegment())}


def exported_task(name: str | None) -> ExportedTask:
    """Return the task of an exported model by its name."""
    if name not in _TASKS:
        raise unknown("task", str(name)[:40], _TASKS)
    return _TASKS[name]


def _logits(model: ExportedModel, images: Array, *, axes: int) -> Array:
    """Return the output of a file, ``(B, classes, …)``, after a check."""
    found = model(images)
    if not isinstance(found, np.ndarray) or found.dtype.kind != "f":
        raise UserError(f"it returns {getattr(found, 'dtype', type(found).__name__)} instead of float32")
    expected = (len(images), len(model.classes))
    if found.ndim != axes or found.shape[:2] != expected or not found.size:
        raise UserError(f"it returns {found.shape}; images and classes are {expected}")
    if not np.isfinite(found).all():
        raise UserError("it returns values that are not finite, for which there is no answer")
    return found


def _takes_pixels(model: ExportedModel) -> bool:
    return model.described["input"] == "pixels"


def _preprocess(kind: type[T], model: ExportedModel) -> T:
    """Return the preprocessing in the metadata of a file, after a check."""
    stored = dict(model.described["preprocess"] or {})
    try:
        for name in ("mean", "std"):
            stored[name] = tuple(map(float, stored[name]))
        stored["size"] = tuple(stored["size"])
        known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        made = as_dataclass(kind, {name: value for name, value in stored.items() if name in known})
    except (TypeError, ValueError, LookupError) as error:
        raise UserError(f"its preprocessing is damaged: {one_line(error)}") from error
    if max(stored["size"]) > MAX_SIDE:
        raise UserError(f"its preprocessing is damaged: size={stored['size']}")
    return made


def softmax(logits: Array) -> NDArray[np.float32]:
    """Return the softmax of ``logits (B, classes)`` in float32."""
    values = np.exp(logits.astype(np.float32) - logits.max(1, keepdims=True))
    return values / values.sum(1, keepdims=True)


def labels_of(logits: Array, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return the class of every pixel at ``size`` from ``logits (classes, h, w)``, resized bilinearly."""
    labels = np.empty(size, np.uint8)
    left, right, across = _neighbours(logits.shape[2], size[1], np.arange(size[1]))
    for rows in _strips(len(logits), size):
        above, below, down = _neighbours(logits.shape[1], size[0], np.arange(rows.start, rows.stop))
        mixed = logits[:, above] + (logits[:, below] - logits[:, above]) * down[None, :, None]
        scores = mixed[:, :, left] + (mixed[:, :, right] - mixed[:, :, left]) * across
        labels[rows] = scores.argmax(0)
    return labels


def _strips(classes: int, size: tuple[int, int]) -> Iterator[slice]:
    height, width = size
    step = max(1, STRIP // (classes * width))
    return (slice(top, min(top + step, height)) for top in range(0, height, step))


def _neighbours(have: int, want: int, at: Array) -> tuple[Array, Array, NDArray[np.float32]]:
    """Return the pixels of ``have`` around each pixel of ``want``, and the share of the second one."""
    place = np.clip((at + 0.5) * (have / want) - 0.5, 0, have - 1)
    first = np.floor(place).astype(np.int64)
    return first, np.minimum(first + 1, have - 1), (place - first).astype(np.float32)
