"""Results and printed output of the verbs."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from visualtokens.cli import models
from visualtokens.cli.verb import Result, Verb
from visualtokens.data import Batch
from visualtokens.explain.importance import TIE
from visualtokens.train.step import Learner, StepResult

Vtok = Callable[..., tuple[int, str, str]]


def test_exit_code_contains_the_signal(
    vtok: Vtok, monkeypatch: pytest.MonkeyPatch, data: str, tmp_path: Path
) -> None:
    learn = Learner.learn

    def learn_and_signal(self: Learner[Batch], batch: Batch, counts: Sequence[int]) -> StepResult:
        os.kill(os.getpid(), signal.SIGTERM)
        return learn(self, batch, counts)

    monkeypatch.setattr(Learner, "learn", learn_and_signal)
    options = ("--model", "paca_vit_nano", "--data", data, "--out", tmp_path / "run", "--batch", "32")
    code, text, _ = vtok("train", *options)
    assert code == 143
    assert "not evaluated yet after 0 of 10 epochs" in text
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_eval_lists_the_weakest_classes(vtok: Vtok, checkpoint: Path, data: str) -> None:
    code, text, err = vtok("eval", "--checkpoint", checkpoint, "--data", data, "--batch", "7")
    assert (code, err) == (0, "")
    head, _, header, *rows = text.splitlines()
    found = re.fullmatch(r"accuracy (\d+\.\d)% \((\d+) of 30 images\), loss \d+\.\d{3}", head)
    assert found, head
    assert float(found[1]) == pytest.approx(100 * int(found[2]) / 30, abs=0.05)
    assert header.split() == ["class", "images", "right", "mistaken", "for"]
    shares = [float(row.split()[2].rstrip("%")) for row in rows]
    assert shares == sorted(shares)
    assert sum(int(row.split()[1]) for row in rows) == 30


def test_eval_refuses_data_of_other_classes(vtok: Vtok, checkpoint: Path, tmp_path: Path) -> None:
    arrays = dict(x_val=np.zeros((4, 8, 8, 3), np.uint8), y_val=np.array([0, 1, 0, 1]))
    np.savez(tmp_path / "x.npz", **arrays, classes=["a", "b"])
    code, _, err = vtok("eval", "--checkpoint", checkpoint, "--data", f"npz:{tmp_path / 'x.npz'}")
    assert code == 2
    assert "has 2 classes (a, b), but" in err


def test_eval_reports_unreadable_images(vtok: Vtok, checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    picture = (folder / "0.png").read_bytes()
    for split in ("train", "val"):
        for digit in range(10):
            (tmp_path / split / str(digit)).mkdir(parents=True)
            (tmp_path / split / str(digit) / "good.png").write_bytes(picture)
    (tmp_path / "val" / "3" / "bad.png").write_bytes(b"no picture")
    arguments = ("eval", "--checkpoint", checkpoint, "--data", f"folder:{tmp_path}")
    code, text, err = vtok(*arguments)
    assert code == 0
    assert "of 10 images" in text
    assert str(tmp_path / "val" / "3" / "bad.png") in err
    document = json.loads(vtok(*arguments, "--json")[1])
    assert [Path(bad["path"]).name for bad in document["unreadable"]] == ["bad.png"]


def test_predict_continues_after_a_broken_image(vtok: Vtok, checkpoint: Path, folder: Path) -> None:
    images = (folder / "0.png", folder / "broken.png", folder / "1.png", folder / "nowhere.png")
    code, text, err = vtok("predict", *images, "--checkpoint", checkpoint, "--top", "3")
    assert code == 1
    lines = text.splitlines()
    assert [line for line in lines if line.endswith(".png")] == [str(images[0]), str(images[2])]
    assert len(lines) == 8
    assert "broken.png: not an image" in err
    assert "nowhere.png: no such file" in err


@pytest.mark.parametrize("verb", ["eval", "predict", "explain"])
def test_missing_checkpoint(vtok: Vtok, tmp_path: Path, verb: str) -> None:
    given = {"eval": ["--data", "digits"], "predict": ["x.png"], "explain": ["x.png"]}[verb]
    code, _, err = vtok(verb, *given, "--checkpoint", tmp_path / "nowhere")
    assert code == 2
    assert "does not exist; a checkpoint is a folder with model.safetensors and config.json" in err


def test_explain_saves_a_page(vtok: Vtok, checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "why.html"
    arguments = ("explain", folder / "0.png", "--checkpoint", checkpoint, "--target", "7", "--top", "4")
    code, text, _ = vtok(*arguments, "--save", page)
    assert code == 0
    assert f"saved as {page}" in text
    assert "<html" in page.read_text(encoding="utf-8")
    document = json.loads(vtok(*arguments, "--save", page, "--json")[1])
    assert document["target"] == "7"
    values = [region["value"] for region in document["regions"]]
    assert values == sorted(values, reverse=True)
    assert all(region["error"] >= 0 for region in document["regions"])
    assert document["method"] == "shapley"
    document = json.loads(vtok(*arguments, "--method", "cluster", "--save", page, "--json")[1])
    values = [region["value"] for region in document["regions"]]
    assert len(values) == 16
    assert max(values) - values[0] < TIE  # of tied clusters, the one of lowest entropy is first
    code, _, err = vtok("explain", folder / "broken.png", "--checkpoint", checkpoint)
    assert code == 2
    assert "broken.png: not an image" in err
    code, _, err = vtok("explain", folder / "0.png", "--checkpoint", checkpoint, "--target", "eleven")
    assert code == 2
    assert err.startswith("error: unknown class 'eleven'")


def test_bench_compares(vtok: Vtok) -> None:
    arguments = ("bench", "paca_vit_nano", "--against", "resnet18", "--size", "32x64", "--batch", "1")
    code, text, _ = vtok(*arguments, "--rounds", "3", "--json")
    assert code == 0
    document = json.loads(text)
    assert [row["name"] for row in document["rows"]] == ["paca_vit_nano", "resnet18"]
    assert (document["size"], document["batch"], document["mode"]) == ([32, 64], 1, "eager")


def test_papers_shows_published_beside_computed(vtok: Vtok) -> None:
    code, text, _ = vtok("papers", "paca-vit", "--table", "2")
    assert code == 0
    assert "paca_vit_b0" in text
    document = json.loads(vtok("papers", "paca-vit", "--table", "2", "--json")[1])
    assert {row["paper"] for row in document["rows"]} == {"paca-vit"}


def test_papers_shows_architectures_and_unexplained_differences(vtok: Vtok) -> None:
    assert vtok("papers", "paca-vit", "--table", "2", "--unexplained")[:2] == (0, "\n")
    code, text, _ = vtok("papers", "visual-transformers", "--table", "11")
    assert (code, text.splitlines()[0]) == (0, "visual-transformers, table 11")
    document = json.loads(vtok("papers", "paca-vit", "--table", "1", "--json")[1])
    assert document["architecture"][0].startswith("paca-vit, table 1")


def test_diverging_training_ends_with_one_line_and_code_1(vtok: Vtok, data: str, tmp_path: Path) -> None:
    options = ("--data", data, "--out", tmp_path / "run", "--lr", "1e20", "--warmup_epochs", "0")
    code, out, err = vtok("train", "--model", "paca_vit_nano", *options)
    assert (code, out) == (1, "")
    *skipped, last = err.splitlines()
    assert re.match(r"error: .* (at|after) step \d+\b.*try a lower lr", last)
    assert all(line.startswith("skipped a step: the ") for line in skipped)


def test_numbers_that_are_not_finite_are_null_in_json(vtok: Vtok, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": (float("-inf"), "x", None, 3)}}
    stub = Verb(config=models.ModelsConfig, run=lambda config: Result("", document), example="")
    monkeypatch.setattr(models, "VERB", stub)
    assert json.loads(vtok("models", "--json")[1]) == {
        "a": None,
        "b": [1.5, None],
        "c": {"d": [None, "x", None, 3]},
    }


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ZeroDivisionError("a\nb"), "ZeroDivisionError: a b (VTOK_DEBUG=1 shows the traceback)"),
        (AssertionError(), "AssertionError (VTOK_DEBUG=1 shows the traceback)"),
        (RecursionError("too deep"), "RecursionError: too deep (VTOK_DEBUG=1 shows the traceback)"),
        (MemoryError(), "out of memory; use a smaller batch, image size or model"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            "out of memory (CUDA out of memory. Tried to allocate 2 GiB); use a smaller batch, image size or "
            "model",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unforeseen_errors_end_with_one_line_and_code_1(
    vtok: Vtok, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(config: models.ModelsConfig) -> Result:
        raise error

    monkeypatch.setattr(models, "VERB", Verb(config=models.ModelsConfig, run=fail, example=""))
    monkeypatch.delenv("VTOK_DEBUG", raising=False)
    assert vtok("models") == (1, "", f"error: {message}\n")
    monkeypatch.setenv("VTOK_DEBUG", "1")
    code, out, err = vtok("models")
    assert (code, out) == (1, "")
    assert err.startswith("Traceback (most recent call last):\n")
    assert f"in {fail.__name__}\n" in err
    assert err.endswith(f"\nerror: {message}\n")


def test_interrupt_outside_of_training(vtok: Vtok, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("visualtokens.bench.compare", interrupted)
    assert vtok("bench", "paca_vit_nano") == (130, "", "interrupted\n")
