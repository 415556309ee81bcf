"""``vtok predict`` for many images: inputs, files of results, shares of several processes."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from visualtokens.cli import main
from visualtokens.tasks.classify.task import Classify

from .processes import files_limited_to, finish, start

Vtok = Callable[..., tuple[int, str, str]]
COUNT = 14


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """14 images, one of them in a folder with a name that is not UTF-8, and other files."""
    root = tmp_path_factory.mktemp("photos")
    odd = Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9"))
    odd.mkdir()
    rng = np.random.default_rng(0)
    for i in range(COUNT):
        image = Image.fromarray(rng.integers(0, 256, (20 + i, 30, 3), np.uint8))
        image.save(odd / "x\ny.png" if i == COUNT - 1 else root / f"{i:02d}.png")
    (root / "notes.txt").write_text("no image")
    (root / ".hidden.png").write_bytes(b"no image")
    return root


@pytest.fixture(scope="session")
def names(photos: Path) -> list[str]:
    return sorted(str(path) for path in photos.rglob("*.png") if not path.name.startswith("."))


@pytest.fixture
def expected(vtok: Vtok, photos: Path, checkpoint: Path, names: list[str]) -> dict[str, tuple[str, float]]:
    """The label and the probability of each image, predicted one by one."""
    given = ("predict", *names, "--checkpoint", checkpoint, "--json", "--batch", "1")
    predictions = json.loads(vtok(*given)[1])["predictions"]
    return {
        each["image"]: (each["classes"][0]["class"], each["classes"][0]["probability"])
        for each in predictions
    }


def rows_of(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.reader(file))[1:]


def found_in(path: Path) -> list[tuple[str, str, float]]:
    """(image, label, probability) of every row or line of a file."""
    if path.suffix == ".csv":
        return [(row[0], row[1], float(row[2])) for row in rows_of(path)]
    if path.suffix == ".parquet":
        table = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
        exact = [os.fsdecode(row["image_bytes"]) if row["image_bytes"] else row["image"] for row in table]
        return [(name, row["label"], row["probability"]) for name, row in zip(exact, table, strict=True)]
    documents = map(json.loads, path.read_text().splitlines())
    return [(d["image"], d["classes"][0]["class"], d["classes"][0]["probability"]) for d in documents]


def check(path: Path, expected: dict[str, tuple[str, float]]) -> None:
    found = found_in(path)
    assert [name for name, _, _ in found] == list(expected)
    for name, label, probability in found:
        assert label == expected[name][0]
        assert probability == pytest.approx(expected[name][1], rel=1e-4)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_a_folder_into_a_file(
    vtok: Vtok, photos: Path, checkpoint: Path, tmp_path: Path, expected: Any, ending: str
) -> None:
    out = tmp_path / f"r.{ending}"
    given = ("predict", photos, "--checkpoint", checkpoint, "--out", out, "--batch", "4")
    code, text, err = vtok(*given)
    assert (code, text) == (0, f"14 images saved as {out}\n")
    assert err == "ignored 1 file without the extension of an image\n"
    check(out, expected)
    assert sorted(os.listdir(tmp_path)) == [f"r.{ending}", f"r.{ending}.run.json"]
    code, text, err = vtok(*given)
    assert (code, text) == (0, f"{out} is complete: 14 images; --overwrite predicts them again\n")
    assert err.endswith(f"{out} holds 14 of 14 images already\n")


def test_text_into_a_file(vtok: Vtok, photos: Path, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.txt"
    printed = vtok("predict", photos, "--checkpoint", checkpoint, "--top", "2")[1]
    code, text, _ = vtok("predict", photos, "--checkpoint", checkpoint, "--top", "2", "--out", out, "--json")
    assert code == 0
    assert json.loads(text) == {"saved": str(out), "images": 14, "unreadable": 0, "missing": 0}
    assert out.read_text() == printed
    assert r"caf\xe9/x\x0ay.png" in printed


@pytest.mark.parametrize("name", ["jsonl", "csv"])
def test_formats_on_standard_output(
    capsysbinary: pytest.CaptureFixture[bytes],
    photos: Path,
    checkpoint: Path,
    tmp_path: Path,
    names: list[str],
    name: str,
) -> None:
    given = ("predict", photos, photos / "notes.txt", "--checkpoint", checkpoint, "--format", name)
    assert main(list(map(str, given))) == 1
    output = capsysbinary.readouterr().out
    lines = output.splitlines(keepends=True)
    if name == "csv":
        assert lines[-1].startswith(os.fsencode(photos) + b"/notes.txt,,,,")
        assert lines[-1].endswith(b'PPM)"\n')
        assert b"/caf\xe9/x\ny.png" in output
    else:
        assert list(json.loads(lines[-1])) == ["image", "error"]
    (tmp_path / f"r.{name}").write_bytes(b"".join(lines[:-1]))
    assert [image for image, _, _ in found_in(tmp_path / f"r.{name}")] == names


@pytest.mark.parametrize("separator", [b"\0", b"\n"])
def test_lists_on_standard_input(
    vtok: Vtok, checkpoint: Path, names: list[str], monkeypatch: pytest.MonkeyPatch, separator: bytes
) -> None:
    listed = [name for name in names if os.fsdecode(separator) not in name]
    content = separator.join(map(os.fsencode, listed)) + separator
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    code, out, err = vtok("predict", "-", "--checkpoint", checkpoint, "--format", "jsonl")
    assert (code, err) == (0, "")
    assert [json.loads(line)["image"] for line in out.splitlines()] == listed
    assert len(listed) == COUNT - (separator == b"\n")


def test_patterns_and_shards(
    vtok: Vtok, photos: Path, checkpoint: Path, tmp_path: Path, expected: Any
) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("03.png", "01.png", "notes.txt"):
            tar.add(photos / name, name)
    given = (f"wds:{tmp_path}", str(photos / "**" / "0[45].*"), "--checkpoint", checkpoint, "--out")
    code, text, _ = vtok("predict", *given, tmp_path / "r.csv")
    assert (code, text) == (0, f"4 images saved as {tmp_path / 'r.csv'}\n")
    members = {f"{tmp_path}/a.tar/{name}": expected[str(photos / name)] for name in ("03.png", "01.png")}
    plain = {name: expected[name] for name in map(str, (photos / "04.png", photos / "05.png"))}
    check(tmp_path / "r.csv", members | plain)


def test_nothing_found(vtok: Vtok, checkpoint: Path, tmp_path: Path) -> None:
    code, out, err = vtok("predict", tmp_path, "--checkpoint", checkpoint, "--out", tmp_path / "r.csv")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"error: no images to predict: '{tmp_path}' holds none (.avif")
    assert os.listdir(tmp_path) == []


def test_unreadable_images_are_in_the_file(
    vtok: Vtok, photos: Path, checkpoint: Path, tmp_path: Path, names: list[str]
) -> None:
    broken = [tmp_path / f"{i}.png" for i in range(25)]
    for path in broken:
        path.write_bytes(b"no image")
    out = tmp_path / "r.csv"
    given = ("predict", names[0], *broken, names[1], "--checkpoint", checkpoint, "--out", out)
    code, text, err = vtok(*given)
    assert (code, text) == (1, f"27 images saved as {out}, 25 of them unreadable\n")
    assert err.splitlines()[0] == "could not be read (25):"
    assert err.splitlines()[-1] == f"  and 5 more; {out} lists all"
    rows = rows_of(out)
    assert [row[0] for row in rows] == [names[0], *map(str, broken), names[1]]
    assert [row[-1].startswith("not an image") for row in rows] == [False, *[True] * 25, False]
    for path in broken[1:]:  # repaired
        path.write_bytes(Path(names[0]).read_bytes())
    code, text, err = vtok(*given)
    assert (code, text) == (1, f"27 images saved as {out}, 1 of them unreadable\n")
    assert [bool(row[-1]) for row in rows_of(out)] == [False, True, *[False] * 25]


# Interruptions.


def interrupting(monkeypatch: pytest.MonkeyPatch, *, after: int, number: int = signal.SIGINT) -> None:
    """Send a signal while batch number ``after`` is predicted."""
    predict, calls = Classify.predict_batch, iter(range(10**6))

    def predict_and_signal(self: Classify, *arguments: Any, **options: Any) -> Any:
        if next(calls) == after:
            os.kill(os.getpid(), number)
        return predict(self, *arguments, **options)

    monkeypatch.setattr(Classify, "predict_batch", predict_and_signal)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "txt"])
def test_a_stopped_run_leaves_its_results_and_continues(
    vtok: Vtok,
    photos: Path,
    checkpoint: Path,
    tmp_path: Path,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    out = tmp_path / f"r.{ending}"
    given = ("predict", photos, "--checkpoint", checkpoint, "--out", out, "--batch", "3")
    with monkeypatch.context() as patch:
        interrupting(patch, after=1, number=signal.SIGTERM)
        code, text, err = vtok(*given)
    assert code == 143
    assert text == f"6 of 14 images saved as {out}; the same command continues\n"
    assert err.endswith("interrupted after 6 of 14 images; the same command continues\n")
    if ending == "txt":
        assert out.read_text().count(".png\n") == 6
    else:
        check(out, dict(list(expected.items())[:6]))
    code, text, err = vtok(*given)
    assert (code, text) == (0, f"14 images saved as {out}\n")
    assert err.endswith(f"{out} holds 6 of 14 images already\n")
    if ending != "txt":
        check(out, expected)


def test_a_full_disk_loses_nothing(
    vtok: Vtok, photos: Path, checkpoint: Path, tmp_path: Path, expected: Any
) -> None:
    out = tmp_path / "r.jsonl"
    given = ("predict", photos, "--checkpoint", checkpoint, "--out", out)
    with files_limited_to(2500):
        code, text, err = vtok(*given)
    assert (code, text) == (2, "")
    assert err.endswith("error: [Errno 27] File too large\n")
    assert not out.exists()
    code, _, err = vtok(*given)
    assert code == 0
    assert 0 < int(err.split(" holds ")[1].split(" of 14")[0]) < 14
    check(out, expected)


def test_other_options_are_refused(vtok: Vtok, photos: Path, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.csv"
    given = ("predict", photos, "--checkpoint", checkpoint, "--out", out)
    assert vtok(*given, "--top", "2")[0] == 0
    before = out.read_bytes()
    code, _, err = vtok(*given, "--top", "3")
    assert code == 2
    assert f"error: '{out}' was made with top=2 instead of top=3; give the same options" in err
    assert out.read_bytes() == before
    assert vtok(*given, "--top", "3", "--overwrite")[0] == 0
    assert len(rows_of(out)[0]) == 2 + 2 * 3
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "model.safetensors"):
        (other / name).write_bytes((checkpoint / name).read_bytes())
    assert vtok(*given, "--top", "3", "--checkpoint", other)[0] == 0, "the same checkpoint elsewhere"
    (other / "config.json").write_text((checkpoint / "config.json").read_text() + " ")
    assert " was made with checkpoint=" in vtok(*given, "--top", "3", "--checkpoint", other)[2]


def test_no_input_is_overwritten(vtok: Vtok, photos: Path, checkpoint: Path, tmp_path: Path) -> None:
    image = tmp_path / "image.txt"
    image.write_bytes((photos / "00.png").read_bytes())
    given = ("predict", image, "--checkpoint", checkpoint, "--out", image)
    assert "exists; save elsewhere or replace it with --overwrite" in vtok(*given)[2]
    code, _, err = vtok(*given, "--overwrite")
    assert code == 2
    assert f"'{image}' would overwrite the input '{image}'; save elsewhere" in err
    assert image.read_bytes() == (photos / "00.png").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--out", "results"],
            "--out 'results' has no known ending; give .jsonl, .csv, .parquet, .txt or --f",
        ),
        (["--out", "results/"], "--out 'results/' is a folder; give a file"),
        (["--out", "r.csv", "--format", "jsonl"], "--out 'r.csv' and --format jsonl contradict each other"),
        (["--format", "parquet"], "--format parquet needs a file; give --out FILE.parquet"),
        (["--format", "xml"], "--format must be 'text' or 'jsonl' or 'csv' or 'parquet', not 'xml'"),
        (["--share", "3/2"], "share=3/2 is not a part of the images; give for example 2/8"),
        (["--share", "half"], "share=half is not a part of the images"),
        (["--batch", "0"], "batch=0 must be at least 1"),
        (["--workers", "0"], "workers=0 must be at least 1"),
        (["--pictures", "x"], "pictures=x has no effect: "),
        (["-", "-"], "'-', the list on standard input, can be given once"),
    ],
)
def test_mistakes(
    vtok: Vtok,
    photos: Path,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = vtok("predict", photos / "00.png", *options, "--checkpoint", checkpoint)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")


# Several processes.


def ranks(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))


def test_processes_write_one_file(
    vtok: Vtok,
    photos: Path,
    checkpoint: Path,
    tmp_path: Path,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "r.csv"
    given = ("predict", photos, "--checkpoint", checkpoint, "--out", out)
    for rank in range(3):
        ranks(monkeypatch, rank, 3)
        code, text, _ = vtok(*given)
        done = len(range(0, 14, 3)) + len(range(1, 14, 3)) * (rank > 0) + len(range(2, 14, 3)) * (rank > 1)
        tail = "" if rank == 2 else "; the same command continues"
        of = "" if rank == 2 else " of 14"
        assert (code, text) == (0, f"{done}{of} images saved as {out}{tail}\n")
    check(out, expected)
    for rank in (0, 1):
        ranks(monkeypatch, rank, 3)
        assert vtok(*given)[:2] == (
            0,
            "" if rank else f"{out} is complete: 14 images; --overwrite predicts them again\n",
        )
    for options, message in (
        ((), "3 processes write into one file; give --out FILE"),
        (
            ("--out", out, "--overwrite"),
            f"--overwrite with 3 processes is not possible; remove '{out}' before",
        ),
    ):
        code, _, err = vtok("predict", photos, "--checkpoint", checkpoint, *options)
        assert (code, err) == (2, f"error: {message}\n")


def test_shares(vtok: Vtok, photos: Path, checkpoint: Path, tmp_path: Path, expected: Any) -> None:
    given = ("predict", photos, "--checkpoint", checkpoint)
    printed = [vtok(*given, "--share", f"{i}/3", "--format", "jsonl")[1].splitlines() for i in (1, 2, 3)]
    names = [[json.loads(line)["image"] for line in lines] for lines in printed]
    assert names == [list(expected)[i::3] for i in range(3)]
    out = tmp_path / "r.jsonl"
    told = [vtok(*given, "--share", f"{i}/3", "--out", out)[:2] for i in (3, 1, 2)]
    assert told == [
        (0, f"4 of 14 images saved as {out}; the other shares add theirs\n"),
        (0, f"9 of 14 images saved as {out}; the other shares add theirs\n"),
        (0, f"14 images saved as {out}\n"),
    ]
    check(tmp_path / "r.jsonl", expected)
    assert sorted(os.listdir(tmp_path)) == ["r.jsonl", "r.jsonl.run.json"]


def test_unreadable_images_do_not_end_the_other_processes(
    vtok: Vtok, photos: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun ends all processes when the exit code of one is not 0."""
    from visualtokens.predict import Results

    given = ("predict", photos / "notes.txt", photos / "00.png", "--checkpoint", checkpoint)
    ranks(monkeypatch, 0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Results, "finish", lambda self: None)  # as if the other process were alive
        assert vtok(*given, "--out", tmp_path / "r.csv")[:2] == (0, "")
    ranks(monkeypatch, 1, 2)
    code, text, _ = vtok(*given, "--out", tmp_path / "r.csv")
    assert (code, text) == (1, f"2 images saved as {tmp_path / 'r.csv'}, 1 of them unreadable\n")


def test_several_processes_read_a_list_from_a_file(
    vtok: Vtok, checkpoint: Path, tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("predict", "-", "--checkpoint", checkpoint, "--out", tmp_path / "r.jsonl")
    (tmp_path / "list").write_bytes(b"\0".join(map(os.fsencode, names)))
    with (tmp_path / "list").open("rb") as listed:
        monkeypatch.setattr("sys.stdin", listed)
        for rank in (0, 1):
            ranks(monkeypatch, rank, 2)
            listed.seek(100)  # torchrun's processes share the position in the file
            assert vtok(*given)[0] == 0
    assert [name for name, _, _ in found_in(tmp_path / "r.jsonl")] == names
    reading, writing = os.pipe()
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        code, _, err = vtok(*given)
    assert (code, err) == (
        2,
        "error: 2 processes cannot read one pipe; give the list as a file: - < list.txt\n",
    )


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return list(map(int, listed.split()))


def torchrun(processes: int, *arguments: str | Path) -> Sequence[str]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    return [*launcher, f"--nproc_per_node={processes}", "-m", "vtok", *map(str, arguments)]


def lines_in(parts: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in parts.glob("*.jsonl")) if parts.exists() else 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
@pytest.mark.parametrize("again", [4, 3])
def test_a_killed_process_costs_nothing(checkpoint: Path, folder: Path, tmp_path: Path, again: int) -> None:
    """One of four processes is killed; another start, also with three, completes what is missing."""
    count = 3000
    (tmp_path / "photos").mkdir()
    for i in range(count):
        os.link(folder / f"{i % 2}.png", tmp_path / "photos" / f"{i:04d}.png")
    out = tmp_path / "r.jsonl"
    given = ("predict", tmp_path / "photos", "--checkpoint", checkpoint, "--out", out, "--batch", "2")
    job = start(command=torchrun(4, *given))
    parts = tmp_path / "r.jsonl.parts"
    deadline = time.monotonic() + 200
    while lines_in(parts) < 200:
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    victim = children(job.pid)[2]
    os.kill(victim, signal.SIGKILL)
    code, _, err = finish(job)
    assert code != 0, err
    done = lines_in(parts)
    assert 200 <= done < count
    with (parts / "00002-of-00004.jsonl").open("ab") as part:
        part.write(b'{"image": "a torn li')
    code, text, err = finish(start(command=torchrun(again, *given)))
    assert code == 0, err
    assert text.count(f"{count:,} images saved as {out}\n") == 1
    names = [json.loads(line)["image"] for line in out.read_bytes().splitlines()]
    assert names == sorted(map(str, (tmp_path / "photos").iterdir()))
    assert sorted(os.listdir(tmp_path)) == ["photos", "r.jsonl", "r.jsonl.run.json"]
