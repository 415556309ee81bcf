"""Images listed in a table: a CSV or Parquet file with the path and the label of each."""

from __future__ import annotations

import csv
import logging
import os
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from PIL import Image

from visualtokens.data.base import (
    SPLIT_OF,
    ImageDataset,
    Split,
    brief,
    check_class_count,
    check_split,
    is_inside,
    split_rows,
)
from visualtokens.data.decode import read_image
from visualtokens.errors import UserError
from visualtokens.files import one_line

logger = logging.getLogger(__name__)

MAX_ROWS = 20_000_000
MAX_BYTES = 2**31  # of the file, and of its columns when unpacked
MAX_LINE = 2**20
SEPARATORS = ",;\t"
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")

Row = tuple[Any, ...]  # path, label and, if the table has them, split


class ListedImages(ImageDataset):
    """The images in the rows of a table; ``kind`` is csv (separated by comma, semicolon or tab) or parquet.

    ``path``, ``label`` and ``split`` are the names of the columns. Paths are relative to ``root``, by default
    the folder of the file; ``suffix`` is appended to each, such as .jpg. Labels are names or integers; the
    classes are those of the training rows, sorted. The split of a row is train, val (or valid, validation) or
    test. Without a validation split, ``val_share`` holds out a share of the training images.

    Files that do not exist are refused, or left out with ``skip_missing``. Paths outside of ``root`` need
    ``allow_outside``.
    """

    def __init__(
        self,
        kind: str,
        file: str | Path,
        part: Split,
        *,
        path: str = "path",
        label: str = "label",
        split: str | None = None,
        root: str | None = None,
        suffix: str = "",
        val_share: float | None = None,
        skip_missing: bool = False,
        allow_outside: bool = False,
    ) -> None:
        check_split(part)
        self.spec = f"{kind}:{file}"
        table = _Table(kind, Path(file).expanduser(), {"path": path, "label": label, "split": split})
        names, labels, splits = table.read()
        rows = _rows_of_split(table, splits, part, val_share)
        training = [row for row, each in enumerate(splits) if each == "train"]
        self.classes = _classes([labels[row] for row in training or rows])
        check_class_count(len(self.classes), str(table.file))
        base = str(Path(root).expanduser() if root is not None else table.file.parent)
        self.files = [_join(base, names[row] + suffix, row, table, allow_outside) for row in rows]
        self.labels = _numbers([labels[row] for row in rows], self.classes, table)
        if val_share is not None and part != "test":
            _check_one_label(self.files, self.labels, table)
            listed = [os.path.normpath(names[row]).replace(os.sep, "/") for row in rows]
            self._keep(split_rows(part, listed, val_share, labels=self.labels, source=self.spec))
        self._check_files(table, skip=skip_missing)

    def _keep(self, rows: Sequence[int]) -> None:
        self.files = [self.files[row] for row in rows]
        self.labels = [self.labels[row] for row in rows]

    def _check_files(self, table: _Table, *, skip: bool) -> None:
        exist = list(map(os.path.isfile, self.files))
        missing = [file for file, exists in zip(self.files, exist, strict=True) if not exists]
        if not missing:
            return
        found = f"{len(missing)} of {len(exist)} images in {table.file} do not exist: {_shown(missing)}"
        if not any(exist):
            raise UserError(f"{found}; give the folder of the images with --data_args.root")
        if not skip:
            raise UserError(f"{found}; add them, or leave them out with --data_args.skip_missing true")
        logger.warning("%s; they are left out", found)
        self._keep([row for row, exists in enumerate(exist) if exists])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return read_image(self.files[index]), self.labels[index]

    def path(self, index: int) -> str:
        return self.files[index]


def _rows_of_split(table: _Table, splits: list[str], part: Split, val_share: float | None) -> list[int]:
    """The rows of the split, or those of which ``val_share`` is held out."""
    if not splits:
        if val_share is None or part == "test":
            raise UserError(
                f"{table.file} has no column 'split'; give --val_share 0.2 to hold out a fifth of the images "
                "for validation (1 to evaluate on all), or name the column with --data_args.split"
            )
        return list(range(table.count))
    if val_share is not None and "val" in splits:
        raise UserError(f"{table.file} has validation images; leave val_share={val_share} out")
    source = "train" if part == "val" and val_share is not None else part
    rows = [row for row, each in enumerate(splits) if each == source]
    if not rows:
        hint = "; give --val_share 0.2 to hold out a fifth of the training images" if part == "val" else ""
        column, only = table.columns["split"], ", ".join(sorted(set(splits)))
        raise UserError(f"{table.file} has no {source} split in column {column!r}, only {only}{hint}")
    return rows


def _shown(names: Sequence[str], *, most: int = 3) -> str:
    """The first names, each of at most 200 characters."""
    shown = [name if len(name) <= 200 else f"{name[:100]}…{name[-99:]}" for name in names[:most]]
    return ", ".join(shown) + (", …" if len(names) > most else "")


def _classes(labels: list[str]) -> list[str]:
    """The different labels, sorted: as numbers if all of them are integers."""
    names = set(labels)
    return sorted(names, key=int) if all(map(INTEGER.fullmatch, names)) else sorted(names)


def _numbers(labels: list[str], classes: list[str], table: _Table) -> list[int]:
    number = {name: i for i, name in enumerate(classes)}
    unknown = sorted(set(labels) - set(number))
    if unknown:
        raise UserError(
            f"{table.file} has classes without training images: {_shown(unknown)}; add some or remove them"
        )
    return [number[label] for label in labels]


def _join(base: str, name: str, row: int, table: _Table, allow_outside: bool) -> str:
    if not allow_outside and not is_inside(name):
        raise UserError(
            f"{table.file}, row {row + 1}: {brief(name)} lies outside {base}; give another folder with "
            "--data_args.root, or accept such paths with --data_args.allow_outside true"
        )
    return os.path.join(base, name)


def _check_one_label(files: list[str], labels: list[int], table: _Table) -> None:
    """Raise if an image has two labels: it could be in both splits."""
    label_of: dict[str, int] = {}
    for file, label in zip(files, labels, strict=True):
        if label_of.setdefault(file, label) != label:
            raise UserError(f"{table.file} gives {_shown([file])} two labels; remove one of the rows")


class _Table:
    """The columns of a file that are read: ``path``, ``label`` and, if it has one, ``split``."""

    def __init__(self, kind: str, file: Path, columns: dict[str, str | None]) -> None:
        if not file.is_file():
            raise UserError(f"{file} is not a file; give the path of a {kind} file")
        self.kind, self.file, self.count = kind, file, 0
        if (size := file.stat().st_size) > MAX_BYTES:
            raise self.too_large(f"{size:,} bytes", f"{MAX_BYTES:,}")
        self.columns = {option: name or option for option, name in columns.items()}
        self._optional = {option for option, name in columns.items() if name is None}

    def read(self) -> tuple[list[str], list[str], list[str]]:
        """The path, the label and the split of every row; no splits if there is no such column."""
        names: list[str] = []
        labels: list[str] = []
        splits: list[str] = []
        size = 0
        for path, label, *split in _csv_rows(self) if self.kind == "csv" else _parquet_rows(self):
            self.count += 1
            if self.count > MAX_ROWS:
                raise self.too_large(f"more than {MAX_ROWS:,} rows", f"{MAX_ROWS:,}")
            if not isinstance(path, str) or not path:
                raise self._wrong("path", path, "the path of an image")
            size += len(path)
            if size > MAX_BYTES:  # a Parquet file may repeat a long one
                raise self.too_large(f"paths of more than {MAX_BYTES:,} characters", f"{MAX_BYTES:,}")
            text = str(label).strip() if isinstance(label, str | int) else ""
            if not text:
                raise self._wrong("label", label, "a name or an integer")
            names.append(path)
            labels.append(text)
            for each in split:
                known = SPLIT_OF.get(str(each).strip().lower())
                if known is None:
                    raise self._wrong("split", each, ", ".join(SPLIT_OF))
                splits.append(known)
        if not self.count:
            raise UserError(f"{self.file} holds no rows")
        return names, labels, splits

    def too_large(self, found: str, limit: str) -> UserError:
        return UserError(f"{self.file} has {found}; at most {limit} are read")

    def _wrong(self, option: str, value: Any, expected: str) -> UserError:
        return UserError(
            f"{self.file}, row {self.count}: {self.columns[option]} is {brief(value)}; expected {expected}"
        )

    def select(self, header: Sequence[str]) -> list[str]:
        """The names of the columns to read."""
        selected = []
        for option, name in self.columns.items():
            if header.count(name) > 1:
                raise UserError(f"{self.file} has several columns {brief(name)}; rename all but one")
            if name in header:
                selected.append(name)
            elif option not in self._optional:
                raise UserError(
                    f"{self.file} has no column {name!r}, only {_shown(header, most=8)}; "
                    f"name it with --data_args.{option}"
                )
        return selected


def _csv_rows(table: _Table) -> Iterator[Row]:
    """The selected columns of each row; empty lines are skipped."""
    with table.file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        lines = _lines(stream, table)
        first = next(lines, "")
        number = 1
        try:
            separator = max(SEPARATORS, key=lambda each: _fitting_columns(first, each, table))
            reader = csv.reader(
                chain([first], lines), delimiter=separator, skipinitialspace=True, strict=True
            )
            header = [name.strip() for name in next(reader, [])]
            selected = [header.index(name) for name in table.select(header)]
            for row in reader:
                number = reader.line_num
                if row and len(row) != len(header):
                    expected = f"the first line has {len(header)}"
                    raise UserError(f"{table.file}, line {number} has {len(row)} columns, but {expected}")
                if row:
                    yield tuple(row[i] for i in selected)
        except csv.Error as error:
            raise UserError(f"{table.file}, after line {number}: {error}") from error


def _lines(stream: TextIO, table: _Table) -> Iterator[str]:
    while line := stream.readline(MAX_LINE):
        if len(line) == MAX_LINE or "\0" in line:
            raise UserError(f"{table.file} is not text with a row in each line; save it as CSV in UTF-8")
        yield line


def _fitting_columns(line: str, separator: str, table: _Table) -> tuple[int, int]:
    """How many of the wanted columns a separator finds in the first line, and how many columns at all."""
    header = next(csv.reader([line], delimiter=separator, skipinitialspace=True), [])
    return len(set(header) & set(table.columns.values())), len(header)


def _parquet_rows(table: _Table) -> Iterator[Row]:
    """The selected columns of each row."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            "Parquet files need pyarrow; install it with: pip install 'visualtokens[data]'"
        ) from error
    try:
        with parquet.ParquetFile(table.file) as source:
            selected = table.select(source.schema_arrow.names)
            _check_types(source.schema_arrow, selected, pyarrow.types, table)
        unique, size = list(dict.fromkeys(selected)), 0
        # A dictionary holds each text once, so that a small file cannot unpack to a large column.
        with parquet.ParquetFile(table.file, read_dictionary=unique) as source:
            if source.metadata.num_rows > MAX_ROWS:
                raise table.too_large(f"{source.metadata.num_rows:,} rows", f"{MAX_ROWS:,}")
            for group in range(source.num_row_groups):
                read = source.read_row_group(group, columns=unique)
                size += read.nbytes
                if size > MAX_BYTES:
                    raise table.too_large(f"{size:,} bytes unpacked", f"{MAX_BYTES:,}")
                read.validate(full=True)  # texts and indices
                columns = {name: list(chain(*map(_to_list, read[name].chunks))) for name in unique}
                yield from zip(*(columns[name] for name in selected), strict=True)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{table.file} is not a Parquet file: {one_line(error)}") from error


def _check_types(schema: Any, selected: Sequence[str], types: Any, table: _Table) -> None:
    """Raise if a column is not plain."""
    for name in selected:
        kind = schema.field(name).type
        held = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(held) or types.is_large_string(held) or types.is_integer(held)):
            raise UserError(
                f"{table.file}: column {name!r} holds {_shown([str(kind)])}; expected text or integers"
            )


def _to_list(column: Any) -> list[Any]:
    if not hasattr(column, "dictionary"):
        return column.to_pylist()
    values = column.dictionary.to_pylist()
    return [None if index is None else values[index] for index in column.indices.to_pylist()]
