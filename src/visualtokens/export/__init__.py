"""Models as files for other programs: ONNX, exported programs of torch, and AOTInductor packages.

>>> visualtokens.export(model, "model.onnx")
>>> visualtokens.export(visualtokens.load("run/"), "model.pt2", dynamic=("batch", "size"))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from visualtokens.callable_package import make_callable
from visualtokens.lazy import lazy_names

if TYPE_CHECKING:
    from torch import Tensor, nn

    from visualtokens.export.metadata import Metadata, read_metadata
    from visualtokens.export.program import Exported
    from visualtokens.tasks import Checkpoint

__all__ = ["FORMATS", "Exported", "Metadata", "export", "read_metadata"]

Format = Literal["onnx", "pt2", "aoti"]
FORMATS: dict[str, str] = {"onnx": ".onnx", "pt2": ".pt2", "aoti": ".pt2"}
"""The formats and the endings of their files."""

__getattr__, _ = lazy_names(
    __name__,
    {
        "Exported": "visualtokens.export.program:",
        "Metadata": "visualtokens.export.metadata:",
        "read_metadata": "visualtokens.export.metadata:",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)


def export(
    model: nn.Module | Checkpoint,
    path: str | Path,
    *,
    format: Format | None = None,
    dynamic: Sequence[str] = ("batch",),
    multiple: int | None = None,
    half: bool = False,
    with_preprocess: bool = False,
    preprocess: Any = None,
    classes: Sequence[str] | None = None,
    tolerance: float | None = None,
    images: Tensor | None = None,
) -> Exported:
    """Write the model as a file, load the file again and compare its answers with those of the model.

    >>> visualtokens.export(visualtokens.load("run/"), "model.onnx").difference
    4.2e-07

    ``model`` is what :func:`visualtokens.load` returns, or a module from images ``(B, 3, H, W)`` to one
    tensor. ``format`` is ``"onnx"``, ``"pt2"`` (an exported program of torch) or ``"aoti"`` (a program
    compiled for this machine by AOTInductor, also ``.pt2``); by default that of the ending of ``path``.

    ``dynamic`` are the axes of the input that may vary: ``"batch"``, and ``"size"`` for height and width.
    These are multiples of ``multiple``: by default of 1, but of 32 in AOTInductor packages, whose code is
    faster without formulas for padding, and for models that torch cannot capture otherwise.
    ``half`` computes in float16; inputs and outputs stay float32. ``with_preprocess`` makes the file take
    pixels ``(B, H, W, 3)`` from 0 to 255 (uint8), which it normalises itself.

    ``preprocess`` and ``classes`` are written into the metadata of the file; by default those of the
    checkpoint, or of timm's configuration of the model.

    The file is compared with the model on random images and on ``images (n, 3, H, W)`` in several batches,
    and with ``"size"`` in several sizes. If a value differs by more than ``tolerance``, by default 1e-4 and
    0.05 with ``half``, a :class:`~visualtokens.errors.UserError` says so and no file is left.
    """
    from visualtokens.export.program import export_model

    return export_model(
        model,
        Path(path),
        format=format,
        dynamic=dynamic,
        multiple=multiple,
        half=half,
        with_preprocess=with_preprocess,
        preprocess=preprocess,
        classes=classes,
        tolerance=tolerance,
        images=images,
    )


make_callable(__name__, export)
