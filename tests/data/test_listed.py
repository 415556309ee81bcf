"""Images listed in CSV and Parquet files."""

from __future__ import annotations

import csv
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from visualtokens.data import listed as module
from visualtokens.data import open_dataset
from visualtokens.data.listed import ListedImages
from visualtokens.errors import UserError

KINDS = pytest.mark.parametrize("kind", ["csv", "parquet"])
ROWS = [
    ("a/1.png", "cat", "train"),
    ("a/2.png", "ant", "train"),
    ("b/3.png", "cat", "valid"),
    ("b/4.png", "ant", "test"),
]


def write(folder: Path, rows: Sequence[Sequence[Any]], *, kind: str = "csv") -> str:
    """Write a table of paths, labels and perhaps splits, and the images; returns the dataset's name."""
    for number, (path, *_) in enumerate(rows):
        file = folder / str(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), number).save(file)
    header = ("path", "label", "split")[: len(rows[0])]
    return write_table(folder / f"table.{kind}", header, rows)


def write_table(file: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if file.suffix == ".csv":
        with file.open("w", newline="") as stream:
            csv.writer(stream).writerows([header, *rows])
    else:
        columns = map(list, zip(*rows, strict=True))
        parquet.write_table(pyarrow.table(dict(zip(header, columns, strict=True))), file)
    return f"{file.suffix[1:]}:{file}"


@KINDS
def test_rows_have_a_path_a_label_and_a_split(tmp_path: Path, kind: str) -> None:
    spec = write(tmp_path, ROWS, kind=kind)
    train, val, test = (open_dataset(spec, split) for split in ("train", "val", "test"))  # type: ignore[arg-type]
    assert train.classes == val.classes == test.classes == ["ant", "cat"]
    assert [train[i][1] for i in range(len(train))] == [1, 0]
    assert [train.path(i) for i in range(len(train))] == [
        str(tmp_path / "a/1.png"),
        str(tmp_path / "a/2.png"),
    ]
    ((image, label),) = [val[i] for i in range(len(val))]
    assert (image.getpixel((0, 0)), label, val.spec) == ((2, 2, 2), 1, spec)
    assert test[0][1] == 0


@KINDS
def test_columns_have_other_names(tmp_path: Path, kind: str) -> None:
    rows = [(7, "train", "dog", "a/1"), (8, "val", "dog", "a/2")]
    images = tmp_path / "images"
    (images / "a").mkdir(parents=True)
    for *_, name in rows:
        Image.new("L", (4, 4)).save(images / f"{name}.png")
    spec = write_table(tmp_path / f"x.{kind}", ("id", "fold", "breed", "1"), rows)
    val = open_dataset(spec, "val", path=1, label="breed", split="fold", root=str(images), suffix=".png")
    assert (val.path(0), val.classes, len(val)) == (str(images / "a/2.png"), ["dog"], 1)


@pytest.mark.parametrize(("separator", "ending"), [(",", "\n"), (";", "\r\n"), ("\t", "\n"), (", ", "\n")])
def test_separators_and_line_endings(tmp_path: Path, separator: str, ending: str) -> None:
    spec = write(tmp_path, ROWS)
    rows = [("path", "label", "split", '"a, b; c"'), *((*row, '"x,y;z"') for row in ROWS), ()]
    text = ending.join(separator.join(row) for row in rows)
    (tmp_path / "table.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())  # Excel writes a byte order mark
    assert len(open_dataset(spec, "train")) == 2


@KINDS
@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([10, 9, -1], ["-1", "9", "10"]),
        (["b", "a", "10"], ["10", "a", "b"]),
        (["02", "1", "10"], ["02", "1", "10"]),  # names of digits
    ],
)
def test_labels_are_names_or_integers(
    tmp_path: Path, kind: str, labels: list[Any], classes: list[str]
) -> None:
    rows = [(f"{i}.png", label, "train") for i, label in enumerate(labels)]
    train = open_dataset(write(tmp_path, rows, kind=kind), "train")
    assert train.classes == classes
    assert [classes[train[i][1]] for i in range(3)] == list(map(str, labels))


@KINDS
def test_a_share_is_held_out_where_no_row_is_for_validation(tmp_path: Path, kind: str) -> None:
    rows = [(f"{i}.png", "ab"[i % 2]) for i in range(20)]
    spec = write(tmp_path, rows, kind=kind)
    with pytest.raises(UserError, match=r"has no column 'split'; give --val_share 0\.2 to hold out"):
        open_dataset(spec, "train")
    with pytest.raises(UserError, match="has no column 'split'"):
        open_dataset(spec, "test", val_share=0.2)
    train, val = (open_dataset(spec, split, val_share=0.2) for split in ("train", "val"))  # type: ignore[arg-type]
    assert isinstance(train, ListedImages)
    assert isinstance(val, ListedImages)
    assert sorted(train.files + val.files) == sorted(str(tmp_path / name) for name, _ in rows)
    assert (val.labels.count(0), val.labels.count(1)) == (2, 2)
    assert len(open_dataset(spec, "val", val_share=1)) == 20
    # The choice depends on the names, not on the order or the kind of the table.
    other = open_dataset(write(tmp_path, rows[::-1], kind="csv"), "val", val_share=0.2)
    assert sorted(other.files) == sorted(val.files)  # type: ignore[attr-defined]


def test_a_share_of_the_training_rows_is_held_out(tmp_path: Path) -> None:
    rows = [(f"{i}.png", "a", "train" if i < 10 else "test") for i in range(12)]
    spec = write(tmp_path, rows)
    with pytest.raises(UserError, match="no val split in column 'split', only test, train; give --val_share"):
        open_dataset(spec, "val")
    sizes = [len(open_dataset(spec, split, val_share=0.3)) for split in ("train", "val", "test")]  # type: ignore[arg-type]
    assert sizes == [7, 3, 2]
    with pytest.raises(UserError, match=r"has validation images; leave val_share=0\.3 out"):
        open_dataset(write(tmp_path, ROWS), "train", val_share=0.3)


def test_a_table_of_test_images_alone(tmp_path: Path) -> None:
    spec = write(tmp_path, [("1.png", "cat", "test")])
    test = open_dataset(spec, "test")
    assert (len(test), test.classes) == (1, ["cat"])
    with pytest.raises(UserError, match=r"has no train split in column 'split', only test$"):
        open_dataset(spec, "train")


def test_missing_files_are_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = write(tmp_path, [(f"{i}.png", "a", "train") for i in range(6)])
    for i in range(4):
        (tmp_path / f"{i}.png").unlink()
    names = ", ".join(str(tmp_path / f"{i}.png") for i in range(3))
    with pytest.raises(UserError) as caught:
        open_dataset(spec, "train")
    found = f"4 of 6 images in {tmp_path}/table.csv do not exist: {names}, …"
    assert str(caught.value) == f"{found}; add them, or leave them out with --data_args.skip_missing true"
    with caplog.at_level(logging.WARNING):
        assert len(open_dataset(spec, "train", skip_missing=True)) == 2
    assert caplog.messages == [f"{found}; they are left out"]
    with pytest.raises(
        UserError, match=r"6 of 6 images .*; give the folder of the images with --data_args\.root"
    ):
        open_dataset(spec, "train", root=str(tmp_path / "no"), skip_missing=True)


@pytest.mark.parametrize("name", ["../1.png", "/tmp/1.png", "a/../../1.png"])
def test_paths_stay_inside_the_folder(tmp_path: Path, name: str) -> None:
    spec = write(tmp_path, [("1.png", "a", "train")])
    Path(tmp_path, "table.csv").write_text(f"path,label,split\n1.png,a,train\n{name},a,train\n")
    with pytest.raises(UserError, match=r"table\.csv, row 2: .* lies outside .*allow_outside true"):
        open_dataset(spec, "train")
    with pytest.raises(UserError, match=r"1 of 2 images .* do not exist"):
        open_dataset(spec, "train", allow_outside=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column 'path', only "),
        ("path,label,split\n", "holds no rows"),
        (
            "file,label\n1.png,a\n",
            r"has no column 'path', only file, label; name it with --data_args\.path",
        ),
        ("path,class\n1.png,a\n", r"has no column 'label', .*; name it with --data_args\.label"),
        ("path,label,path\n1.png,a,2.png\n", "has several columns 'path'"),
        ("path,label,split\n1.png,a\n", "line 2 has 2 columns, but the first line has 3"),
        ("path,label,split\n1.png,,train\n", "row 1: label is ''; expected a name or an integer"),
        ("path,label,split\n\n,a,train\n", "row 1: path is ''; expected the path of an image"),
        (
            "path,label,split\n1.png,a,dev\n",
            "row 1: split is 'dev'; expected train, val, valid, validation, test",
        ),
        ('path,label,split\n1.png,"a,train\n', "after line 1: unexpected end of data"),
        (
            "path,label,split\n1.png,b,train\n2.png,a,val\n",
            "has classes without training images: a; add some",
        ),
        ("p\0a\0t\0h\0", "is not text with a row in each line; save it as CSV in UTF-8"),
        ("x" * module.MAX_LINE, "is not text with a row in each line"),
        ("path,label\n" + "x" * 200_000 + ",a\n", "after line 1: field larger than field limit"),
    ],
)
def test_unusable_csv_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    for name in ("1.png", "2.png"):
        Image.new("L", (4, 4)).save(tmp_path / name)
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        open_dataset(f"csv:{tmp_path}/x.csv", "val")


def test_an_image_with_two_labels_is_not_split(tmp_path: Path) -> None:
    spec = write(tmp_path, [("1.png", "a"), ("2.png", "b"), ("1.png", "b")])
    with pytest.raises(UserError, match=r"gives .*1\.png two labels; remove one of the rows"):
        open_dataset(spec, "train", val_share=0.5)


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    Image.new("L", (4, 4)).save(tmp_path / "x.png")
    Path(tmp_path / "x.png").rename(tmp_path / "caf\udce9.png")
    (tmp_path / "x.csv").write_bytes(b"path,label,split\ncaf\xe9.png,a,train\n")
    assert open_dataset(f"csv:{tmp_path}/x.csv", "train")[0][1] == 0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"path": ["1.png"], "label": [1.5]}, "column 'label' holds double; expected text or integers"),
        ({"path": [["1.png"]], "label": ["a"]}, "column 'path' holds list<.*>; expected text or integers"),
        ({"path": [3], "label": ["a"]}, "row 1: path is 3; expected the path of an image"),
        (
            {"path": ["1.png", None], "label": ["a", "b"]},
            "row 2: path is None; expected the path of an image",
        ),
        ({"path": ["1.png"], "label": [None]}, "column 'label' holds null"),
        ({"file": ["1.png"], "label": ["a"]}, "has no column 'path', only file, label"),
    ],
)
def test_unusable_parquet_files_are_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=message):
        open_dataset(f"parquet:{tmp_path}/x.parquet", "val", val_share=1)


def test_parquet_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    for content in (b"", b"path,label\n1.png,a\n", b"PAR1" + bytes(40) + b"PAR1"):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"x\.parquet is not a Parquet file: "):
            open_dataset(f"parquet:{file}", "val")
    with pytest.raises(UserError, match=r"nothing\.csv is not a file; give the path of a csv file"):
        open_dataset(f"csv:{tmp_path}/nothing.csv", "val")


@KINDS
def test_large_tables_are_refused_before_they_are_read(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write(tmp_path, ROWS, kind=kind)
    with monkeypatch.context() as patch:
        patch.setattr(module, "MAX_ROWS", 3)
        with pytest.raises(UserError, match=r"has (more than 3|4) rows; at most 3 are read"):
            open_dataset(spec, "train")
    monkeypatch.setattr(module, "MAX_BYTES", 50)
    with pytest.raises(UserError, match=r"has \d[\d,]* bytes; at most 50 are read"):
        open_dataset(spec, "train")


def test_a_parquet_column_that_unpacks_to_more_than_the_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "x" * 100_000
    parquet.write_table(
        pyarrow.table({"path": [long], "label": ["a"]}), tmp_path / "x.parquet", compression="zstd"
    )
    size = (tmp_path / "x.parquet").stat().st_size
    monkeypatch.setattr(module, "MAX_BYTES", 90_000)
    assert size < 90_000
    with pytest.raises(UserError, match=r"has 100,\d+ bytes unpacked; at most 90,000 are read"):
        open_dataset(f"parquet:{tmp_path}/x.parquet", "val", val_share=1)


def test_a_repeated_text_is_stored_once(tmp_path: Path) -> None:
    repeated = pyarrow.table({"path": ["x" * 1000 + ".png"] * 5000, "label": ["a"] * 5000})
    parquet.write_table(repeated, tmp_path / "x.parquet")
    table = module._Table(
        "parquet", tmp_path / "x.parquet", {"path": "path", "label": "label", "split": None}
    )
    names, labels, splits = table.read()
    assert (len(names), len(labels), splits) == (5000, 5000, [])
    assert len(set(map(id, names))) == 1


def test_parquet_needs_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write(tmp_path, ROWS, kind="parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"need pyarrow; install it with: pip install 'visualtokens\[data\]'"):
        open_dataset(spec, "train")
