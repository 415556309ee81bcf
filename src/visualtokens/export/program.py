"""From a model to a file: the program that torch captures, written and verified."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import visualtokens
from visualtokens.errors import UserError, unknown
from visualtokens.export.formats import (
    COMPILE_SECONDS,
    format_of,
    is_of_torch,
    quiet,
    require_onnx,
    root_cause,
    save_program,
)
from visualtokens.export.metadata import DYNAMIC, MAX_SIDE, VERSION, Metadata, source_of
from visualtokens.export.verification import check_deterministic, largest_difference
from visualtokens.files import json_ready, one_line, write_atomically
from visualtokens.modes import eval_mode
from visualtokens.processes import time_limit
from visualtokens.tasks import Checkpoint
from visualtokens.tasks.timm_models import class_names, preprocess_for

TOLERANCE, HALF_TOLERANCE = 1e-4, 0.05
# Most pyramids halve the image five times. With any size, the package of paca_vit_b0 has 0.5 times the
# images/s of the model, with multiples of 32 1.2 times; stvit_base was still compiling when its export was
# stopped after 15 minutes.
MULTIPLE = 32
LEAST = 2  # multiples in a varying side: torch treats sizes of 1 as constant
# A capture ends within a minute or two, or not for hours: torch simplifies the formulas of the shapes, which
# grow from block to block if windows are padded.
CAPTURE_SECONDS = 600


@dataclass(frozen=True)
class Exported:
    """A file that was written and verified."""

    path: Path
    metadata: Metadata
    difference: float  # the largest between the answers of the file and of the model
    compared: int  # number of images
    bytes: int  # size of the file


def export_model(
    model: nn.Module | Checkpoint,
    path: Path,
    *,
    format: str | None,
    dynamic: Sequence[str],
    multiple: int | None,
    half: bool,
    with_preprocess: bool,
    preprocess: Any,
    classes: Sequence[str] | None,
    tolerance: float | None,
    images: Tensor | None,
) -> Exported:
    """See :func:`visualtokens.export`."""
    kind = format_of(path, format)
    limit = (HALF_TOLERANCE if half else TOLERANCE) if tolerance is None else tolerance
    if not limit >= 0:
        raise UserError(f"tolerance={tolerance} is not a difference; give 0 or more")
    if kind == "onnx":
        require_onnx()
    captured = capture_model(
        model,
        dynamic=dynamic,
        multiple=multiple,
        any_size=kind != "aoti",
        half=half,
        with_preprocess=with_preprocess,
        preprocess=preprocess,
        classes=classes,
    )
    return captured.write(path, kind, tolerance=limit, images=images)


@dataclass(frozen=True)
class Captured:
    """A model as a program of torch, which can be written in every format."""

    module: nn.Module
    served: Served
    program: torch.export.ExportedProgram
    metadata: Metadata  # its format is that of the program

    def write(
        self,
        path: Path,
        format: str,
        *,
        tolerance: float = TOLERANCE,
        images: Tensor | None = None,
        seconds: float = COMPILE_SECONDS,
    ) -> Exported:
        """Write a file and compare its answers with those of the model.

        A package that takes longer than ``seconds`` to compile is refused.
        """
        metadata = dataclasses.replace(self.metadata, format=format)
        found: list[tuple[float, int]] = []

        def write(temporary: Path) -> None:
            # torch takes .pt2 files only
            file = temporary.with_name(f"{temporary.name}{path.suffix}")
            try:
                save_program(self.program, file, metadata, seconds=seconds)
                found.append(
                    largest_difference(
                        file, metadata, self.module, images=images, statistics=self.served.statistics
                    )
                )
                _check_difference(found[0][0], tolerance, path)
                os.replace(file, temporary)
            finally:
                file.unlink(missing_ok=True)

        path.parent.mkdir(parents=True, exist_ok=True)
        with eval_mode(self.module), torch.no_grad():
            write_atomically(path, write)
        return Exported(path, metadata, *found[0], path.stat().st_size)


def capture_model(
    model: nn.Module | Checkpoint,
    *,
    dynamic: Sequence[str],
    multiple: int | None = None,
    any_size: bool = True,
    half: bool = False,
    with_preprocess: bool = False,
    preprocess: Any = None,
    classes: Sequence[str] | None = None,
    seconds: float = CAPTURE_SECONDS,
) -> Captured:
    """Return the program of a model; the options are those of :func:`visualtokens.export`.

    Without ``any_size``, varying sizes are multiples of 32 (see :func:`large_multiple`) by default. A capture
    that takes longer than ``seconds`` is refused.
    """
    for axis in dynamic:
        if axis not in DYNAMIC:
            raise unknown("dynamic axis", axis, DYNAMIC)
    if multiple is not None and "size" not in dynamic:
        raise UserError(f"multiple={multiple} is that of heights and widths that vary; add size to dynamic")
    source = _source(model, preprocess, classes)
    module, size = source.module, source.size
    with eval_mode(module), torch.no_grad():
        check_deterministic(module, size)
        statistics = _statistics(source.preprocess) if with_preprocess else None
        served = Served(module, half=half, statistics=statistics).eval()
        multiples = _multiples(size, multiple, any_size=any_size)
        program, found = capture(served, size, dynamic=dynamic, multiples=multiples, seconds=seconds)
    metadata = Metadata(
        version=VERSION,
        library=visualtokens.__version__,
        format="pt2",
        task=source.task,
        classes=source.classes,
        preprocess=None if source.preprocess is None else json_ready(_as_dict(source.preprocess)),
        input=_input_name(served),
        size=list(size),
        dynamic=list(dynamic),
        multiple=found,
        half=half,
        source=json_ready(source.described),
    )
    return Captured(module, served, program, metadata)


@dataclass(frozen=True)
class _Source:
    """What is exported."""

    module: nn.Module
    size: tuple[int, int]
    task: str | None
    classes: list[str]
    preprocess: Any
    described: dict[str, Any]


def _source(model: Any, preprocess: Any, classes: Sequence[str] | None) -> _Source:
    if isinstance(model, Checkpoint):
        module = model.task.export_module(model)
        preprocess = model.preprocess if preprocess is None else preprocess
        names = list(model.classes if classes is None else classes)
        return _Source(
            module, tuple(preprocess.size), model.task.name, names, preprocess, source_of(model.config)
        )
    if not isinstance(model, nn.Module):
        raise UserError(f"a {type(model).__name__} cannot be exported; give a module or a checkpoint")
    described: dict[str, Any] = {}
    task = None
    if getattr(model, "pretrained_cfg", None):
        described = {"architecture": model.pretrained_cfg["architecture"]}  # type: ignore[index]
        preprocess = preprocess_for(model) if preprocess is None else preprocess
        embed: Any = getattr(model, "patch_embed", None)
        if getattr(embed, "img_size", None) is not None and getattr(embed, "strict_img_size", True):
            preprocess = dataclasses.replace(preprocess, size=tuple(embed.img_size))
        if model.num_classes:
            task = "classify"
            classes = class_names(model) if classes is None else classes
    if preprocess is None:
        raise UserError(f"the input of this {type(model).__name__} is unknown; give its preprocess")
    reduction = vars(model).get("reduction")
    if reduction is not None:
        described["reduction"] = {"method": reduction.method, "keep": list(reduction.schedule.entries)}
    return _Source(model, tuple(preprocess.size), task, list(classes or []), preprocess, described)


def _as_dict(preprocess: Any) -> dict[str, Any]:
    return dataclasses.asdict(preprocess) if dataclasses.is_dataclass(preprocess) else {}  # type: ignore[arg-type]


def _statistics(preprocess: Any) -> tuple[Sequence[float], Sequence[float]]:
    return preprocess.mean, preprocess.std


class Served(nn.Module):
    """A model as a file holds it: float32 in and out, with the normalisation and float16 inside if wanted."""

    mean: Tensor
    std: Tensor

    def __init__(
        self, model: nn.Module, *, half: bool, statistics: tuple[Sequence[float], Sequence[float]] | None
    ) -> None:
        super().__init__()
        self.statistics = statistics
        self.half_precision = half
        self.model = _half_copy(model) if half else model
        if statistics is not None:
            mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in statistics)
            self.register_buffer("mean", mean, persistent=False)
            self.register_buffer("std", std, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Images ``(B, 3, H, W)`` float32, or pixels ``(B, H, W, 3)`` uint8, to the output in float32."""
        if self.statistics is not None:
            images = (images.permute(0, 3, 1, 2).float() / 255 - self.mean) / self.std
        out = self.model(images.half() if self.half_precision else images)
        if not isinstance(out, Tensor):
            raise UserError(f"the model returns a {type(out).__name__}; export one that returns one tensor")
        return out.float()


def _half_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model in float16."""
    import copy

    return copy.deepcopy(model).half()


# Capturing.


def capture(
    served: Served,
    size: tuple[int, int],
    *,
    dynamic: Sequence[str],
    multiples: Sequence[int],
    seconds: float = CAPTURE_SECONDS,
) -> tuple[torch.export.ExportedProgram, int]:
    """Return the program of the model, and the number that heights and widths must be multiples of.

    It is the first of ``multiples`` with which torch captures the model.
    """
    first: Exception | None = None
    for multiple in multiples if "size" in dynamic else (1,):
        height, width = example_size(size, multiple) if "size" in dynamic else size
        pixels = served.statistics is not None
        count = 2 if "batch" in dynamic else 1
        example = (
            torch.randint(0, 256, (count, height, width, 3), dtype=torch.uint8)
            if pixels
            else torch.randn(count, 3, height, width)
        )
        shapes = _dynamic_shapes(dynamic, multiple, first_side=1 if pixels else 2)
        try:
            with quiet(), time_limit(seconds):
                return torch.export.export(served, (example,), dynamic_shapes=shapes), multiple
        except UserError:
            raise
        except TimeoutError as error:
            late = TimeoutError(f"torch has not captured it after {seconds:g} seconds")
            raise _refusal(served.model, dynamic, late) from error
        except Exception as error:
            if not is_of_torch(error):
                raise
            first = first or error
    raise _refusal(served.model, dynamic, first)


def _multiples(size: tuple[int, int], given: int | None, *, any_size: bool) -> tuple[int, ...]:
    """Return what varying heights and widths may be multiples of, in the order in which they are tried."""
    if given is None:
        large = large_multiple(size)
        return (1, large) if any_size else (large,)
    largest = min(size) // LEAST
    if not 1 <= given <= largest:
        raise UserError(
            f"multiple={given} is not from 1 to {largest}, for a model of {size[0]}×{size[1]} pixels: sides "
            f"that vary have at least {LEAST} times the multiple"
        )
    return (given,)


def large_multiple(size: tuple[int, int]) -> int:
    """Return 32, or for small images the largest power of two that fits into them twice."""
    return min(MULTIPLE, 1 << max(0, (min(size) // LEAST).bit_length() - 1))


def _input_name(served: Served) -> str:
    return "images" if served.statistics is None else "pixels"


def _dynamic_shapes(dynamic: Sequence[str], multiple: int, *, first_side: int) -> tuple[dict[int, Any]]:
    axes: dict[int, Any] = {}
    if "batch" in dynamic:
        axes[0] = torch.export.Dim.DYNAMIC
    if "size" in dynamic:
        for axis, name in ((first_side, "height"), (first_side + 1, "width")):
            least = torch.export.Dim(name, min=LEAST, max=MAX_SIDE // multiple)
            axes[axis] = torch.export.Dim.DYNAMIC if multiple == 1 else multiple * least
    return (axes,)


def example_size(size: tuple[int, int], multiple: int) -> tuple[int, int]:
    """Return a size near the model's own that is not square, so that no axis is taken for the other."""
    step = -(-32 // multiple) * multiple
    height, width = (max(2 * step, round(side / step) * step) for side in size)
    return (height, width + step) if height == width else (height, width)


def _refusal(model: nn.Module, dynamic: Sequence[str], error: Exception | None) -> UserError:
    """Return the error for a model that torch cannot capture."""
    reason = one_line(root_cause(error)) if error is not None else ""
    if "size" in dynamic:
        return UserError(
            f"this {type(model).__name__} cannot be exported with a dynamic size: {reason}; leave size out "
            "of dynamic and export one file for each size"
        )
    return UserError(f"this {type(model).__name__} cannot be exported: {reason}; load the checkpoint instead")


def _check_difference(difference: float, limit: float, path: Path) -> None:
    if math.isinf(difference):
        raise UserError(
            f"answers of the model or of {path} are not finite on the images compared; it is not written"
        )
    if not difference <= limit:
        raise UserError(
            f"{path} would differ from the model by {difference:.2g}, which is more than the tolerance of "
            f"{limit:g}; it is not written"
        )
