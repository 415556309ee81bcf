"""Checks of ``config.json`` before a model is built from it: a checkpoint may come from anywhere.

A checkpoint passes plain words, numbers, and lists and objects of them to the constructor of its model. It
cannot name files, addresses or other weights.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import timm
from timm.models import build_model_with_cfg
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from visualtokens.data.base import MAX_CLASSES, brief, is_int
from visualtokens.errors import UserError
from visualtokens.files import one_line

LABELS = "label_names"  # the entry of config.json with the names of the classes, as timm calls it
MAX_SIDE = 8_192  # pixels of an input image
MAX_NUMBER = 100_000  # in model_args
MAX_ENTRIES = 1_000  # of a list or an object in model_args
MAX_NAME = 1_000  # characters of the name of a class
MAX_ARGUMENT = 64  # characters of the name of an argument
SPARE_TENSORS, SPARE_VALUES = 20_000, 300_000_000  # a model may have besides four times its weights

# Arguments of timm.create_model itself, not of a model: they fetch weights or change what is built.
BUILDER_ARGS = frozenset(
    {*inspect.signature(timm.create_model).parameters, *inspect.signature(build_model_with_cfg).parameters}
    | {"features_only", "feature_cls", "pruned", "device", "dtype"}
) - {"kwargs"}
INITIAL_WEIGHTS = frozenset({"init_from", "pretrained"})  # training options; a checkpoint has its own weights
_RESERVED = BUILDER_ARGS | INITIAL_WEIGHTS | {"num_classes"}
# Names of arguments whose value is a file or an address; drop_path is stochastic depth.
_NAMES_FILE = re.compile(
    r"(^|_)(file(name)?|dir|folder|ur[il]|(hub|repo)(_id)?|checkpoint|weights|source)$|^path$|(?<!drop)_path$"
)
_SIDES = ("img_size", "short", "long")  # arguments in pixels
# What a constructor raises for an argument that it does not have, or with a value that it cannot use.
BUILD_ERRORS: tuple[type[Exception], ...] = (
    *(TypeError, ValueError, LookupError, AttributeError),
    *(AssertionError, RuntimeError, ArithmeticError, MemoryError),
)
_MODELS = ("backbone", "base")  # arguments that name a timm model
_MODEL = re.compile(r"[A-Za-z0-9_-]{1,100}(\.[A-Za-z0-9_-]{1,100})?")  # resnet50.a1_in1k
_WORD = re.compile(r"[A-Za-z0-9_+-]{0,64}(/[0-9]{1,4})?")  # gelu_tanh, deit_small/3
_STATISTICS = {"mean": (-1e6, 1e6), "std": (1e-6, 1e6)}
_KINDS = {
    "crop_pct": (int, float, NoneType),
    "interpolation": (str,),
    "keep_ratio": (bool,),
    "longest": (int, NoneType),
}


def check_config(config: Mapping[str, Any]) -> None:
    """Raise :class:`UserError` for a field that all tasks read if it has another type or exceeds a limit."""
    architecture, count = config.get("architecture"), config.get("num_classes")
    if not isinstance(architecture, str) or not is_int(count):
        raise UserError("it does not name an 'architecture' and its 'num_classes'")
    if not _MODEL.fullmatch(architecture):
        raise UserError(f"architecture={brief(architecture)} is not the name of a model")
    if not 1 <= count <= MAX_CLASSES:
        raise UserError(f"num_classes={count} must be from 1 to {MAX_CLASSES:,}")
    names = config.get(LABELS, [])
    if not isinstance(names, list | dict):
        raise UserError(f"label_names={brief(names)} is not a list of names")
    check_classes(list(names.values()) if isinstance(names, dict) else names)
    model_args = config.get("model_args", {})
    if not isinstance(model_args, dict):
        raise UserError(f"model_args={brief(model_args)} is not a JSON object")
    _check_arguments(model_args, "model_args")


def check_task(name: object) -> str:
    """Return the name of a task if it can be one."""
    if not isinstance(name, str) or not _WORD.fullmatch(name):
        raise UserError(f"task={brief(name)} is not the name of a task")
    return name


def check_classes(names: Sequence[Any]) -> None:
    """Raise :class:`UserError` for something else than a name of a class, or a very long one."""
    for name in names:
        if not isinstance(name, str) and not is_int(name):
            raise UserError(f"class {brief(name)} is not a name")
        if len(str(name)) > MAX_NAME:
            raise UserError(f"class {brief(name)} is longer than {MAX_NAME:,} characters; rename it")


def check_colours(colours: object, classes: int) -> None:
    """Raise :class:`UserError` unless these are the RGB colours of this number of classes."""
    if not isinstance(colours, list) or len(colours) != classes:
        raise UserError(f"label_colors={brief(colours)} is not a list of {classes:,} colours")
    for colour in colours:
        if not isinstance(colour, list) or len(colour) != 3 or not all(map(is_int, colour)):
            raise UserError(f"label_colors: {brief(colour)} is not a list of three numbers")
        if not all(0 <= channel <= 255 for channel in colour):
            raise UserError(f"label_colors: {brief(colour)} must be from 0 to 255")


def check_input(stored: object, where: str, *, size: str, dims: int) -> None:
    """Check the preprocessing in ``stored``: its ``size`` of ``dims`` numbers, ([3,] H, W), and the rest."""
    if not isinstance(stored, dict):
        raise UserError(f"{where}={brief(stored)} is not a JSON object")
    if size in stored:
        sides = stored[size]
        if not isinstance(sides, list | tuple) or len(sides) != dims or not all(map(is_int, sides)):
            raise UserError(f"{where}.{size}={brief(sides)} is not a size in pixels")
        if not all(1 <= side <= MAX_SIDE for side in sides[-2:]):
            raise UserError(f"{where}.{size}={brief(sides)} must be from 1 to {MAX_SIDE:,} pixels")
        if dims == 3 and sides[0] != 3:
            raise UserError(f"{where}.{size}={brief(sides)} is not the size of RGB images")
    for name, (low, high) in _STATISTICS.items():
        values = stored.get(name, [1, 1, 1])
        if not isinstance(values, list | tuple) or len(values) != 3 or not all(map(_is_number, values)):
            raise UserError(f"{where}.{name}={brief(values)} is not a list of three numbers")
        if not all(low <= value <= high for value in values):
            raise UserError(f"{where}.{name}={brief(values)} must be from {low:g} to {high:g}")
    for name, kinds in _KINDS.items():
        if name in stored and type(stored[name]) not in kinds:
            raise UserError(f"{where}.{name}={brief(stored[name])} has the wrong type")
        _check_value(stored.get(name), f"{where}.{name}", name)


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Name the file in the errors of checking it and of building the model that it describes."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except BUILD_ERRORS as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{file}: its model cannot be built: {reason}") from error


@contextlib.contextmanager
def limited_model(weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise :class:`UserError` in this context when a model gets much larger than its weights.

    Part of a timm model may be built and dropped, such as the classifier of a backbone.
    """
    left = [4 * len(weights) + SPARE_TENSORS, 4 * sum(w.numel() for w in weights.values()) + SPARE_VALUES]
    thread = threading.get_ident()

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and threading.get_ident() == thread:
            left[0] -= 1
            left[1] -= parameter.numel()
            if min(left) < 0:
                raise UserError("its model is much larger than its weights; restore its model_args")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def without_initial_weights(model_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``model_args`` without the entries, also nested ones, that load weights into a new model."""
    return {
        name: without_initial_weights(value) if isinstance(value, Mapping) else value
        for name, value in model_args.items()
        if name not in INITIAL_WEIGHTS
    }


def _check_arguments(arguments: Mapping[str, Any], where: str) -> None:
    if len(arguments) > MAX_ENTRIES:
        raise UserError(f"{where} has more than {MAX_ENTRIES:,} entries")
    for name, value in arguments.items():
        if name in _RESERVED:
            raise UserError(f"{where} may not hold {name!r}; leave it out")
        if not name.isidentifier() or len(name) > MAX_ARGUMENT:
            raise UserError(f"{where} holds {brief(name)}, which is not the name of an argument")
        if name in _MODELS and isinstance(value, str) and _MODEL.fullmatch(value):
            continue
        _check_value(value, f"{where}.{name}", name)


def _check_value(value: Any, where: str, name: str) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        if _NAMES_FILE.search(name):
            raise UserError(f"{where}={brief(value)}: a checkpoint may not name a file; leave it out")
        if not _WORD.fullmatch(value):
            raise UserError(
                f"{where}={brief(value)} is not a plain word; only letters, digits, _, + and - are supported"
            )
    elif _is_number(value):
        limit = MAX_SIDE if name in _SIDES else MAX_NUMBER
        if abs(value) > limit:
            raise UserError(f"{where}={brief(value)} must be at most {limit:,}")
    elif isinstance(value, dict):
        _check_arguments(value, where)
    elif isinstance(value, list | tuple):
        if len(value) > MAX_ENTRIES:
            raise UserError(f"{where} has more than {MAX_ENTRIES:,} entries")
        for each in value:
            _check_value(each, where, name)
    else:
        raise UserError(f"{where}={brief(value)} is not a finite number, a word, a list or an object")


def _is_number(value: object) -> bool:
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))
