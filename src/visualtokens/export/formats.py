"""The files of each format, written from a captured program."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from visualtokens.errors import UserError, unknown
from visualtokens.export.metadata import ENTRY, KEY, Metadata
from visualtokens.files import one_line
from visualtokens.processes import time_limit

OPSET = 20  # of ONNX
# Most packages are compiled within 5 minutes, but formulas of the shapes of padded maps can take hours.
COMPILE_SECONDS = 1800
END = 2**63 - 1  # of a slice without one


def format_of(path: Path, format: str | None) -> str:
    """Return the format, by default that of the ending of the file; the two must not contradict."""
    from visualtokens.export import FORMATS

    endings = {".onnx": "onnx", ".pt2": "pt2"}
    if format is not None and format not in FORMATS:
        raise unknown("format", format, FORMATS)
    kind = format or endings.get(path.suffix.lower())
    if kind is None or path.suffix.lower() != FORMATS[kind]:
        expected = "model.onnx or model.pt2" if kind is None else f"model{FORMATS[kind]}"
        raise UserError(f"{str(path)!r} has no ending of format {kind or 'onnx or pt2'}; give {expected}")
    if path.is_dir():
        raise UserError(f"{str(path)!r} is a folder; give a file")
    return kind


def save_program(
    program: torch.export.ExportedProgram, file: Path, metadata: Metadata, *, seconds: float = COMPILE_SECONDS
) -> None:
    """Write a captured program and its metadata into a file; compiling may take that many ``seconds``."""
    text = metadata.to_json()
    with quiet():
        if metadata.format == "onnx":
            _save_onnx(program, file, metadata.input, text)
        elif metadata.format == "pt2":
            torch.export.save(program, file, extra_files={ENTRY: text})
        else:
            _save_compiled(program, file, text, seconds)


def _save_onnx(program: torch.export.ExportedProgram, file: Path, input_name: str, text: str) -> None:
    try:
        converted = torch.onnx.export(
            program,
            dynamo=True,
            input_names=[input_name],
            output_names=["output"],
            opset_version=OPSET,
            custom_translation_table={
                torch.ops.aten.sort.stable: _stable_sort,
                torch.ops.aten.slice_scatter.default: _slice_scatter,
                torch.ops.aten.index_put.default: _index_put,
            },
            optimize=False,
            verbose=False,
        )
    except Exception as error:
        if not is_of_torch(error):
            raise
        raise UserError(
            f"torch cannot convert this model to ONNX: {one_line(root_cause(error))}; choose format pt2"
        ) from error
    assert converted is not None
    _optimize(converted.model)
    converted.model.metadata_props[KEY] = text
    converted.save(file, external_data=False)


def _stable_sort(self: Any, *, stable: bool, dim: int = -1, descending: bool = False) -> Any:
    """Return values and indices by ONNX's TopK, which puts the lower index first on ties."""
    from onnxscript import opset20 as op

    count = op.Reshape(op.Gather(op.Shape(self), op.Constant(value_int=dim), axis=0), [1])
    return op.TopK(self, count, axis=dim, largest=int(descending), sorted=1)


def _slice_scatter(
    self: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    """Return ``self`` with a slice replaced by ``src``, by joining the parts around it.

    torch's own conversion transposes the tensor, scatters and transposes back; the logits of an attention
    with a bias for the token sizes are such a tensor.
    """
    from onnxscript import opset20 as op
    from onnxscript.function_libs.torch_lib.ops.core import aten_slice_scatter

    first, last = start or 0, END if end is None else end
    if step != 1 or not (isinstance(first, int) and isinstance(last, int)):
        return aten_slice_scatter(self, src, dim, start, end, step)
    parts = [src]
    if first != 0:
        parts.insert(0, op.Slice(self, [0], [first], [dim]))
    if last < END:
        parts.append(op.Slice(self, [last], [END], [dim]))
    return op.Concat(*parts, axis=dim) if len(parts) > 1 else op.Identity(src)


def _index_put(self: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """Add rows of ``values`` to the rows ``indices`` of ``self``, as ``index_add`` does, by ScatterElements.

    torch's own conversion is ScatterND, which onnxruntime runs on several threads that overwrite each other's
    sums where an index repeats (its issues 18048 and 23396): the tokens of a group were wrong at random.
    """
    from onnxscript import opset20 as op
    from onnxscript.function_libs.torch_lib.ops.core import aten_index_put

    if not accumulate:
        return aten_index_put(self, indices, values, accumulate)
    if len(indices) != 1 or len(self.shape) != 2 or len(indices[0].shape) != 1:
        raise UserError("index_put_ with accumulate=True has an ONNX form for rows of a matrix only")
    rows = op.Expand(op.Unsqueeze(indices[0], [1]), op.Shape(values))
    return op.ScatterElements(self, rows, values, axis=0, reduction="add")


def _optimize(model: Any) -> None:
    """Simplify an ONNX graph as torch's exporter does, without the rule that compares all pairs of slices.

    With it, the rewriting took 148 of 173 seconds of an export of STViT-S under cProfile. Without it, DeiT-S
    has as many nodes as before, plain and with ``weighted_merge``.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer, rewriter
    from onnxscript.rewriter.rules.common import slice_split_rule

    rules = [rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule is not slice_split_rule]
    common.InlinePass()(model)
    for _ in range(2):
        optimizer.fold_constants_ir(model, onnx_shape_inference=True)
        rewriter.RewritePass(rules)(model)
        common.RemoveUnusedNodesPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.DeduplicateInitializersPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.OutputFixPass()(model)
    common.NameFixPass()(model)


def _save_compiled(program: torch.export.ExportedProgram, file: Path, text: str, seconds: float) -> None:
    from torch._inductor import aoti_compile_and_package

    try:
        with time_limit(seconds):
            aoti_compile_and_package(program, package_path=str(file))
    except TimeoutError as error:
        raise UserError(
            f"AOTInductor has not compiled this model after {seconds:g} seconds; with a dynamic size, give "
            "a larger multiple, or choose format onnx"
        ) from error
    except Exception as error:
        if not is_of_torch(error):
            raise
        raise UserError(
            f"AOTInductor cannot compile this model: {one_line(root_cause(error))}; choose format pt2"
        ) from error
    add_archive_entry(file, f"extra/{ENTRY}", text)


def add_archive_entry(file: Path, name: str, text: str) -> None:
    """Add a member to a .pt2 archive, in the folder at its top."""
    with zipfile.ZipFile(file, "a", zipfile.ZIP_STORED) as archive:
        top = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{top}/{name}", text)


def require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError("ONNX files need other packages: pip install 'visualtokens[onnx]'") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out the warnings and the output of torch's exporters; errors are raised."""
    loggers = [logging.getLogger(name) for name in ("torch", "onnxscript", "onnx_ir")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


# Errors of torch's exporters.

_ERRORS: tuple[type[Exception], ...] = (
    *(RuntimeError, ValueError, TypeError, AttributeError, AssertionError),
    *(NotImplementedError, KeyError, IndexError, ArithmeticError),
)


def is_of_torch(error: Exception) -> bool:
    """Whether torch raises this for a model that it cannot capture or convert."""
    return isinstance(error, _ERRORS) or type(error).__module__.startswith("torch")


def root_cause(error: Exception) -> Exception:
    """Return the error that caused this one."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error
