"""The interface between a task and everything else: training engine, checkpoints and command line.

A task is described by one :class:`Task` and registered by one line, ``register_task(MyTask())``. Then
``vtok train --task``, ``vtok eval``, ``vtok predict`` and ``visualtokens.load`` work with it; none of them
knows a task by name.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from visualtokens.data import BadImage, Share, Split
from visualtokens.errors import UserError, unknown
from visualtokens.files import CONFIG, WEIGHTS, load_weights, read_config, read_weights
from visualtokens.progress import count as number_of
from visualtokens.tasks.evaluation import Evaluation
from visualtokens.tasks.freeze import freeze, freeze_norms
from visualtokens.tasks.options import TaskOptions
from visualtokens.tasks.prediction import Prediction
from visualtokens.tasks.schema import (
    LABELS,
    check_config,
    check_task,
    limited_model,
    naming,
    without_initial_weights,
)

if TYPE_CHECKING:
    from visualtokens.explain import Explanation, Subject


class Task(ABC):
    """Describes one task. Instances hold no state; a run has a :class:`Training`, a trained model a
    :class:`Checkpoint`."""

    name: str
    score: str  # validation metric, higher is better, that selects the best checkpoint
    unused: tuple[str, ...] = ()  # training options that have no effect on this task
    eval_options: tuple[str, ...] = ()  # task-specific options of `vtok eval`, passed to `evaluate`
    predict_options: tuple[str, ...] = ()  # likewise for `vtok predict` and `predict`
    explain_options: tuple[str, ...] = ()  # likewise for `vtok explain` and `subject`
    pictures: tuple[str, ...] = ()  # endings of the pictures of a prediction: <name>_<ending>.png
    eval_batch: int = 64  # default batch size of an evaluation
    predicts_batches: bool = False  # whether `predict_batch` is faster than one image after the other

    @abstractmethod
    def open(self, options: TaskOptions) -> Training[Any]:
        """Open the data and build a new model on the CPU; writes nothing."""

    @abstractmethod
    def build(self, config: Mapping[str, Any]) -> tuple[nn.Module, list[str], Any]:
        """Return the model that ``config.json`` describes, without its weights, its classes and its
        preprocessing."""

    @abstractmethod
    def open_data(self, checkpoint: Checkpoint, data: str, split: Split, /, **options: Any) -> Any:
        """Open a dataset to evaluate a trained model on; it has ``classes`` and a length.

        ``options`` are those of the dataset.
        """

    @abstractmethod
    def loader(self, dataset: Any, preprocess: Any, loading: Loading) -> ExampleLoader[Any]:
        """Return a loader that yields every image once, in order and not augmented."""

    @abstractmethod
    def evaluate(self, checkpoint: Checkpoint, batches: Any, *_: Any, **options: Any) -> Evaluation:
        """Evaluate a trained model; ``options`` are ``progress`` and those named in ``eval_options``."""

    @abstractmethod
    def predict(self, checkpoint: Checkpoint, image: Image.Image, *_: Any, **options: Any) -> Prediction:
        """Predict one RGB image; ``options`` are those named in ``predict_options``."""

    def prepare(self, checkpoint: Checkpoint, image: Image.Image) -> Any:
        """Return an RGB image as :meth:`predict_batch` takes it, here unchanged; called from threads."""
        return image

    def predict_batch(
        self, checkpoint: Checkpoint, prepared: Sequence[Any], *_: Any, **options: Any
    ) -> Sequence[Prediction]:
        """Predict images that :meth:`prepare` returned, with the results of :meth:`predict` for each."""
        return [self.predict(checkpoint, image, **options) for image in prepared]

    def columns(self, checkpoint: Checkpoint, *_: Any, **options: Any) -> dict[str, type]:
        """Return the columns of :meth:`Prediction.rows` with their types: str, float or int."""
        raise UserError(f"predictions of task {self.name!r} have no columns; choose --format jsonl")

    def subject(
        self,
        checkpoint: Checkpoint,
        image: Image.Image,
        *_: Any,
        **options: Any,
    ) -> Subject:
        """Return what is explained about an RGB image: by default the main prediction.

        ``options`` are ``target``, the class to explain, ``against``, one to compare it with, and those named
        in ``explain_options``.
        """
        raise UserError(f"a checkpoint of task {self.name!r} cannot be explained; its task has no subject")

    def image_module(self, checkpoint: Checkpoint) -> tuple[nn.Module, Tensor]:
        """Return the module that takes normalised images ``(B, 3, H, W)``, and a black pixel for it."""
        preprocess = checkpoint.preprocess
        return checkpoint.model, normalised_black(preprocess.mean, preprocess.std)

    def classifier(self, checkpoint: Checkpoint) -> nn.Module:
        """Return a model from images to logits ``(B, classes)``, which measures of faithfulness need."""
        raise UserError(
            f"faithfulness is measured on classifiers; this is a checkpoint of task {self.name!r}"
        )

    def export_module(self, checkpoint: Checkpoint) -> nn.Module:
        """Return the module from images ``(B, 3, H, W)`` to one tensor that an exported file holds."""
        return checkpoint.model

    def input_size(self, model: nn.Module, preprocess: Any) -> str:
        """Return the size of the images that the model sees as text."""
        size = getattr(preprocess, "size", None)
        return "of any size" if size is None else f"{size[0]}×{size[1]}"

    def resize(self, checkpoint: Checkpoint, size: int) -> Checkpoint:
        """Return the checkpoint with another input size."""
        return replace(checkpoint, preprocess=replace(checkpoint.preprocess, size=(size, size)))

    def load(self, path: str | Path, config: Mapping[str, Any] | None = None) -> Checkpoint:
        """Load a checkpoint of this task in eval mode; ``config`` is its ``config.json`` if read already."""
        folder = Path(path)
        config = read_config(folder) if config is None else config
        with naming(folder / CONFIG):
            trained = check_task(config.get("task", DEFAULT_TASK))
            if trained != self.name:
                raise UserError(f"it was trained to {trained}, not to {self.name}; give another checkpoint")
            self.check(config)
        weights = read_weights(folder)
        with naming(folder / CONFIG), limited_model(weights):
            model, classes, preprocess = self.build(config)
        load_weights(model, weights, folder / WEIGHTS, str(config["architecture"]))
        return Checkpoint(model.eval(), classes, preprocess, self, dict(config))

    def describe(
        self, architecture: str, *, classes: Sequence[str], model_args: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the part of ``config.json`` that all tasks share; :meth:`described` reads it."""
        return {
            "architecture": architecture,
            "num_classes": len(classes),
            LABELS: list(classes),
            "model_args": without_initial_weights(model_args),
        }

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise :class:`UserError` if a ``config.json`` holds a forbidden entry, a wrong type or value."""
        check_config(config)

    def described(self, config: Mapping[str, Any]) -> tuple[str, list[str], dict[str, Any]]:
        """Return the architecture, classes and ``model_args`` that :meth:`describe` wrote, after a check."""
        self.check(config)
        count, names = config["num_classes"], config.get(LABELS, range(config["num_classes"]))
        classes = [str(name) for name in (names.values() if isinstance(names, dict) else names)]
        if len(classes) != count:
            raise UserError(f"it names {number_of(len(classes), 'class')} for a model of {count}")
        return config["architecture"], classes, dict(config.get("model_args", {}))


@dataclass(frozen=True)
class Checkpoint:
    """A trained model: in eval mode, with its classes, its preprocessing and its task."""

    model: nn.Module
    classes: list[str]
    preprocess: Any  # from an RGB image to what the model takes
    task: Task
    config: dict[str, Any]  # the content of config.json

    def predict(self, image: Image.Image, **options: Any) -> Prediction:
        """Predict one RGB image, on the device of the model; ``options`` depend on the task."""
        return self.task.predict(self, image, **options)

    def predict_batch(self, images: Iterable[Image.Image], **options: Any) -> Sequence[Prediction]:
        """Predict several RGB images together; each result is that of :meth:`predict`, up to rounding."""
        return self.task.predict_batch(self, [self.task.prepare(self, image) for image in images], **options)

    def explain(self, image: Image.Image, **options: Any) -> Explanation:
        """Explain the prediction of one RGB image; see ``visualtokens.explain`` and :meth:`Task.subject`."""
        from visualtokens.explain import explain_subject

        about = ("target", "against", *self.task.explain_options)
        known = {*about, *inspect.signature(explain_subject).parameters} - {"subject", "classes"}
        for name in options:
            if name not in known:
                raise unknown(f"option to explain a checkpoint of task {self.task.name!r}:", name, known)
        asked = {name: options.pop(name) for name in about if name in options}
        subject = self.task.subject(self, image, **asked)
        return explain_subject(subject, classes=self.classes, **options)


# Training.


class Examples(Protocol):
    """A batch."""

    @property
    def bad(self) -> tuple[BadImage, ...]:
        """The images that could not be read and are not in the batch."""

    def __len__(self) -> int:
        """Number of images, possibly 0."""

    def to(self, device: torch.device, *, memory_format: torch.memory_format) -> Self:
        """Return the batch on the device."""

    def split(self, parts: int) -> list[Self]:
        """Split into parts of about the same size, each of at least one image."""


E = TypeVar("E", bound=Examples)
E_co = TypeVar("E_co", bound=Examples, covariant=True)


class ExampleLoader(Protocol[E_co]):
    """Iterates over the batches of an epoch."""

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Select the epoch of the next iteration and its first batch."""

    def __len__(self) -> int:
        """Batches of a whole epoch; the same number in every process."""

    def __iter__(self) -> Iterator[E_co]: ...


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How batches are loaded."""

    batch: int  # images per step, over all processes
    seed: int = 0
    workers: int = 0
    share: Share = field(default_factory=Share)  # the part of every batch that this process loads
    pin_memory: bool = False


@dataclass(frozen=True, eq=False)
class Loss:
    """The loss of a batch, and sums to log."""

    value: Tensor  # mean over the images, with its graph
    sums: Mapping[str, Tensor] = field(default_factory=dict)  # over the images; the log shows their means


class Training(ABC, Generic[E]):
    """A task with its data and a new model: what the training engine needs to know."""

    notes: Sequence[str] = ()  # for the log of a new run, such as where the weights come from

    def __init__(
        self, task: Task, model: nn.Module, *, train_set: Any, val_set: Any, preprocess: Any
    ) -> None:
        if list(val_set.classes) != list(train_set.classes):
            raise UserError(
                f"{train_set.spec}: the classes of train and val must be the same, in the same order"
            )
        self.task, self.model = task, model
        self.train_set, self.val_set, self.preprocess = train_set, val_set, preprocess
        self.classes: list[str] = train_set.classes

    @property
    def images(self) -> tuple[int, int]:
        """Number of training and of validation images."""
        return len(self.train_set), len(self.val_set)

    @abstractmethod
    def train_loader(self, loading: Loading) -> ExampleLoader[E]:
        """Return a loader of batches that are shuffled and augmented depending on seed and epoch."""

    def val_loader(self, loading: Loading) -> ExampleLoader[E]:
        """Return a loader that yields every validation image once."""
        return self.task.loader(self.val_set, self.preprocess, loading)

    @abstractmethod
    def loss(self, model: nn.Module, batch: E, *, rng: np.random.Generator) -> Loss:
        """Call ``model`` (``self.model`` or a wrapper of it) once and return the loss.

        Randomness comes from ``rng``, which is the same for all parts of one step, or from torch's global
        generator, which differs between processes. The engine seeds both.
        """

    @abstractmethod
    def evaluate(self, model: nn.Module, batches: Iterable[E], *, progress: bool | None) -> Evaluation:
        """Evaluate the model. Every process passes its share of the batches and gets the metrics of all."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what ``config.json`` must hold to build the model without the data."""

    def heads(self) -> set[str]:
        """Return the names of the parameters outside the backbone, which ``freeze`` leaves trainable."""
        raise UserError(f"task {self.task.name!r} does not support freeze; leave it out")

    def to(self, device: torch.device) -> None:
        """Move what the loss needs besides the model, such as a teacher."""


def open_training(options: TaskOptions) -> Training[Any]:
    """Open the data and build the model of a run; writes nothing."""
    task = get_task(options.task)
    options.refuse(task.unused)
    training = task.open(options)
    training.task.check(training.describe())  # what is trained can be loaded
    if options.frozen is not None:
        note = freeze(training.model, options.frozen, heads=training.heads(), name=options.model)
        training.notes = (*training.notes, note)
    if options.freeze_norms:
        note = freeze_norms(training.model, heads=training.heads(), name=options.model)
        training.notes = (*training.notes, note)
    return training


def normalised_black(mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return the value of a black pixel ``(3, 1, 1)`` after normalisation."""
    return (-torch.tensor(mean) / torch.tensor(std)).view(3, 1, 1)


# The registry.

DEFAULT_TASK = "classify"  # of a config.json that names none, such as timm's
_BUILT_IN = {  # imported on first use, because detection brings in torchvision's detectors
    "classify": "visualtokens.tasks.classify.task",
    "segment": "visualtokens.tasks.segment.task",
    "detect": "visualtokens.tasks.detect.task",
}
_registered: dict[str, Task] = {}


def register_task(task: Task) -> Task:
    """Make a task available under its name; a task of the same name is replaced."""
    _registered[task.name] = task
    return task


def get_task(name: str) -> Task:
    """Return the task registered under this name."""
    if name not in _registered and name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[name])
    if name not in _registered:
        raise unknown("task", name, {*_BUILT_IN, *_registered})
    return _registered[name]
