"""Initial weights (``--init``, ``--pretrained``): reading them, and loading all of them or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from visualtokens.converters import read_checkpoint, released_model
from visualtokens.errors import UserError
from visualtokens.files import CONFIG, WEIGHTS, one_line, read_json
from visualtokens.models.released import find_layout, rename
from visualtokens.models.released_names import FAMILIES
from visualtokens.progress import count as number_of
from visualtokens.tables import printable
from visualtokens.tasks.hub import HUB, LOCAL, download, pretrained_model
from visualtokens.tasks.options import TaskOptions
from visualtokens.tasks.schema import BUILD_ERRORS, LABELS, check_config, check_input, check_task, naming
from visualtokens.tasks.task import DEFAULT_TASK
from visualtokens.tasks.timm_models import (
    PREPROCESSING,
    Backbone,
    adapted_model,
    build_model,
    flat,
    head_prefixes,
)

FILES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
FOLDER_FILES = (WEIGHTS, "pytorch_model.bin")  # the weights of a folder, in this order of preference
ACCEPTED = (
    f"give a checkpoint folder with {CONFIG} and {WEIGHTS}, a .safetensors or .pth file, "
    f"or {HUB}ORGANIZATION/NAME"
)
# Arguments of a model that released weights need; they change no shape.
RELEASED_ARGS = frozenset(n for family in FAMILIES.values() for layout in family for n in layout.options)
REDUCTION = ".reduction."  # in the names of parameters that `reduce` adds to a vision transformer


class ResumedFrom(str):
    """The snapshot that a run resumes from, in place of ``init``: its settings are read, its weights are not,
    because the engine loads them."""


@dataclass(frozen=True)
class Initial:
    """Initial weights and what is known of them; by default the random ones of a new model."""

    origin: str = ""  # for messages: the option and its value
    weights: Mapping[str, Tensor] | None = None  # None: those of timm, or of a snapshot, are loaded later
    pretrained: bool = False  # whether timm fetches them
    task: str = DEFAULT_TASK
    classes: list[str] | None = None
    cfg: dict[str, Any] = field(default_factory=dict)  # entries of timm's pretrained_cfg: input size, mean, …
    model_args: dict[str, Any] = field(default_factory=dict)  # arguments of the model that they need

    def add_to_backbone(self, model_args: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``model_args`` of a model with a backbone, with the arguments that the weights need."""
        if not self.model_args:
            return dict(model_args)
        return {**model_args, "backbone_args": self.model_args | dict(model_args.get("backbone_args") or {})}

    @property
    def statistics(self) -> dict[str, Any]:
        """The mean and standard deviation of their input, if known."""
        return {name: tuple(self.cfg[name]) for name in ("mean", "std") if name in self.cfg}


# Reading.


def read_initial(options: TaskOptions, *, model: str) -> Initial:
    """Return the initial weights for the timm model ``model`` that the options name."""
    if options.pretrained:
        return Initial(f"pretrained: the weights of {model!r}", pretrained=True)
    if options.init is None:
        return Initial()
    try:
        return _read(options.init, model)
    except UserError as error:
        raise UserError(f"init: {error}") from error


def _read(source: str, model: str) -> Initial:
    if isinstance(source, ResumedFrom):
        return _described(Path(source), f"init: {source!r}", model)
    if source.startswith(HUB):
        config, file = download(source.removeprefix(HUB), CONFIG, FOLDER_FILES)
        weights = read_checkpoint(file)
        return _described(config.parent, f"init: the weights of {source!r}", model, weights=weights)
    path = Path(source.removeprefix(LOCAL))
    if path.name == WEIGHTS and (path.parent / CONFIG).is_file():
        path = path.parent  # a checkpoint folder, by the name of its file
    if path.is_dir():
        return _read_folder(path, source, model)
    if path.is_file():
        return _read_file(path, source, model)
    hint = f"; for timm's weights of {source!r} give --pretrained instead" if timm.is_model(source) else ""
    raise UserError(f"{source!r} does not exist; {ACCEPTED}{hint}")


def _read_folder(folder: Path, source: str, model: str) -> Initial:
    """Read a checkpoint folder of this library or of timm."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{source!r} has no {CONFIG}; {ACCEPTED}")
    file = next((folder / name for name in FOLDER_FILES if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{source!r} has no {WEIGHTS}; {ACCEPTED}")
    return _described(folder, f"init: the weights in {source!r}", model, weights=read_checkpoint(file))


def _described(
    folder: Path, origin: str, model: str, *, weights: Mapping[str, Tensor] | None = None
) -> Initial:
    """Return the weights with what the folder's ``config.json`` says of them."""
    config = read_json(folder / CONFIG)
    with naming(folder / CONFIG):
        task = check_task(config.get("task", DEFAULT_TASK))
        check_config(config)
        where = next((name for name in ("pretrained_cfg", "preprocess") if name in config), "")
        stored = config[where] if where else config  # older timm folders have no pretrained_cfg
        check_input(stored, where or "config", size="input_size", dims=3)
    names = config.get(LABELS)
    names = list(names.values()) if isinstance(names, dict) else names
    return Initial(
        origin,
        weights,
        task=task,
        classes=[str(name) for name in names] if names else None,
        cfg={name: stored[name] for name in PREPROCESSING if stored.get(name) is not None},
        model_args=_released_args(config, model),
    )


def _released_args(config: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the entries of ``model_args`` that released weights of the same model need."""
    model_args = config.get("model_args", {})
    if model_args.get("backbone") == model:
        body = model_args.get("backbone_args")
        model_args = body if isinstance(body, dict) else {}
    elif config["architecture"].partition(".")[0] != model.partition(".")[0]:
        return {}
    return {name: value for name, value in model_args.items() if name in RELEASED_ARGS}


def _read_file(path: Path, source: str, model: str) -> Initial:
    """Read a file of weights with timm's names, or those of a released checkpoint."""
    if path.suffix not in FILES:
        raise UserError(f"{source!r} is not a file of weights; {ACCEPTED}")
    weights, origin = read_checkpoint(path), f"init: the weights in {source!r}"
    layout = find_layout(weights)
    if layout is None:
        return Initial(origin, weights)
    if not layout.accepts(model):
        raise UserError(
            f"{source!r} holds released weights of {released_model(weights, layout)!r}, not of {model!r}; "
            "choose that model"
        )
    renamed, unmatched = rename(weights, layout)
    if unmatched:
        raise UserError(
            f"{source!r} is no released checkpoint of {model!r}: it also holds {_some(unmatched)}"
        )
    return Initial(origin, renamed, cfg=dict(layout.cfg), model_args=dict(layout.options))


# Loading.


def initialize_classifier(
    model: nn.Module,
    initial: Initial,
    *,
    name: str,
    classes: Sequence[str],
    model_args: Mapping[str, Any],
    tasks: Sequence[str] = (DEFAULT_TASK,),
) -> list[str]:
    """Load the weights into a classifier of ``classes``; return what is worth telling.

    A head for other classes keeps its random weights. ``name`` and ``model_args`` are those that the model
    was built with: position embeddings are resampled to its input size. Everything else must fit.
    """
    if initial.task not in tasks:
        raise UserError(f"{initial.origin} were trained to {initial.task}, not to {tasks[0]}; give others")
    if initial.weights is None and not initial.pretrained:
        return []
    expected, head = model.state_dict(), head_prefixes(model)
    initial = _with_new_reduction(initial, expected)
    weights: Mapping[str, Tensor] = initial.weights or {}
    if {n: w.shape for n, w in weights.items()} != {n: w.shape for n, w in expected.items()}:
        weights = _as_classifier(initial, name, model_args, cfg=initial.cfg)
    count = _rows(weights, head)
    if initial.classes is None and count == len(classes):
        kept, note = True, "their classifier is kept: it has as many classes as the data"
    else:
        kept, note = initial.classes == list(classes), _new_head(count, len(classes))
    if not kept:
        weights = {n: w for n, w in weights.items() if not n.startswith(head)}
        expected = {n: w for n, w in expected.items() if not n.startswith(head)}
    _require_fit(weights, expected, initial.origin, name)
    model.load_state_dict(weights, strict=False)
    return [initial.origin if initial.classes == list(classes) else f"{initial.origin}; {note}"]


def _with_new_reduction(initial: Initial, expected: Mapping[str, Tensor]) -> Initial:
    """Complete weights without a token reduction by the new parameters of the model's: α or a convolution."""
    if initial.weights is None or any(REDUCTION in n for n in initial.weights):
        return initial
    new = {n: w for n, w in expected.items() if REDUCTION in n}
    return replace(initial, weights={**initial.weights, **new})


def _new_head(count: int, wanted: int) -> str:
    if not count:
        return "they have no classifier: it starts from random weights"
    others = "other classes" if count == wanted else f"{number_of(count, 'class')} instead of {wanted}"
    return f"their classifier is for {others}: a new one starts from random weights"


def _rows(weights: Mapping[str, Tensor], head: Sequence[str]) -> int:
    """Return the number of classes of the weights; 0 if they have no classifier."""
    weight = weights.get(f"{head[0]}weight") if head else None
    return 0 if weight is None or not weight.ndim else len(weight)


def _as_classifier(
    initial: Initial, name: str, model_args: Mapping[str, Any], *, cfg: Mapping[str, Any] | None = None
) -> Mapping[str, Tensor]:
    """Return the weights as those of a classifier with their own classes and these ``model_args``.

    ``cfg`` is that of :func:`build_model`.
    """
    if initial.weights is None:
        model = pretrained_model(name, origin=initial.origin, instead="--init FOLDER", model_args=model_args)
        return model.state_dict()
    with torch.device("meta"):  # no values are needed
        count = _rows(initial.weights, head_prefixes(timm.create_model(name, **model_args)))
        expected = build_model(name, classes=count, model_args=model_args, cfg=cfg).state_dict()
    integers = [n for n, w in initial.weights.items() if not w.is_floating_point()]
    if any(n in expected and expected[n].is_floating_point() for n in integers):
        _require_fit(initial.weights, expected, initial.origin, name)
    try:
        model = adapted_model(name, weights=initial.weights, classes=count, model_args=model_args, cfg=cfg)
    except BUILD_ERRORS as error:
        _require_fit(initial.weights, expected, initial.origin, name)
        raise UserError(f"{initial.origin} do not fit {name!r}: {one_line(error)}") from error
    return model.state_dict()


def initialize_dense(
    model: nn.Module,
    initial: Initial,
    *,
    task: str,
    classes: Sequence[str],
    backbone: Backbone,
    body: str,
    heads: Sequence[str],
) -> list[str]:
    """Load the weights of a model of the same ``task``, or of a classifier into the backbone.

    From the same task all weights are loaded; those with one of ``heads`` in their name, which depend on the
    classes, only if the classes are the same. From a classifier those of the backbone are loaded, whose
    names start with ``body``. Returns what is worth telling.
    """
    if initial.weights is None and not initial.pretrained:
        return []
    expected = model.state_dict()
    if initial.task != task:
        if initial.task != DEFAULT_TASK:
            raise UserError(
                f"{initial.origin} were trained to {initial.task}; give those of a classifier, or of "
                f"task={task}"
            )
        known = {flat(n): w for n, w in _as_classifier(initial, backbone.name, backbone.options).items()}
        own = {n: backbone.find(known, n.removeprefix(body), None) for n in expected if n.startswith(body)}
        weights = {n: w for n, w in own.items() if w is not None}
        expected = {n: w for n, w in expected.items() if n in own}
        note = "for the backbone; the rest starts from random weights"
    elif initial.classes == list(classes):
        weights, note = dict(initial.weights or {}), ""
    else:
        weights = {n: w for n, w in (initial.weights or {}).items() if not any(h in n for h in heads)}
        expected = {n: w for n, w in expected.items() if not any(h in n for h in heads)}
        note = "they are for other classes: the layers that predict them start from random weights"
    _require_fit(weights, expected, initial.origin, "the model")
    model.load_state_dict(weights, strict=False)
    return [initial.origin + (f"; {note}" if note else "")]


SHOWN = 3  # names in a message


def _require_fit(
    weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], origin: str, name: str
) -> None:
    """Raise :class:`UserError` with the names of the weights that differ from the expected ones."""
    # Files of old versions of PyTorch have no counters, and they are not used.
    missing = [n for n in expected if n not in weights and not n.endswith("num_batches_tracked")]
    extra = [n for n in weights if n not in expected]
    shapes = [
        f"{n} ({_shape(w)} instead of {_shape(expected[n])})"
        for n, w in weights.items()
        if n in expected and w.shape != expected[n].shape
    ]
    kinds = [
        f"{n} ({str(w.dtype).removeprefix('torch.')})"
        for n, w in weights.items()
        if n in expected and w.is_floating_point() != expected[n].is_floating_point()
    ]
    groups = {"missing": missing, "unknown": extra, "of another shape": shapes, "of another type": kinds}
    problems = [f"{len(names)} {what}: {_some(names)}" for what, names in groups.items() if names]
    if problems:
        raise UserError(
            f"{origin} do not fit {name!r}, so none was loaded; {'; '.join(problems)}; "
            "give the model and model_args that they were trained with"
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(printable(name)[:100] for name in names[:SHOWN])
    return shown + (", …" if len(names) > SHOWN else "")


def _shape(weight: Tensor) -> str:
    return "×".join(map(str, weight.shape)) or "a number"
