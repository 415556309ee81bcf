"""What an exported file says about itself: task, classes, preprocessing, source. Needs no torch."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from visualtokens.errors import UserError
from visualtokens.files import MAX_JSON, as_dataclass, one_line, parse_json

KEY = "visualtokens"  # in the metadata_props of ONNX; a .pt2 archive holds the file extra/visualtokens.json
ENTRY = f"{KEY}.json"
VERSION = 1
MAX_CLASSES = 100_000
MAX_NAME = 1_000  # characters of the name of a class
MAX_SIDE = 8_192  # pixels
DYNAMIC = ("batch", "size")


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The metadata of an exported file, as JSON values."""

    version: int  # of this layout
    library: str  # the version of visualtokens that wrote the file
    format: str
    task: str | None
    classes: list[str]
    preprocess: dict[str, Any] | None  # the fields of the task's preprocessing
    input: str  # "images": (B, 3, H, W) float32; "pixels": (B, H, W, 3) uint8
    size: list[int]  # (H, W) of the input; with dynamic size, that of the training
    dynamic: list[str]
    multiple: int  # heights and widths must be multiples of it
    half: bool
    source: dict[str, Any] = field(default_factory=dict)  # architecture, model_args, label_colors …

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)


def parse_metadata(text: str | bytes, file: Path) -> Metadata:
    """Return the metadata in a JSON text of unknown origin; :class:`UserError` if it is damaged."""
    if len(text) > MAX_JSON:
        raise UserError(f"{file}: its metadata are larger than {MAX_JSON >> 20} MB")
    document = parse_json(text, f"{file}: its metadata")
    if not isinstance(document, dict):
        raise UserError(f"{file}: its metadata do not hold a JSON object")
    if document.get("version") != VERSION:
        other = repr(document.get("version"))[:20]
        raise UserError(f"{file}: its metadata have version {other}, this library reads {VERSION}")
    try:
        found = as_dataclass(Metadata, document)
    except (TypeError, ValueError) as error:
        raise UserError(f"{file}: its metadata are damaged: {one_line(error)}") from error
    _check(found, file)
    return found


def _check(found: Metadata, file: Path) -> None:
    """Raise :class:`UserError` for values beyond their limits."""
    problem = ""
    if len(found.classes) > MAX_CLASSES:
        problem = f"{len(found.classes):,} classes are more than {MAX_CLASSES:,}"
    elif any(len(name) > MAX_NAME for name in found.classes):
        problem = f"a name of a class is longer than {MAX_NAME:,} characters"
    elif len(found.size) != 2 or not all(1 <= side <= MAX_SIDE for side in found.size):
        problem = f"size={found.size[:4]} is not a height and a width of 1 to {MAX_SIDE:,} pixels"
    elif not 1 <= found.multiple <= MAX_SIDE:
        problem = f"multiple={found.multiple} is not from 1 to {MAX_SIDE:,}"
    elif not set(found.dynamic) <= {*DYNAMIC}:
        problem = f"dynamic={found.dynamic[:4]} is not among {', '.join(DYNAMIC)}"
    elif found.input not in ("images", "pixels"):
        problem = f"input={found.input[:20]!r} is neither images nor pixels"
    if problem:
        raise UserError(f"{file}: its metadata are damaged: {problem}")


def read_metadata(path: str | Path) -> Metadata:
    """Return the metadata of an exported file without running anything in it."""
    file = Path(path)
    if file.suffix.lower() == ".onnx":
        from visualtokens.export.runtime import open_session

        return open_session(file)[1]
    return parse_metadata(read_archive_entry(file, f"extra/{ENTRY}"), file)


def read_archive_entry(file: Path, name: str) -> bytes:
    """Return a member of a .pt2 archive, which has one folder at its top."""
    try:
        with zipfile.ZipFile(file) as archive:
            found = [each for each in archive.infolist() if each.filename.partition("/")[2] == name]
            if not found:
                raise UserError(f"{file} has no {name}; visualtokens.export or `vtok export` writes it")
            if found[0].file_size > MAX_JSON:
                raise UserError(f"{file}: {name} is larger than {MAX_JSON >> 20} MB")
            return archive.read(found[0])
    except (OSError, zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, EOFError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} is not a .pt2 archive: {one_line(error)}") from error


def source_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a ``config.json`` that describes the model."""
    return {name: config[name] for name in ("architecture", "model_args", "label_colors") if name in config}
