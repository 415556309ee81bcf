"""File formats of predictions: JSON lines, CSV, Parquet and text.

While a file is in the making, the result of every image is a *record*, a JSON object on one line: the name of
the ``image`` with what the format needs of its prediction, or with the ``error`` that makes it unreadable.
"""

from __future__ import annotations

import csv
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from visualtokens.data.decode import BadImage
from visualtokens.errors import UserError, unknown
from visualtokens.files import json_ready, one_line
from visualtokens.tables import printable
from visualtokens.tasks.prediction import Prediction

Record = dict[str, Any]
Columns = Mapping[str, type]  # str, float or int
ROW_GROUP = 50_000  # rows of a Parquet file that are written at once
SUFFIXES = {".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


class Format(ABC):
    """How predictions are written."""

    readable = True  # whether :meth:`read` can

    def record(self, image: str, prediction: Prediction, files: Mapping[str, str]) -> Record:
        """Return the record of a prediction; ``files`` are its pictures."""
        return {"image": image, **self._content(image, prediction, files)}

    def unreadable(self, bad: BadImage) -> Record:
        """Return the record of an image that cannot be read."""
        return {"image": bad.path, "error": bad.reason}

    @abstractmethod
    def _content(self, image: str, prediction: Prediction, files: Mapping[str, str]) -> Record: ...

    @abstractmethod
    def write(self, path: Path, lines: Iterable[bytes]) -> None:
        """Write a whole file from the lines of its records."""

    @abstractmethod
    def read(self, path: Path) -> Iterator[Record]:
        """Yield the records of a file that :meth:`write` made, without those that its torn end may affect."""


class LineFormat(Format):
    """A format in which every record can be written as soon as it is known."""

    head = b""  # of a file
    exact = False  # whether its bytes may be other than UTF-8

    @abstractmethod
    def encode(self, record: Record) -> bytes:
        """Return the lines of a record."""

    def write(self, path: Path, lines: Iterable[bytes]) -> None:
        with path.open("wb") as file:
            file.write(self.head)
            for line in lines:
                file.write(self.encode(parse_line(line)))


def to_line(record: Record) -> bytes:
    """Return a record as a line of JSON, in ASCII and without ``NaN``."""
    return json.dumps(json_ready(record)).encode() + b"\n"


def parse_line(line: bytes) -> Record:
    """Return the record of a line; :class:`ValueError` if it is damaged."""
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get("image"), str):
        raise ValueError("not a record")
    return record


class JsonLines(LineFormat):
    """The document of a prediction on every line."""

    def _content(self, image: str, prediction: Prediction, files: Mapping[str, str]) -> Record:
        return {**files, **prediction.to_dict()}

    def encode(self, record: Record) -> bytes:
        return to_line(record)

    def write(self, path: Path, lines: Iterable[bytes]) -> None:
        with path.open("wb") as file:
            file.writelines(lines)

    def read(self, path: Path) -> Iterator[Record]:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield parse_line(line)
                except ValueError as error:
                    raise _damaged(path, f"line {number}: {one_line(error)}") from error


class Text(LineFormat):
    """What `vtok predict` prints."""

    readable = False

    def _content(self, image: str, prediction: Prediction, files: Mapping[str, str]) -> Record:
        head = f"{image}: {', '.join(files.values())}" if files else image
        return {"text": f"{printable(head)}\n{prediction.text()}"}

    def encode(self, record: Record) -> bytes:
        text = record.get("text") or f"{record['image']}\n  cannot be read: {record['error']}"
        return f"{printable(text, keep=chr(10))}\n".encode()

    def read(self, path: Path) -> Iterator[Record]:
        raise NotImplementedError


class _Table(Format):
    """Rows with the same columns: the image, those of the task, and the error."""

    def __init__(self, columns: Columns) -> None:
        if clash := {"image", "image_bytes", "error"} & set(columns):
            raise UserError(f"the task has a column {min(clash)!r}, which names another one here")
        self.columns = dict(columns)

    def _content(self, image: str, prediction: Prediction, files: Mapping[str, str]) -> Record:
        return {"rows": prediction.rows()}

    def _rows(self, record: Record) -> Iterator[list[Any]]:
        """Yield the rows: image, columns of the task, error. There is at least one."""
        width = len(self.columns)
        for row in record.get("rows") or [[None] * width]:
            if len(row) != width:
                raise ValueError("a row of another table")
            yield [record["image"], *row, record.get("error")]

    def _records(self, rows: Iterable[list[Any]]) -> Iterator[Record]:
        """The inverse of :meth:`_rows`."""
        for image, group in groupby(rows, key=lambda row: row[0]):
            values = list(group)
            if values[0][-1]:
                yield {"image": image, "error": values[0][-1]}
            else:
                kept = [row[1:-1] for row in values]
                yield {"image": image, "rows": [row for row in kept if any(v not in (None, "") for v in row)]}


class Csv(_Table, LineFormat):
    """Comma-separated values. Names of files keep their bytes, also if they are not UTF-8."""

    def __init__(self, columns: Columns) -> None:
        super().__init__(columns)
        self.exact = True
        self.names = ["image", *columns, "error"]
        self.head = _csv_lines([self.names])

    def encode(self, record: Record) -> bytes:
        return _csv_lines(self._rows(record))

    def read(self, path: Path) -> Iterator[Record]:
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            rows = _csv_rows(path, file, len(self.names))
            _check_columns(path, next(rows, []), self.names)
            last: Record | None = None
            for record in self._records(rows):
                if last is not None:
                    yield last
                last = record
            if last is not None and not _is_torn(path):  # of several rows of an image, some may be lost
                yield last


def _csv_lines(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:  # seven digits are those of float32
        writer.writerow(f"{value:.7g}" if isinstance(value, float) else value for value in row)
    return _to_bytes(text.getvalue())


def _to_bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a class whose name no file can have
        return text.encode("utf-8", "backslashreplace")


def _csv_rows(path: Path, file: Iterable[str], width: int) -> Iterator[list[str]]:
    """Yield the rows, the header included, up to a torn end."""
    reader = csv.reader((line for line in file if line.endswith(("\n", "\r"))), strict=True)
    try:
        for number, row in enumerate(reader, 1):
            if number > 1 and len(row) != width:
                raise _damaged(path, f"row {number} has {len(row)} of {width} values")
            yield row
    except csv.Error as error:
        if not _is_torn(path):  # inside of a quoted value
            raise _damaged(path, f"line {reader.line_num}: {one_line(error)}") from error


def _is_torn(path: Path) -> bool:
    """Return whether the last line has no end."""
    with path.open("rb") as file:
        file.seek(0, io.SEEK_END)
        if file.tell() == 0:
            return False
        file.seek(-1, io.SEEK_END)
        return file.read(1) != b"\n"


class Parquet(_Table):
    """Parquet in groups of rows.

    Its text is UTF-8: in other names, each byte that is not becomes an escape such as ``\\xff``, and the
    column ``image_bytes``, elsewhere null, holds the exact name.
    """

    def __init__(self, columns: Columns) -> None:
        super().__init__(columns)
        pa, _ = _pyarrow()
        kinds = {str: pa.string(), float: pa.float32(), int: pa.int64()}
        fields = {name: kinds[kind] for name, kind in self.columns.items()}
        self.schema = pa.schema(
            {"image": pa.string(), "image_bytes": pa.binary(), **fields, "error": pa.string()}
        )

    def write(self, path: Path, lines: Iterable[bytes]) -> None:
        pa, parquet = _pyarrow()
        rows = chain.from_iterable(map(self._rows, map(parse_line, lines)))
        with parquet.ParquetWriter(path, self.schema) as writer:
            for group in _groups(rows, ROW_GROUP):
                columns = [list(map(_utf8, column)) for column in zip(*group, strict=True)]
                columns.insert(1, [_bytes_if_not_utf8(row[0]) for row in group])
                writer.write_table(pa.table(columns, schema=self.schema))

    def read(self, path: Path) -> Iterator[Record]:
        pa, parquet = _pyarrow()
        try:
            with parquet.ParquetFile(path) as file:
                _check_columns(path, file.schema_arrow.names, self.schema.names)
                yield from self._records(_parquet_rows(file))
        except pa.ArrowException as error:
            raise _damaged(path, one_line(error)) from error


def _parquet_rows(file: Any) -> Iterator[list[Any]]:
    for batch in file.iter_batches(ROW_GROUP):
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            image, exact, *rest = row
            yield [image if exact is None else exact.decode("utf-8", "surrogateescape"), *rest]


def _groups(rows: Iterator[list[Any]], size: int) -> Iterator[list[list[Any]]]:
    group: list[list[Any]] = []
    for row in rows:
        group.append(row)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _utf8(value: Any) -> Any:
    """Return text in which escapes replace what UTF-8 cannot hold; other values unchanged."""
    if not isinstance(value, str) or value.isascii():
        return value
    return _to_bytes(value).decode("utf-8", "backslashreplace")


def _bytes_if_not_utf8(name: str) -> bytes | None:
    exact = None if name.isascii() else _to_bytes(name)
    return exact if exact is not None and exact.decode("utf-8", "replace") != name else None


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError("Parquet needs pyarrow: pip install 'visualtokens[data]'") from error
    return pyarrow, parquet


def _check_columns(path: Path, found: list[str], expected: list[str]) -> None:
    if found != expected:
        raise UserError(
            f"{str(path)!r} has the columns {', '.join(found)[:200]!r} instead of "
            f"{', '.join(expected)[:200]!r}; save elsewhere or start again with --overwrite"
        )


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{str(path)!r} is damaged ({why}); save elsewhere or start again with --overwrite")


_FORMATS: dict[str, Callable[[Columns], Format]] = {
    "jsonl": lambda columns: JsonLines(),
    "text": lambda columns: Text(),
    "csv": Csv,
    "parquet": Parquet,
}


def make_format(name: str, columns: Callable[[], Columns]) -> Format:
    """Return the format of this name; ``columns()`` are those of a table."""
    if name not in _FORMATS:
        raise unknown("format", name, _FORMATS)
    return _FORMATS[name](columns() if name in ("csv", "parquet") else {})
