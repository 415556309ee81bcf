"""ONNX files in onnxruntime. Needs onnxruntime and numpy, not torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visualtokens.errors import UserError
from visualtokens.export.metadata import KEY, Metadata, parse_metadata
from visualtokens.files import one_line
from visualtokens.tasks.exported import ExportedTask, exported_task

INSTALL = "pip install onnxruntime"
MAX_BYTES = 2**31  # of a protobuf message


class OnnxModel:
    """An ONNX file that :func:`visualtokens.export` wrote, as a function from arrays to an array."""

    task: ExportedTask

    def __init__(self, path: str | Path, *, threads: int | None = None) -> None:
        self.path = Path(path)
        self.session, self.metadata = open_session(self.path, threads=threads)
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        if len(inputs) != 1 or len(outputs) != 1:
            raise UserError(
                f"{self.path} has {len(inputs)} inputs and {len(outputs)} outputs instead of one each; "
                "write it with `vtok export`"
            )
        try:
            self.input, self.output = inputs[0].name, outputs[0].name
        except UnicodeDecodeError as error:  # names are decoded only when they are read
            raise UserError(f"{self.path} is damaged: {one_line(error)}") from error
        self.classes, self.described = self.metadata.classes, vars(self.metadata)

    def __call__(self, images: NDArray[Any]) -> NDArray[np.float32]:
        """Return the model's output for a batch of images."""
        try:
            (found,) = self.session.run([self.output], {self.input: images})
        except Exception as error:
            raise UserError(f"{self.path} cannot be run: {one_line(error)}") from error
        return found


def open_model(path: str | Path) -> OnnxModel:
    """Return an ONNX file of unknown origin with its ``task``, ready to predict."""
    model = OnnxModel(path)
    try:
        model.task = exported_task(model.metadata.task)
        model.task.check(model)
    except UserError as error:
        raise UserError(f"{model.path}: {error}") from error
    return model


def open_session(path: Path, *, threads: int | None = None) -> tuple[Any, Metadata]:
    """Return the session of onnxruntime for a file of unknown origin, and its metadata."""
    ort = _onnxruntime()
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise UserError(f"{str(path)!r} {what}; give an ONNX file that `vtok export` wrote")
    check_onnx(path)
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are raised; onnxruntime would print them as well
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        # Its fallback to other providers would print and try again.
        session = ort.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"], enable_fallback=0
        )
        described = session.get_modelmeta().custom_metadata_map
    except Exception as error:
        raise UserError(f"{path} is damaged or not an ONNX file: {one_line(error)}") from error
    if KEY not in described:
        raise UserError(f"{path} does not name its classes and preprocessing; write it with `vtok export`")
    return session, parse_metadata(described[KEY], path)


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(f"ONNX files need onnxruntime: {INSTALL}") from error
    return onnxruntime


# A scan of the protobuf message, because onnxruntime reads the external files that it names.
# Numbers of fields: ModelProto.graph 7, functions 25; GraphProto.node 1, initializer 5, sparse 15;
# NodeProto.attribute 5; AttributeProto.t 5, g 6, tensors 10, graphs 11, sparse 22, 23; FunctionProto.node 7;
# TensorProto.external_data 13; SparseTensorProto.values 1, indices 2; StringStringEntryProto.key 1, value 2.

_MESSAGES: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function", 20: "training"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "external"},
}
MAX_DEPTH = 64  # of messages within each other


def check_onnx(path: Path) -> None:
    """Raise :class:`UserError` for a file that is not ONNX, or that names weights outside its folder."""
    size = path.stat().st_size
    if not 0 < size < MAX_BYTES:
        raise UserError(f"{path} is damaged or not an ONNX file: it has {size:,} bytes")
    content = memoryview(path.read_bytes())
    try:
        locations = list(_locations(content, "model", 0))
    except ValueError as error:
        raise UserError(f"{path} is damaged or not an ONNX file: {one_line(error)}") from error
    folder = path.resolve().parent
    for location in locations:
        name = location.decode("utf-8", "surrogateescape")
        target = Path(os.path.realpath(folder / name)) if "\0" not in name else None
        if target is None or os.path.isabs(name) or not target.is_relative_to(folder):
            raise UserError(f"{path} names weights outside its folder ({name[:60]!r}); it is not loaded")


def _locations(content: memoryview, kind: str, depth: int) -> Iterator[bytes]:
    """Yield the locations of external data in a protobuf message of this kind."""
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} messages within each other")
    inner = _MESSAGES[kind]
    for number, part in _fields(content):
        if part is None or number not in inner:
            continue
        if inner[number] == "external":
            entry = {n: bytes(value) for n, value in _fields(part) if value is not None}
            if entry.get(1) == b"location":
                yield entry.get(2, b"")
        else:
            yield from _locations(part, inner[number], depth + 1)


def _fields(content: memoryview) -> Iterator[tuple[int, memoryview | None]]:
    """Yield the number of each field of a protobuf message, and its bytes if it has a length."""
    at, end = 0, len(content)
    while at < end:
        tag, at = _varint(content, at)
        number, wire = tag >> 3, tag & 7
        if number == 0 or wire not in (0, 1, 2, 5):
            raise ValueError("it does not start as one" if at < 16 else f"a wrong field at byte {at}")
        if wire == 0:
            _, at = _varint(content, at)
            yield number, None
            continue
        length, at = _varint(content, at) if wire == 2 else (8 if wire == 1 else 4, at)
        if at + length > end:
            raise ValueError("it is truncated")
        yield number, content[at : at + length] if wire == 2 else None
        at += length


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(content):
            raise ValueError("it is truncated")
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than ten bytes")
