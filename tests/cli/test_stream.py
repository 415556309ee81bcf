"""Results as they come: streamed output, and signals in the middle of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from visualtokens.cli.stream import print_stream, unique_names
from visualtokens.cli.verb import Predicted, Stream
from visualtokens.predict.formats import JsonLines, Text
from visualtokens.tasks import Checkpoint, Prediction
from visualtokens.tasks.classify.task import Classify

from .processes import start

Vtok = Callable[..., tuple[int, str, str]]
MANY = 5000  # their results fill the pipe, so that the process cannot end before they are read


def interrupt(process: subprocess.Popen[str], number: int) -> tuple[int, str, str]:
    """Send the signal after the first line of output; return the exit code, stdout and stderr."""
    assert process.stdout is not None
    assert process.stderr is not None
    first = process.stdout.readline()
    process.send_signal(number)
    out, err = first + process.stdout.read(), process.stderr.read()
    return process.wait(timeout=300), out, err


def test_ctrl_c_keeps_the_results_so_far(checkpoint: Path, folder: Path) -> None:
    process = start("predict", *[folder / "0.png"] * MANY, "--checkpoint", checkpoint, "--top", "1")
    code, out, err = interrupt(process, signal.SIGINT)
    done = out.count(f"{folder / '0.png'}\n")
    assert 0 < done < MANY
    assert len(out.splitlines()) == 2 * done, "every result is whole"
    assert code == 130
    assert err.splitlines()[4:] == [f"interrupted after {done} of {MANY:,} images"]


def test_terminated_json_is_closed(checkpoint: Path, folder: Path) -> None:
    images = [folder / "broken.png", *[folder / "0.png"] * MANY]
    process = start("predict", *images, "--checkpoint", checkpoint, "--json")
    code, out, err = interrupt(process, signal.SIGTERM)
    document = json.loads(out)
    done = 1 + len(document["predictions"])
    assert 1 < done < MANY
    assert document["interrupted"] is True
    assert [Path(bad["path"]).name for bad in document["unreadable"]] == ["broken.png"]
    assert code == 143
    assert err.endswith(f"interrupted after {done} of {MANY + 1:,} images\n")


@pytest.mark.parametrize("images", [("0.png", "broken.png", "1.png"), ("0.png",), ("broken.png",)])
def test_complete_json_is_one_indented_document(
    vtok: Vtok, checkpoint: Path, folder: Path, images: tuple[str, ...]
) -> None:
    code, out, _ = vtok("predict", *[folder / name for name in images], "--checkpoint", checkpoint, "--json")
    document = json.loads(out)
    assert out == json.dumps(document, indent=2) + "\n"
    assert list(document) == ["predictions", "unreadable"]
    assert len(document["predictions"]) + len(document["unreadable"]) == len(images)
    assert code == int("broken.png" in images)


def test_json_is_closed_when_an_image_fails(
    vtok: Vtok, checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict, calls = Classify.predict_batch, iter(range(9))

    def fail_later(self: Classify, *arguments: Any, **options: Any) -> object:
        if next(calls) == 1:
            raise OSError("no space left")
        return predict(self, *arguments, **options)

    monkeypatch.setattr(Classify, "predict_batch", fail_later)
    images = [folder / "0.png"] * 5
    code, out, err = vtok("predict", *images, "--checkpoint", checkpoint, "--json", "--batch", "2")
    document = json.loads(out)
    assert (code, err) == (2, "error: no space left\n")
    assert len(document["predictions"]) == 2
    assert document["interrupted"] is True


class Nothing(Prediction):
    """A prediction that can be counted."""

    def to_dict(self) -> dict[str, Any]:
        return {}

    def text(self) -> str:
        return "nothing"


@pytest.mark.parametrize("as_json", [False, True])
def test_no_result_is_kept(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    alive: weakref.WeakSet[Nothing] = weakref.WeakSet()
    most = 0

    def results() -> Iterator[Predicted]:
        nonlocal most
        for i in range(20):
            prediction = Nothing()
            alive.add(prediction)
            most = max(most, len(alive))
            yield Predicted(str(i), prediction, {})

    assert print_stream(Stream(lambda stop: results(), 20, Text()), as_json=as_json) == 0
    assert most <= 2
    printed = capsys.readouterr().out
    assert printed.startswith("0\nnothing\n1\nnothing\n") or as_json


def test_a_format_and_one_document_exclude_each_other(
    vtok: Vtok, checkpoint: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("predict", folder / "0.png", "--checkpoint", checkpoint, "--json", "--format", "jsonl")
    code, out, err = vtok(*given)
    assert (code, out) == (2, "")
    assert err.startswith("error: --json prints one document, --format one result after the other")
    assert print_stream(Stream(lambda stop: (), 0, JsonLines(), True), as_json=False) == 0


def test_interrupted_explanations_are_on_the_page(
    vtok: Vtok, checkpoint: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    for i in range(5):
        (tmp_path / "photos" / f"{i}.png").write_bytes((folder / "0.png").read_bytes())
    explain = Checkpoint.explain

    def explain_and_signal(*arguments: object, **options: object) -> object:
        if len(seen) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        seen.append(1)
        return explain(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Checkpoint, "explain", explain_and_signal)
    given = ("explain", tmp_path / "photos", "--checkpoint", checkpoint, "--save", tmp_path / "x.html")
    for as_json in ((), ("--json",)):
        seen: list[int] = []
        code, out, err = vtok(*given, *as_json)
        assert (code, err) == (130, "interrupted after 2 of 5 files\n")
    assert json.loads(out)["interrupted"] is True
    assert len(json.loads(out)["explained"]) == 2
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert page.count('<article class="sample regions">') == 2
    assert "the run was interrupted" in page


def test_names_of_output_files_are_unique() -> None:
    images = ["a/x.png", "b/x.png", "x_2.png", "c/x.jpg", "y.png"]
    assert list(unique_names(images)) == ["x", "x_2", "x_2_2", "x_3", "y"]
