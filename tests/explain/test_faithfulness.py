from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from visualtokens.errors import UserError
from visualtokens.explain import Faithfulness, Judge, Score, Setting, gather
from visualtokens.explain.faithfulness import HEADER, Mean, area

from .stubs import OneRegion, preprocess, quarters

SETTING = Setting(preprocess(32, 32), batch=8)
REGION = slice(8, 16), slice(16, 24)


def one_region() -> OneRegion:
    return OneRegion(quarters(4, 4), *REGION)


def mask() -> np.ndarray:
    out = np.zeros((32, 32), dtype=np.int8)
    out[REGION] = 1
    return out


def test_the_region_that_decides_is_found_and_random_maps_are_worse() -> None:
    judge = Judge(one_region(), SETTING, methods=["clusters", "random"], steps=16)
    scores = judge(torch.ones(3, 32, 32), mask())
    ours, random = scores["clusters"], scores["random"]
    assert ours.pointing == 1
    assert ours.auroc == pytest.approx(1, abs=0.02)
    # The region is 1/16 of the image, so it is all grey soon, and the probability as low as it goes.
    lowest = ours.deletion.min()
    assert area(ours.deletion) - lowest < 0.1 * (area(random.deletion) - lowest)
    assert ours.deletion[0] == pytest.approx(ours.insertion[-1], abs=1e-6)  # the whole image, both times


def test_without_a_mask_there_is_no_pointing() -> None:
    score = Judge(one_region(), SETTING, methods=["random"], steps=2)(torch.ones(3, 32, 32))["random"]
    assert score.pointing is None
    assert score.auroc is None
    assert gather([{"random": score}]).rows()[0][3:] == ("–", "–")


def test_the_predicted_class_is_judged() -> None:
    """On a black image the model says class 0, whose probability rises as the region stays dark."""
    dark = torch.full((3, 32, 32), -2.0)
    curve = Judge(one_region(), SETTING, methods=["random"], steps=4)(dark)["random"].deletion
    assert curve[0] > 0.8
    assert curve[-1] < curve[0]


def scores(values: list[float]) -> list[dict[str, Score]]:
    return [{"clusters": Score(np.full(3, v), np.full(3, 1 - v), v, math.nan)} for v in values]


def test_means_and_standard_errors() -> None:
    values = [0.1, 0.4, 0.7, 0.6]
    found = gather(scores(values))
    means = found.means("clusters")
    assert found.images == 4
    assert means["deletion"].value == pytest.approx(np.mean(values))
    assert means["deletion"].error == pytest.approx(np.std(values, ddof=1) / 2)
    assert means["insertion"].value == pytest.approx(1 - np.mean(values))
    assert means["auroc"].images == 0
    assert found.curve("clusters", "insertion").tolist() == pytest.approx([1 - np.mean(values)] * 3)
    assert str(Mean(0.5, 0.01, 9)) == "0.500 ± 0.010"
    assert str(Mean.of([0.25])) == "0.250"
    assert str(Mean.of([])) == "–"


def test_a_row_for_each_method_and_json() -> None:
    found = gather(scores([0.2, 0.3]))
    assert [len(row) for row in found.rows()] == [len(HEADER)]
    document = json.loads(json.dumps(found.to_dict()))
    assert document["clusters"]["pointing"]["mean"] == pytest.approx(0.25)
    assert document["clusters"]["deletion_curve"] == pytest.approx([0.25] * 3)


def test_scores_survive_json() -> None:
    before = Score(np.array([0.5, 0.25]), np.array([0.1, 0.9]), 1.0, None)
    after = Score.from_dict(json.loads(json.dumps(before.to_dict())))
    assert after.deletion.tolist() == [0.5, 0.25]
    assert after.insertion.tolist() == [0.1, 0.9]
    assert (after.pointing, after.auroc) == (1.0, None)


def test_curves_are_drawn_for_every_method(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    methods = ("clusters", "grad-cam", "integrated gradients", "rollout", "random")
    found = Faithfulness({name: [Score(rng.random(9), rng.random(9))] for name in methods})
    figure = found.plot()
    for ax, which in zip(figure.axes, ("deletion", "insertion"), strict=True):
        assert len(ax.lines) == 5
        for line, name in zip(ax.lines, methods, strict=True):
            assert line.get_ydata().tolist() == found.curve(name, which).tolist()
            assert line.get_label() == f"{name} {found.means(name)[which].value:.3f}"
        assert (
            len({(line.get_linestyle(), line.get_marker()) for line in ax.lines}) == 5
        )  # without colours too
    figure.savefig(tmp_path / "x.png")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(methods=[]), "no methods"),
        (dict(methods=["lime"]), "unknown method 'lime'"),
        (dict(steps=0), "steps=0"),
    ],
)
def test_errors(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Judge(one_region(), SETTING, **options)
