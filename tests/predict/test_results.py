"""Result files: continued after any interruption, and written by several processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from visualtokens.data import BadImage, Share
from visualtokens.errors import UserError
from visualtokens.predict import Images, Merged, Results
from visualtokens.predict.formats import JsonLines, make_format

SETTINGS = {"checkpoint": "abc", "top": 3}
NAMES = [f"{i:02d}.png" for i in range(12)]


def images(names: Iterable[str] = NAMES) -> Images:
    made = Images()
    for name in names:
        made.append(name)
    return made


@contextlib.contextmanager
def opened(
    path: Path,
    names: Iterable[str] = NAMES,
    *,
    share: tuple[int, int] = (0, 1),
    top: int = 3,
    overwrite: bool = False,
) -> Iterator[Results]:
    with Results(
        path,
        JsonLines(),
        images(names),
        settings=SETTINGS | {"top": top},
        share=Share(*share),
        overwrite=overwrite,
    ) as results:
        yield results


def predict(results: Results, *, count: int | None = None, bad: Iterable[str] = (), mark: str = "") -> None:
    """Add results of the first ``count`` images that are left; those of ``bad`` are unreadable."""
    for position in results.todo[:count].tolist():
        name = results.images[position]
        if name in bad:
            results.add(results.format.unreadable(BadImage(name, "why")))
        else:
            results.add({"image": name, "mark": mark})


def held(path: Path) -> list[str]:
    return [json.loads(line)["image"] for line in path.read_bytes().splitlines()]


def files(path: Path) -> list[str]:
    return sorted(each.name for each in path.parent.iterdir())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "new" / "r.jsonl"


def test_results_are_on_the_disk_at_once_and_in_one_file_at_the_end(out: Path) -> None:
    with opened(out) as results:
        assert results.todo.tolist() == list(range(12))
        results.add({"image": NAMES[0]})
        part = out.with_name("r.jsonl.parts") / "00000-of-00001.jsonl"
        assert part.read_bytes() == b'{"image": "00.png"}\n'
        for name in NAMES[1:]:
            results.add({"image": name})
        assert results.finish() == Merged(images=12, unreadable=0, missing=0, new=True)
    assert held(out) == NAMES
    assert files(out) == ["r.jsonl", "r.jsonl.run.json"]


def test_an_interrupted_run_leaves_a_file_and_continues(out: Path) -> None:
    with opened(out) as results:
        predict(results, count=5, mark="a")
        assert results.finish() == Merged(images=5, unreadable=0, missing=7, new=True)
    assert held(out) == NAMES[:5]
    with opened(out) as results:
        assert (results.done, results.todo.tolist()) == (5, list(range(5, 12)))
        predict(results, mark="b")
        assert results.finish() == Merged(images=12, unreadable=0, missing=0, new=True)
    marks = [json.loads(line)["mark"] for line in out.read_bytes().splitlines()]
    assert (held(out), marks) == (NAMES, ["a"] * 5 + ["b"] * 7)


def test_a_killed_run_continues_from_any_byte(tmp_path: Path) -> None:
    """The part is cut at many lengths, as by SIGKILL in the middle of a line."""
    first = tmp_path / "first.jsonl"
    with opened(first) as results:
        predict(results, mark="é\n")
        part = first.with_name("first.jsonl.parts") / "00000-of-00001.jsonl"
        whole = part.read_bytes()
    line = len(whole) // 12
    for size in (*range(3 * line + 2), *range(4 * line, len(whole), 7), len(whole) - 1, len(whole)):
        out = tmp_path / f"{size}.jsonl"
        parts = out.with_name(out.name + ".parts")
        parts.mkdir()
        (parts / "00000-of-00001.jsonl").write_bytes(whole[:size])
        with opened(out) as results:
            assert results.done == whole[:size].count(b"\n")
            predict(results, mark="é\n")
            assert results.finish() == Merged(images=12, unreadable=0, missing=0, new=True)
        assert out.read_bytes() == whole
        assert not parts.exists()


def test_damaged_lines_are_redone(out: Path) -> None:
    with opened(out) as results:
        predict(results)
    part = out.with_name("r.jsonl.parts") / "00000-of-00001.jsonl"
    lines = part.read_bytes().splitlines(keepends=True)
    lines[3], lines[6] = b"\x00" * 30 + b"\n", b"[1, 2]\n"
    part.write_bytes(b"".join(lines))
    with opened(out) as results:
        assert results.todo.tolist() == [3, 6]
        predict(results)
        results.finish()
    assert held(out) == NAMES


@pytest.mark.parametrize("moment", ["before the file", "after the file"])
def test_a_merge_that_is_killed_is_repeated(out: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    class Killed(BaseException):
        pass

    def kill(*arguments: object) -> None:
        raise Killed

    with opened(out) as results:
        predict(results)
        name = "write_atomically" if moment == "before the file" else "remove_folder"
        with monkeypatch.context() as patch:
            patch.setattr(f"visualtokens.predict.results.{name}", kill)
            with pytest.raises(Killed):
                results.finish()
    (out.parent / ".vtok-r.jsonl.123.tmp").write_text("of the killed merge")
    with opened(out) as results:
        assert len(results.todo) == 0
        assert results.finish() == Merged(images=12, unreadable=0, missing=0, new=True)
    assert held(out) == NAMES
    assert files(out) == ["r.jsonl", "r.jsonl.run.json"]


def test_unreadable_images_are_tried_again(out: Path) -> None:
    with opened(out) as results:
        predict(results, bad=["03.png", "07.png"])
        assert results.finish() == Merged(images=12, unreadable=2, missing=0, new=True)
    assert held(out) == NAMES
    assert json.loads(out.read_bytes().splitlines()[3]) == {"image": "03.png", "error": "why"}
    with opened(out) as results:
        assert results.todo.tolist() == [3, 7]
        predict(results, bad=["07.png"])
        assert results.finish() == Merged(images=12, unreadable=1, missing=0, new=True)
    assert held(out) == NAMES
    assert json.loads(out.read_bytes().splitlines()[3]) == {"image": "03.png", "mark": ""}


def test_new_images_are_added_and_others_stay(out: Path) -> None:
    for names, expected in (
        (NAMES[4:8], NAMES[4:8]),
        (NAMES, NAMES),
        ([*NAMES[6:], "x.png"], [*NAMES[:6], *NAMES[6:], "x.png"]),
        (["y.png", "00.png"], [*NAMES[1:], "x.png", "y.png", "00.png"]),
    ):
        with opened(out, names) as results:
            predict(results)
            assert results.finish() == Merged(images=len(names), unreadable=0, missing=0, new=True)
        assert held(out) == expected


def test_a_complete_file_is_left_as_it_is(out: Path) -> None:
    with opened(out) as results:
        predict(results)
        results.finish()
    before = out.stat()
    with opened(out) as results:
        assert len(results.todo) == 0
        assert results.finish() == Merged(images=12, unreadable=0, missing=0, new=False)
    assert (out.stat().st_ino, out.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert files(out) == ["r.jsonl", "r.jsonl.run.json"]


def test_an_image_that_is_named_twice_has_one_result(out: Path) -> None:
    with opened(out, ["b.png", "a.png", "b.png", "c.png", "a.png"]) as results:
        assert results.todo.tolist() == [0, 1, 3]
        predict(results)
        assert results.finish() == Merged(images=3, unreadable=0, missing=0, new=True)
    assert held(out) == ["b.png", "a.png", "c.png"]


# Settings.


def test_other_settings_are_refused(out: Path) -> None:
    with opened(out) as results:
        predict(results, count=3)
        results.finish()
    with pytest.raises(UserError) as caught, opened(out, top=5):
        pass
    assert str(caught.value) == (
        f"'{out}' was made with top=3 instead of top=5; "
        "give the same options, save elsewhere, or start again with --overwrite"
    )
    with opened(out, top=5, overwrite=True) as results:
        assert not out.exists()
        assert len(results.todo) == 12
        predict(results)
        results.finish()
    assert held(out) == NAMES
    with opened(out, top=5) as results:
        assert len(results.todo) == 0


def test_settings_without_results_are_replaced(out: Path) -> None:
    with opened(out) as results:
        predict(results)
        results.finish()
    out.unlink()
    with opened(out, top=5) as results:
        assert len(results.todo) == 12
        with (
            pytest.raises(UserError, match="was made with top=5 instead of top=3"),
            opened(out, share=(1, 2)),
        ):
            pass
        predict(results, count=1)
    with pytest.raises(UserError, match="was made with top=5 instead of top=3"), opened(out):
        pass


def test_files_of_others_are_refused(out: Path) -> None:
    out.parent.mkdir()
    out.write_text("mine")
    with pytest.raises(UserError, match=r"exists; save elsewhere or replace it with --over"), opened(out):
        pass
    assert files(out) == ["r.jsonl"]
    out.with_name("r.jsonl.run.json").write_text("{")
    with pytest.raises(UserError, match=r"r\.jsonl\.run\.json' is damaged"), opened(out):
        pass
    assert out.read_text() == "mine"
    out.unlink()
    out.mkdir()
    with pytest.raises(UserError, match="is a folder; give the name of a file"), opened(out):
        pass


@pytest.mark.parametrize("saved", [False, True])
def test_results_without_their_settings_are_refused(
    out: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    """A file system may lose what was written last when the power fails."""
    monkeypatch.setattr("visualtokens.predict.results.PAUSE", 0)
    with opened(out) as results:
        predict(results, count=3)
        if saved:
            results.finish()
    run = out.with_name("r.jsonl.run.json")
    run.write_bytes(b"")
    with pytest.raises(UserError) as caught, opened(out, top=5):
        pass
    assert str(caught.value) == (
        f"'{run}' is empty, so the options of '{out}' are unknown; save elsewhere, or start again with "
        "--overwrite"
    )
    with opened(out, top=5, overwrite=True) as results:
        assert len(results.todo) == 12


def test_an_empty_file_of_settings_without_results_is_written(out: Path) -> None:
    """A run that was killed before it wrote anything leaves one."""
    out.parent.mkdir()
    run = out.with_name("r.jsonl.run.json")
    run.write_bytes(b"")
    with opened(out) as results:
        predict(results)
        assert results.finish() == Merged(images=12, unreadable=0, missing=0, new=True)
    assert json.loads(run.read_bytes()) == SETTINGS


# Several processes.


def test_a_process_waits_for_settings_but_not_for_the_end_of_the_one_that_writes_them(out: Path) -> None:
    """Both found an empty file; the other was the first to write it, and keeps its lock while it predicts."""
    out.parent.mkdir()
    with out.with_name("r.jsonl.run.json").open("w+") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        found: list[int] = []

        def predicted_by_this_process() -> None:
            with opened(out, share=(1, 2)) as results:
                found.extend(results.todo.tolist())

        thread = threading.Thread(target=predicted_by_this_process, daemon=True)
        thread.start()
        time.sleep(0.1)
        assert not found
        json.dump(SETTINGS, other)
        other.flush()
        thread.join(timeout=30)
        assert found == list(range(1, 12, 2))


def test_shares_are_merged_by_the_last_process(out: Path) -> None:
    with contextlib.ExitStack() as stack:
        team = [stack.enter_context(opened(out, share=(i, 3))) for i in range(3)]
        assert [each.todo.tolist() for each in team] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
        for each in (team[2], team[0], team[1]):
            predict(each)
        assert team[1].finish() is None
        assert team[2].finish() is None
        assert not out.exists()
        assert team[0].finish() == Merged(images=12, unreadable=0, missing=0, new=True)
    assert held(out) == NAMES
    assert files(out) == ["r.jsonl", "r.jsonl.run.json"]


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_interrupted_runs_gives_every_image_once(out: Path, seed: int) -> None:
    """Runs of different numbers of processes, each of which is killed, stops or ends anywhere."""
    rng = random.Random(seed)
    names = [f"{i}.png" for i in range(40)]
    for _ in range(6):
        size = rng.randint(1, 5)
        with contextlib.ExitStack() as stack:
            team = [stack.enter_context(opened(out, names, share=(i, size))) for i in range(size)]
            for each in team:
                predict(each, count=rng.randint(0, 6), bad=rng.sample(names, 5))
                if rng.random() < 0.3:
                    each._part.write(b'{"image": "torn')
                elif rng.random() < 0.5:
                    each.finish()
        if out.exists():
            assert len(set(held(out))) == len(held(out))
            assert [name for name in names if name in held(out)] == held(out)
    with opened(out, names, share=(0, 1)) as results:
        predict(results)
        merged = results.finish()
    assert merged == Merged(images=40, unreadable=0, missing=0, new=True)
    assert held(out) == names
    assert files(out) == ["r.jsonl", "r.jsonl.run.json"]


def test_a_process_that_starts_after_the_merge_has_nothing_to_do(out: Path) -> None:
    with opened(out, share=(0, 1)) as results:
        predict(results)
        results.finish()
    with opened(out, share=(2, 4)) as results:
        assert len(results.todo) == 0
        assert results.finish() == Merged(images=12, unreadable=0, missing=0, new=False)
    assert files(out) == ["r.jsonl", "r.jsonl.run.json"]


def test_shares_of_machines_with_other_numbers_of_processes(out: Path) -> None:
    """Machine 1 of 2 has two processes, machine 2 has three."""
    shares = [(0, 4), (2, 4), (1, 6), (3, 6), (5, 6)]
    with contextlib.ExitStack() as stack:
        team = [stack.enter_context(opened(out, share=share)) for share in shares]
        assert sorted(i for each in team for i in each.todo.tolist()) == list(range(12))
        for each in team:
            predict(each)
            merged = each.finish()
    assert merged == Merged(images=12, unreadable=0, missing=0, new=True)
    assert held(out) == NAMES


@pytest.mark.parametrize(("first", "second"), [((0, 1), (0, 1)), ((1, 4), (1, 2)), ((0, 1), (2, 3))])
def test_the_same_images_are_predicted_by_one_process(
    out: Path, first: tuple[int, int], second: tuple[int, int]
) -> None:
    with opened(out, share=first):
        for overwrite in (False, True):
            with (
                pytest.raises(UserError, match=r"in use: another process predicts the same images"),
                opened(out, share=second, overwrite=overwrite),
            ):
                pass
    with opened(out, share=second):
        pass


def test_processes_of_a_restart_may_check_an_old_part_at_the_same_time(out: Path) -> None:
    with opened(out) as results:
        predict(results, count=3)
    (old,) = Path(f"{out}.parts").glob("00000-of-00001.jsonl")
    with old.open("rb") as checked_by_another, opened(out, share=(0, 4)) as first:
        fcntl.flock(checked_by_another, fcntl.LOCK_SH)
        with opened(out, share=(1, 4)) as second:
            assert not set(first.todo.tolist()) & set(second.todo.tolist())


def test_missing_shares_keep_the_parts(out: Path) -> None:
    with opened(out, share=(1, 4)) as results:
        predict(results)
        assert results.finish() == Merged(images=3, unreadable=0, missing=9, new=True)
    assert held(out) == NAMES[1::4]
    assert os.listdir(out.with_name("r.jsonl.parts")) == ["00001-of-00004.jsonl"]


def test_a_file_system_without_locks(
    out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("visualtokens.predict.results.fcntl", None)
    with opened(out) as results:
        predict(results)
        assert results.finish() == Merged(images=12, unreadable=0, missing=0, new=True)
    assert held(out) == NAMES
    assert "cannot lock the results" in caplog.text


@pytest.mark.parametrize("name", ["csv", "parquet"])
def test_tables_are_merged_and_continued(tmp_path: Path, name: str) -> None:
    if name == "parquet":
        pytest.importorskip("pyarrow")
    form, out = make_format(name, lambda: {"label": str, "score": float}), tmp_path / "r"

    def go(count: int) -> Merged | None:
        with Results(out, form, images(), settings=SETTINGS) as results:
            for position in results.todo[:count].tolist():
                rows = [[str(k), 0.5] for k in range(position % 3)]
                results.add({"image": NAMES[position], "rows": rows})
            return results.finish()

    assert go(5) == Merged(images=5, unreadable=0, missing=7, new=True)
    assert go(99) == Merged(images=12, unreadable=0, missing=0, new=True)
    read = list(form.read(out))
    assert [record["image"] for record in read] == NAMES
    assert [len(record["rows"]) for record in read] == [i % 3 for i in range(12)]


def test_text_is_continued_from_its_parts(tmp_path: Path) -> None:
    form, out = make_format("text", lambda: {}), tmp_path / "r.txt"
    for names, count, expected in (
        (NAMES[2:], 4, NAMES[2:6]),
        (NAMES[2:], 99, NAMES[2:]),
        (NAMES, 1, [NAMES[0], *NAMES[2:]]),
        (NAMES, 2, NAMES),
    ):
        with Results(out, form, images(names), settings=SETTINGS) as results:
            for position in results.todo[:count].tolist():
                results.add({"image": names[position], "text": names[position]})
            merged = results.finish()
        assert merged == Merged(len(expected), unreadable=0, missing=len(names) - len(expected), new=True)
        assert out.read_text().split() == expected
    with Results(out, form, images(), settings=SETTINGS) as results:
        assert results.finish() == Merged(images=12, unreadable=0, missing=0, new=False)
