"""What the studio computes, without a server: equal to the library, cached, and in words."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import visualtokens
from tests.studio.conftest import CLASSES
from visualtokens.cli.app import VERBS
from visualtokens.cli.parse import parse
from visualtokens.cli.reduce import VERB
from visualtokens.errors import UserError
from visualtokens.studio import parts
from visualtokens.studio.workbench import (
    NOTHING_TO_REDUCE,
    Cache,
    Photo,
    Point,
    Setting,
    Source,
    Workbench,
    change,
)
from visualtokens.tasks.prediction import Classification


@pytest.fixture(scope="module")
def bench(checkpoints: list[Path]) -> Workbench:
    return Workbench({folder.name: visualtokens.load(folder) for folder in checkpoints})


@pytest.fixture(scope="module")
def photo() -> Photo:
    coarse = np.random.default_rng(3).integers(256, size=(6, 6, 3), dtype=np.uint8)
    return Photo.of(Image.fromarray(coarse).resize((120, 80), Image.Resampling.BICUBIC))


def probabilities(found: Classification) -> np.ndarray:
    return np.asarray(found.probabilities)


def test_answers_are_those_of_the_library(bench: Workbench, photo: Photo, checkpoints: list[Path]) -> None:
    setting = bench.setting("vit", "merge", macs=0.6)
    checkpoint = visualtokens.load(checkpoints[0])
    assert np.array_equal(
        probabilities(bench.answer("vit", photo)), probabilities(checkpoint.predict(photo.image))
    )
    visualtokens.reduce(checkpoint.model, "merge", keep=setting.keep)
    expected = probabilities(checkpoint.predict(photo.image))
    assert np.array_equal(probabilities(bench.answer("vit", photo, setting)), expected)
    assert bench.share("vit", setting) <= 0.6
    assert bench.share("vit", None) == 1


def test_tokens_of_every_kind_of_model(bench: Workbench, photo: Photo) -> None:
    paca = bench.tokens("paca", photo)
    assert paca.layers
    assert not paca.note
    plain = bench.tokens("vit", photo)
    assert "keeps every patch" in plain.note
    reduced = bench.tokens("vit", photo, bench.setting("vit", "weighted_merge", keep=0.5))
    for tokens in (plain, reduced):
        counts = [layer.tokens for layer in tokens.layers]
        assert counts == sorted(counts, reverse=True)
        assert counts[-1] > 0


def test_regions_with_and_without(bench: Workbench, photo: Photo) -> None:
    explanation = bench.why("paca", photo, budget=64)
    assert explanation.only is not None
    assert explanation.without is not None
    only, without = bench.variants("paca", photo, explanation, explanation.only.kept)
    assert only.score == pytest.approx(explanation.only.score, abs=1e-5)
    assert without.score == pytest.approx(explanation.without.score, abs=1e-5)
    everything, nothing = bench.variants("paca", photo, explanation, range(len(explanation.order)))
    assert everything.score == pytest.approx(explanation.full, abs=1e-5)
    assert nothing.score == pytest.approx(explanation.empty, abs=1e-5)
    with pytest.raises(UserError, match="region 99 does not exist"):
        bench.variants("paca", photo, explanation, [99])


def test_the_curve_starts_at_the_whole_model(bench: Workbench, photo: Photo) -> None:
    points = bench.curve("vit", photo, "weighted_merge")
    assert points[0].share == 1
    assert points[0].probability == bench.answer("vit", photo).top[0][1]
    assert [point.share for point in points] == sorted((point.share for point in points), reverse=True)
    assert bench.speedup_share("vit", "weighted_merge", 1.0) == 1
    drawn = parts.curve(points, points[2], label="a < b")
    root = ElementTree.fromstring(drawn)
    assert len([e for e in root if e.tag == "circle"]) == len(points) + 1


def test_why_a_model_cannot_be_reduced(bench: Workbench, photo: Photo) -> None:
    assert bench.reducible("vit") is None
    assert bench.reducible("paca") == NOTHING_TO_REDUCE
    with pytest.raises(UserError):
        bench.answer("paca", photo, Setting("merge", (1,)))
    with pytest.raises(UserError, match="unknown model 'vti'; did you mean 'vit'"):
        bench.answer("vti", photo)


def test_the_code_to_copy_does_the_same(
    bench: Workbench, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = bench.setting("vit", "kmeans", macs=0.5)
    source = Source(str(checkpoints[0]), True)
    names: dict[str, object] = {}
    exec(parts.python_lines(source, setting, 0.5), names)
    assert visualtokens.reduce.macs(names["model"]).total == bench.macs("vit", setting)  # type: ignore[arg-type]
    line = parts.command(source, setting, bench.share("vit", setting))
    program, verb, *arguments = line.split()
    assert (program, verb) == ("vtok", "reduce")
    config, _ = parse("reduce", VERBS["reduce"], VERB, arguments)
    assert config.method == "kmeans"
    again = bench.setting("vit", config.method, macs=config.macs + 1e-3)
    assert again == setting


def test_names_are_text_not_html() -> None:
    shown = parts.answer(Classification(np.eye(6, dtype=np.float32)[3], CLASSES))
    assert "<b>3</b>" not in shown
    assert "class &lt;b&gt;3&lt;/b&gt;" in shown


def test_changes_in_words() -> None:
    def of(*values: float) -> Classification:
        return Classification(np.array(values, dtype=np.float32), ["cat", "dog"])

    assert change(of(0.9, 0.1), of(0.2, 0.8)) == "The answer changed from “cat” (90%) to “dog” (80%)."
    assert change(of(0.9, 0.1), of(0.8, 0.2)) == (
        "The answer is still “cat”: 90% before, 80% now (10.0% of the probability moved)."
    )


def test_the_cache_is_bounded(bench: Workbench, photo: Photo) -> None:
    cache, computed = Cache(entries=2), []

    def compute(value: int) -> int:
        computed.append(value)
        return value

    for value in (1, 2, 1, 3, 1, 2):
        assert cache((value,), lambda value=value: compute(value)) == value
    assert computed == [1, 2, 3, 2]  # the oldest makes room
    explanation = bench.why("paca", photo, budget=64)
    small = Cache(pixels=photo.image.width * photo.image.height)
    for value in range(3):
        small((value,), lambda: explanation)
    assert len(small) == 1


def test_a_curve_of_one_point() -> None:
    root = ElementTree.fromstring(parts.curve([Point(1, 0.5)], Point(1, 0.5), label="one point"))
    assert [text.text for text in root.iter("text")][:2] == ["you are here", "100%"]


def test_only_classifiers() -> None:
    class Task:
        name = "detect"

    class Detector:
        task = Task()

    with pytest.raises(UserError, match="'d' is a model for the task 'detect'; the studio shows classifiers"):
        Workbench({"d": Detector()})  # type: ignore[dict-item]
