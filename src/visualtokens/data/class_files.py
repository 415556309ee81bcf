"""Names, numbers and colours of the classes of masks: as options, or in the files that people have."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from visualtokens.data.base import brief, is_int
from visualtokens.data.mask_classes import MAX_NUMBER, OPTION, Label, parse_colour, parse_number
from visualtokens.errors import UserError, unknown
from visualtokens.files import one_line, read_json_value

# Files that are looked for, in this order, if none is given.
CLASS_FILES = (
    *("classes.txt", "classes.csv", "classes.json", "class_dict.csv", "_classes.csv"),
    *("label_colors.txt", "labelmap.txt", "id2label.json"),
)
MAX_TEXT = 1_000_000  # bytes of a file of classes
MAX_LIST = 1_000_000_000  # bytes of a file that lists images
_RGB = r"(?P<colour>[0-9]{1,3}[\s,]+[0-9]{1,3}[\s,]+[0-9]{1,3})"
_COLOUR_FIRST = re.compile(rf"{_RGB}[\s,]+(?P<name>\S.*)")  # 128 64 128 Road
_COLOUR_LAST = re.compile(rf"(?P<name>.*[^\s,:])\s*[\s,:]\s*{_RGB}(\s*:.*)?")  # road:128,64,128::
# Columns of a table and names in a JSON object, the first that is there.
_NAME = ("name", "class", "label", "class name", "class_name", "title", "readable")
_NUMBER = ("pixel value", "pixel_value", "value", "number", "index", "id", "label_id")
_COLOUR = ("color", "colour", "rgb", "hex")
_CHANNELS = (("r", "red"), ("g", "green"), ("b", "blue"))


def open_classes(classes: Any, colors: Any, root: Path) -> list[Label] | None:
    """The labels that the options ``classes`` and ``colors`` describe; None if nothing does.

    ``classes`` are names, or a file in the dataset or elsewhere; without it, the first of
    :data:`CLASS_FILES` in the dataset or in its ``train`` folder. ``colors`` are the colours by name or in
    the order of the classes. A class without a number has that of its position, from 0.
    """
    if classes is None and isinstance(colors, Mapping):
        labels, source = labels_of(colors, "colors"), "colors"
        colors = None
    elif isinstance(classes, str):
        file = next((path for path in (Path(classes).expanduser(), root / classes) if path.is_file()), None)
        if file is None:
            raise UserError(
                f"classes={brief(classes)} is not a file here or in {root}; give a file, or names such as "
                "[road, sky]"
            )
        labels, source = read_classes(file), str(file)
    elif classes is not None:
        labels, source = labels_of(classes, "classes"), "classes"
    else:
        places = (place / name for place in (root, root / "train") for name in CLASS_FILES)
        file = next((path for path in places if path.is_file()), None)
        if file is None:
            if colors is not None:
                raise UserError(f"colors={brief(colors)} needs names; give {OPTION}classes")
            return None
        labels, source = read_classes(file), str(file)
    return _numbered(_with_colours(labels, colors), source)


def read_classes(file: Path) -> list[Label]:
    """The labels in a file: a name per line, names with colours, a table (.csv) or .json."""
    if file.suffix.lower() == ".json":
        return labels_of(read_json_value(file), str(file))
    text = "\n".join(read_lines(file, MAX_TEXT))
    return _from_table(text, str(file)) if file.suffix.lower() == ".csv" else _from_lines(text, str(file))


def read_lines(file: Path, limit: int = MAX_LIST) -> list[str]:
    """The lines of a text file; bytes that are not UTF-8 are decoded as in file names."""
    try:
        with file.open("rb") as opened:
            content = opened.read(limit + 1)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {one_line(error)}") from error
    if len(content) > limit:
        raise UserError(f"{file} is larger than {limit / 1e6:g} MB; is it the right file?")
    return content.decode("utf-8-sig", errors="surrogateescape").splitlines()


def labels_of(content: Any, source: str) -> list[Label]:
    """The labels in a JSON value.

    It is a list of names, a list of objects with a name and perhaps a number and a colour, an object of
    names by number, of colours by name or of numbers by name, or an object that has one of these as its
    ``classes`` or ``labels``.
    """
    if isinstance(content, Mapping):
        for key in ("classes", "labels"):
            if isinstance(content.get(key), list | Mapping):
                return labels_of(content[key], f"{source}: {key}")
        if content and all(
            isinstance(name, str) and parse_number(n) is not None for n, name in content.items()
        ):
            return [Label(name.strip(), parse_number(number)) for number, name in content.items()]
        content = [{"name": name} | _as_entry(value) for name, value in content.items()]
    if not isinstance(content, list | tuple):
        raise UserError(f"{source}={brief(content)} is not a list of names; write [road, sky]")
    return [_from_entry(each, source) for each in content]


def _as_entry(value: Any) -> dict[str, Any]:
    """The value of a name, as an object."""
    if isinstance(value, Mapping):
        return dict(value)
    return {"id": value} if is_int(value) else {"color": value}


def _from_entry(entry: Any, source: str) -> Label:
    if isinstance(entry, str) or is_int(entry):
        return Label(str(entry).strip())
    if not isinstance(entry, Mapping):
        raise UserError(f"{source}: {brief(entry)} is not the name of a class")
    fields = {str(key).strip().lower(): value for key, value in entry.items()}
    name = _first(fields, _NAME)
    if not isinstance(name, str) and not is_int(name):
        raise UserError(f"{source}: {brief(dict(entry))} has no name")
    number, colour = _first(fields, _NUMBER), _first(fields, _COLOUR)
    channels = [_first(fields, names) for names in _CHANNELS]
    if colour is None and None not in channels:
        colour = [parse_number(channel) for channel in channels]
    return Label(
        str(name).strip(),
        None if number is None else _number(number, f"{source}: {name}"),
        None if colour is None else _colour(colour, f"{source}: {name}"),
    )


def _first(fields: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((fields[name] for name in names if fields.get(name) not in (None, "")), None)


def _number(value: Any, where: str) -> int:
    number = parse_number(value)
    if number is None:
        raise UserError(f"{where} has the number {brief(value)}; give one from 0 to {MAX_NUMBER}")
    return number


def _colour(value: Any, where: str) -> tuple[int, int, int]:
    colour = parse_colour(value)
    if colour is None:
        raise UserError(f"{where} has the colour {brief(value)}; write 128,64,128 or #804080")
    return colour


def _from_table(text: str, source: str) -> list[Label]:
    """The labels in a table with the names of its columns in the first line, or of name, red, green, blue."""
    first = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=first.count)
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text), delimiter=delimiter)]
    except csv.Error as error:
        raise UserError(f"{source} is not a table: {one_line(error)}") from error
    rows = [row for row in rows if any(row)]
    if rows and not set(_NAME) & {cell.lower() for cell in rows[0]}:
        if len(rows[0]) == 1:
            rows = [["name"], *rows]
        elif len(rows[0]) == 4 and parse_colour(",".join(rows[0][1:])):
            rows = [["name", "r", "g", "b"], *rows]
        else:
            columns = brief(", ".join(rows[0]))
            raise UserError(f"{source} has the columns {columns}; expected name and perhaps r, g, b or value")
    return [_from_entry(dict(zip(rows[0], row, strict=False)), source) for row in rows[1:]]


def _from_lines(text: str, source: str) -> list[Label]:
    """The labels in lines of names, or of names with their colours; ``#`` begins a comment among these."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    for pattern in (_COLOUR_FIRST, _COLOUR_LAST):
        coloured = [line for line in lines if not line.startswith("#")]
        matches = [pattern.fullmatch(line) for line in coloured]
        if not any(matches):
            continue
        if not all(matches):
            line = next(line for line, match in zip(coloured, matches, strict=True) if not match)
            raise UserError(f"{source}: {brief(line)} has no colour, but other lines have one")
        return [Label(m["name"], None, _colour(m["colour"], f"{source}: {m['name']}")) for m in matches if m]
    return [Label(line) for line in lines]


def _with_colours(labels: Sequence[Label], colors: Any) -> list[Label]:
    """The labels with the colours of the option ``colors``."""
    if colors is None:
        return list(labels)
    names = [str(label.name) for label in labels]
    if isinstance(colors, Mapping):
        for name in colors:
            if name not in names:
                raise unknown("class in colors", str(name), names)
        missing = [name for name in names if name not in colors]
        if missing:
            raise UserError(f"colors has no colour for {missing[0]!r}; give one for every class")
        colors = [colors[name] for name in names]
    if not isinstance(colors, list | tuple) or len(colors) != len(labels):
        raise UserError(
            f"colors={brief(colors)} must be {len(labels)} colours, one for each class, such as "
            f"{{{names[0]}: [128, 64, 128], …}}"
        )
    pairs = zip(labels, colors, strict=True)
    return [label._replace(colour=_colour(given, f"colors: {label.name}")) for label, given in pairs]


def _numbered(labels: Sequence[Label], source: str) -> list[Label]:
    """The labels with their positions as numbers if they have none; names and numbers must be unique."""
    if not labels or len(labels) > MAX_NUMBER:
        raise UserError(f"{source} names {len(labels)} classes; give from 1 to {MAX_NUMBER}")
    names, numbers = [label.name for label in labels], [label.number for label in labels]
    if None in numbers and set(numbers) != {None}:
        raise UserError(
            f"{source} has no number for {names[numbers.index(None)]!r}; give one for every class"
        )
    if numbers[0] is None:
        numbers = list(range(len(labels)))
    for what, values in (("class", names), ("number", numbers)):
        twice, count = Counter(values).most_common(1)[0]
        if count > 1:
            raise UserError(f"{source} names the {what} {twice!r} twice")
    if "" in names:
        raise UserError(f"{source} has a class without a name")
    return [label._replace(number=number) for label, number in zip(labels, numbers, strict=True)]
