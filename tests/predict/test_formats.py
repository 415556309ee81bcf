"""File formats: what they hold, and that what is written can be read back."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from visualtokens.data import BadImage
from visualtokens.errors import UserError
from visualtokens.predict.formats import (
    Csv,
    Format,
    LineFormat,
    Parquet,
    Record,
    make_format,
    parse_line,
    to_line,
)
from visualtokens.tasks import Prediction
from visualtokens.tasks.classify import Classification
from visualtokens.tasks.detect.detections import Detections, ImageDetections
from visualtokens.tasks.prediction import top_columns
from visualtokens.tasks.segment.task import Segmentation

CLASSES = ["cat", 'a "dog", big', os.fsdecode(b"caf\xe9"), "two\nlines"]
NAMES = ["a.png", "ä.png", 'b,"c".png', "d\ne\rf.png", os.fsdecode(b"\xff\xe9.png"), "=1+1.png", r"\xff.png"]
BOXES = {"label": str, "score": float, "x1": float, "y1": float, "x2": float, "y2": float}


def classification(*probabilities: float) -> Classification:
    return Classification(torch.tensor(probabilities), CLASSES, 2)


def detections(count: int, *, masks: bool = False) -> ImageDetections:
    boxes = torch.arange(4.0 * count).reshape(count, 4) + 0.25
    found = torch.ones(count, 3, 3, dtype=torch.bool) if masks else None
    return ImageDetections(Detections(boxes, torch.arange(count), torch.full((count,), 0.75), found), CLASSES)


def written(form: Format, path: Path, *records: Record) -> Path:
    form.write(path, map(to_line, records))
    return path


def csv_rows(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.reader(file))


def test_csv_of_a_classification(tmp_path: Path) -> None:
    form = Csv(top_columns(2, len(CLASSES)))
    records = [form.record(name, classification(0.125, 0.5, 0.0625, 0.3125), {}) for name in NAMES]
    path = written(form, tmp_path / "x.csv", *records, form.unreadable(BadImage("broken", "not an image")))
    header, *rows = csv_rows(path)
    assert header == ["image", "label", "probability", "label_2", "probability_2", "error"]
    assert [row[0] for row in rows] == [*NAMES, "broken"]
    assert os.fsencode(rows[4][0]) == b"\xff\xe9.png"
    assert rows[0][1:] == [CLASSES[1], "0.5", CLASSES[3], "0.3125", ""]
    assert rows[-1][1:] == ["", "", "", "", "not an image"]


def test_csv_of_detections_has_a_row_for_each_object_and_one_for_none(tmp_path: Path) -> None:
    form = Csv(BOXES)
    records = [form.record(f"{count}.png", detections(count), {}) for count in (2, 0, 1)]
    _, *rows = csv_rows(written(form, tmp_path / "x.csv", *records))
    assert [row[0] for row in rows] == ["2.png", "2.png", "0.png", "1.png"]
    assert rows[1] == ["2.png", CLASSES[1], "0.75", "4.2", "5.2", "6.2", "7.2", ""]
    assert rows[2] == ["0.png", *[""] * 7]
    assert detections(1, masks=True).rows()[0][-1] == 9


def test_rows_of_a_segmentation_are_the_shares() -> None:
    found = Segmentation(torch.tensor([[0, 0], [0, 2]], dtype=torch.uint8), CLASSES)
    assert found.rows() == [["cat", 0.75], [CLASSES[2], 0.25]]


def test_lines_of_json_are_the_documents(tmp_path: Path) -> None:
    form = make_format("jsonl", lambda: {})
    found = classification(0.25, 0.75, 0, math.nan)
    record = form.record(NAMES[4], found, {"picture": "p.png"})
    path = written(form, tmp_path / "x.jsonl", record, form.unreadable(BadImage("b", "why")))
    first, second = path.read_bytes().splitlines(keepends=True)
    assert first.isascii()
    document = json.loads(first)
    assert os.fsencode(document["image"]) == b"\xff\xe9.png"
    assert list(document) == ["image", "picture", "classes"]
    assert document["classes"][0]["probability"] is None, "JSON has no NaN"
    assert json.loads(second) == {"image": "b", "error": "why"}


def test_text_is_printable(tmp_path: Path) -> None:
    form = make_format("text", lambda: {})
    record = form.record(NAMES[3], classification(0.25, 0.75, 0, 0), {"overlay": "o.png"})
    path = written(form, tmp_path / "x.txt", record, form.unreadable(BadImage("b\x1b.png", "why")))
    assert path.read_text().splitlines() == [
        r"d\x0ae\x0df.png: o.png",
        '   75.0%  a "dog", big',
        "   25.0%  cat",
        r"b\x1b.png",
        "  cannot be read: why",
    ]
    assert not form.readable


def test_parquet_has_columns_of_the_right_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("visualtokens.predict.formats.ROW_GROUP", 3)
    form = Parquet(BOXES | {"mask_pixels": int})
    records = [
        form.record(name, detections(i % 3, masks=True), {}) for i, name in enumerate([*NAMES, CLASSES[2]])
    ]
    path = written(form, tmp_path / "x.parquet", *records, form.unreadable(BadImage("b", "why")))
    with parquet.ParquetFile(path) as file:
        assert file.num_row_groups == math.ceil(file.metadata.num_rows / 3) == 4
        table = file.read()
    assert table.schema.names == ["image", "image_bytes", *BOXES, "mask_pixels", "error"]
    kinds = dict(zip(table.schema.names, map(str, table.schema.types), strict=True))
    assert (kinds["image"], kinds["image_bytes"], kinds["score"], kinds["mask_pixels"]) == (
        *("string", "binary", "float", "int64"),
    )
    rows = table.to_pylist()
    assert [row["image"] for row in rows if row["image_bytes"] is None] == [
        *("a.png", "ä.png", 'b,"c".png', 'b,"c".png', "d\ne\rf.png", "=1+1.png", "=1+1.png", r"\xff.png", "b")
    ]
    odd = [(row["image"], row["image_bytes"]) for row in rows if row["image_bytes"] is not None]
    assert odd == [(r"\xff\xe9.png", b"\xff\xe9.png"), (r"caf\xe9", b"caf\xe9")]
    assert rows[2]["label"] == "cat"
    assert (rows[0]["label"], rows[0]["score"], rows[0]["error"]) == (None, None, None)
    assert rows[-1]["error"] == "why"


@pytest.mark.parametrize("name", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("kind", ["classes", "boxes"])
def test_what_is_read_can_be_written_again(tmp_path: Path, name: str, kind: str) -> None:
    if name == "parquet":
        pytest.importorskip("pyarrow")
    columns = top_columns(2, len(CLASSES)) if kind == "classes" else BOXES
    form = make_format(name, lambda: columns)

    def prediction(i: int) -> Prediction:
        return classification(0.125, 0.5, 0.0625, 0.3125) if kind == "classes" else detections(i % 3)

    records = [form.record(image, prediction(i), {}) for i, image in enumerate(NAMES)]
    records.insert(2, form.unreadable(BadImage(os.fsdecode(b"\xfe"), "why")))
    path = written(form, tmp_path / "x", *records)
    read = list(form.read(path))
    assert [record["image"] for record in read] == [record["image"] for record in records]
    assert [record.get("error") for record in read] == [record.get("error") for record in records]
    again = written(form, tmp_path / "y", *read)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["jsonl", "csv"])
def test_a_torn_end_loses_at_most_the_images_it_touches(tmp_path: Path, name: str) -> None:
    """Every length of a file: what is read is a prefix, without a part of an image."""
    form = make_format(name, lambda: BOXES)
    records = [form.record(image, detections(1 + i % 3), {}) for i, image in enumerate(NAMES)]
    whole = written(form, tmp_path / "x", *records).read_bytes()
    expected = list(form.read(tmp_path / "x"))
    assert isinstance(form, LineFormat)
    ends = list(accumulate((len(form.encode(record)) for record in records), initial=len(form.head)))
    for size in range(len(form.head), len(whole), 1 if name == "csv" else 5):
        if whole[:size].endswith(b"\n"):
            continue  # not torn
        (tmp_path / "y").write_bytes(whole[:size])
        read = list(form.read(tmp_path / "y"))
        assert read == expected[: len(read)]
        assert ends[len(read)] <= size
        assert len(read) + 2 >= sum(end <= size for end in ends[1:])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("jsonl", b'{"image": 3}\n', r"is damaged \(line 1: not a record\)"),
        ("jsonl", b'{"image": "a"}\n[]\n', r"is damaged \(line 2: "),
        ("csv", b"image,label\n", "has the columns 'image, label' instead of 'image, label, score"),
        ("csv", b"", "has the columns '' instead of"),
        ("csv", b"image,label,score,x1,y1,x2,y2,error\na,b\n", "row 2 has 2 of 8 values"),
        ("csv", b'image,label,score,x1,y1,x2,y2,error\n"a"b,,,,,,,\n', "line 2: "),
        ("parquet", b"PAR1", "is damaged"),
    ],
)
def test_files_of_others_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name == "parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        list(make_format(name, lambda: BOXES).read(tmp_path / "x"))
    assert "start again with --overwrite" in str(caught.value)


def test_names_of_columns_do_not_clash() -> None:
    with pytest.raises(UserError, match="column 'image'"):
        Csv({"image": str})


@pytest.mark.parametrize("line", [b"", b"1", b"[]", b"{}", b'{"image": null}', b"\xff", b'{"image": "a"'])
def test_lines_that_are_no_records(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a record|Expecting|decode|delimiter"):
        parse_line(line)


def test_parquet_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"Parquet needs pyarrow: pip install 'visualtokens\[data\]'"):
        make_format("parquet", lambda: BOXES)


def test_unknown_formats() -> None:
    with pytest.raises(UserError, match="unknown format 'jsn'; did you mean 'jsonl'"):
        make_format("jsn", lambda: {})


def test_csv_of_any_class_name() -> None:
    form: Any = make_format("csv", lambda: {"label": str})
    lines = form.encode({"image": "a", "rows": [["\ud800"]]})
    assert list(csv.reader(io.StringIO(lines.decode()))) == [["a", r"\ud800", ""]]
