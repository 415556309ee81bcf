from __future__ import annotations

import math
import os
import re
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from visualtokens.errors import UserError
from visualtokens.explain import Origin
from visualtokens.report import (
    HEIGHT,
    MAX_CLASSES,
    WIDTH,
    Line,
    Report,
    Sample,
    confusion,
    line_chart,
    report_page,
    write_report,
)

from .cli.processes import files_limited_to
from .explain.stubs import Page, check_self_contained, explanation

INJECTION = '<b>"bold" & \'co\'</b><script src="https://x.org/x.js">'


def full_report(name: str) -> Report:
    return Report(
        title=f"A report on {name}",
        summary=[("Accuracy", "97.5 %", f"of {name}"), (name, name, name)],
        history=[
            dict(epoch=e, loss=2 / e, train_accuracy=1 - 0.5 / e, accuracy=0.9 - 0.5 / e) for e in range(1, 6)
        ],
        confusion=np.array([[9, 1, 0], [0, 7, 0], [0, 2, 8]]),
        classes=("zero", name, "two"),
        samples=[Sample(explanation(), 1, f"{name}.jpg"), Sample(explanation(), 2)],
        notes=[f"About {name}."],
        command=f"vtok demo --x={name}",
    )


def test_a_report_is_self_contained_and_escaped(tmp_path: Path) -> None:
    text = write_report(tmp_path / "new" / "r.html", full_report(INJECTION)).read_text(encoding="utf-8")
    page = check_self_contained(text)
    # a probability and three changes per sample, and the true class of the second, which is wrong
    assert text.count("<b>") == text.count("</b>") == 2 * 4 + 1
    shown = "".join(page.text)
    assert shown.count(INJECTION) >= 9  # title, headline, summary, matrix (twice), predictions, note, command
    assert f"{INJECTION}.jpg, predicted as {INJECTION}" in [img["alt"] for img in page.find("img")]
    assert len(page.find("img")) == 2 * (1 + 3)
    assert len(page.find("svg")) == 2
    headings = page.find("h2")
    assert len(headings) == 5
    assert len([a for a in page.find("p") if a.get("class") == "intro"]) == len(headings)
    assert "✓ correct" in shown
    assert "✗ true class: two 0.10" in shown


def test_control_characters_and_names_that_are_not_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9\x1b[2J") + "\u202e"
    text = write_report(tmp_path / "r.html", full_report(name)).read_text(encoding="utf-8")
    check_self_contained(text)
    assert text.count(r"caf\xe9\x1b[2J\u202e") >= 9


def test_a_failed_report_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "r.html").write_text("old")
    with files_limited_to(1000), pytest.raises(OSError, match="File too large"):
        write_report(tmp_path / "r.html", full_report("x"))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("r.html", "old")]


def test_class_names_of_the_explanation_take_precedence() -> None:
    sample = Sample(explanation(classes=("x", "own name", "z"), shown=1))
    text = report_page(Report("t", classes=("a", "report name", "c"), samples=[sample]))
    assert "own name" in text
    assert "report name" not in text


def test_the_footer_names_model_checkpoint_and_date() -> None:
    origin = Origin(model="paca_vit_nano", checkpoint="run_<1>", date=date(2031, 2, 3))
    page = Page(report_page(Report("t", origin=origin)))
    text = "".join(page.text).split("\n")
    assert [line for line in text if line and line != "t"] == [
        "Model paca_vit_nano",
        "Checkpoint run_<1>",
        "2031-02-03",
    ]
    assert page.find("time") == [{"datetime": "2031-02-03"}]


def test_empty_parts_are_left_out() -> None:
    page = Page(report_page(Report("Only a title")))
    assert "".join(page.text).split() == ["Only", "a", "title", "Only", "a", "title"]


# Learning curves.


def curves(svg: str) -> list[list[tuple[float, ...]]]:
    return [
        [tuple(map(float, p.split(","))) for p in points.split()]
        for points in re.findall(r'points="([^"]*)"', svg)
    ]


def labels(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)  # fails unless well-formed
    return ["".join(t.itertext()) for t in root.iter("text")]


def test_points_are_to_scale() -> None:
    values = [2.0, 1.0, 0.5, 0.0]
    [points] = curves(line_chart("Loss", [Line("training", "main", list(enumerate(values)))]))
    xs, ys = zip(*points, strict=True)
    assert np.allclose(np.diff(xs), xs[1] - xs[0], atol=0.11)
    heights = np.array(ys[-1]) - np.array(ys)
    assert np.allclose(heights / heights[0], np.array(values) / 2, atol=0.01)


@pytest.mark.parametrize("values", [[0.1], [0.0, 0.0], [0.999, 1.0], [0.2, 0.9, 0.95]])
@pytest.mark.parametrize("percent", [True, False])
def test_charts_stay_inside_the_viewport(values: list[float], percent: bool) -> None:
    lines = [Line("a", "main", list(enumerate(values))), Line("b", "second", list(enumerate(values)))]
    svg = line_chart("x", lines, percent=percent)
    for points in curves(svg):
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    for x, y in re.findall(r'<text[^>]* x="([\d.-]+)" y="([\d.-]+)"', svg):
        assert 0 <= float(x) <= WIDTH
        assert 8 <= float(y) <= HEIGHT
    if percent:
        assert "100%" in labels(svg)
        assert not any(label.startswith(("110", "102", "105")) for label in labels(svg))


def test_end_labels_do_not_overlap() -> None:
    lines = [Line(name, "main", [(1, 0.5), (2, 0.0)]) for name in ("a", "b", "c")]
    svg = line_chart("x", lines)
    heights = sorted(float(y) for y in re.findall(r'class="end-main" x="\d+" y="([\d.]+)"', svg))
    assert min(np.diff(heights)) >= 33.9
    assert heights[-1] <= HEIGHT - 16


def test_epoch_ticks_are_integers() -> None:
    svg = line_chart("x", [Line("a", "main", [(1, 1.0), (2, 0.5), (3, 0.2)])])
    assert re.findall(r'text-anchor="middle">([^<]*)<', svg) == ["1", "2", "3"]


def test_missing_and_non_finite_values_are_left_out() -> None:
    history = [
        dict(epoch=1, loss=math.nan, accuracy=0.5),
        dict(epoch=2, loss=1.0, train_accuracy=math.inf),
        dict(epoch=3, accuracy=0.7),
    ]
    text = report_page(Report("t", history=history))
    Page(text)
    assert [len(points) for points in curves(text)] == [1, 2]
    assert "nan" not in text[text.index("<svg") :]
    assert line_chart("x", [Line("b", "second", [(1, math.inf)])]) == ""


# Confusion matrices.


def test_matrix_shows_every_count_and_marks_errors() -> None:
    html = confusion(np.array([[5, 1, 0], [0, 8, 0], [0, 0, 0]]), ["a", "b", "c"])
    assert re.findall(r'class="hit"[^>]*>(\d+)<', html) == ["5", "8"]
    assert re.findall(r'class="miss" style="--share: 0.167">(\d+)<', html) == ["1"]
    assert html.count('class="none"') == 6
    assert re.findall(r'<td class="share">([^<]*)<', html) == ["83%", "100%", "–"]
    ElementTree.fromstring(html)


def test_many_classes_become_a_list_of_the_most_frequent_confusions() -> None:
    n = MAX_CLASSES + 5
    counts = np.eye(n, dtype=int) * 10
    names = [f"c{i}" for i in range(n)]
    assert "all predictions are correct" in confusion(counts, names)
    counts[3, 7], counts[7, 3], counts[0, 1] = 5, 2, 10
    rows = re.findall(
        r"<tr><td>(\w+)</td><td>(\w+)</td><td[^>]*>(\d+)</td><td[^>]*>(\d+)%</td>", confusion(counts, names)
    )
    assert rows == [("c0", "c1", "10", "50"), ("c3", "c7", "5", "33"), ("c7", "c3", "2", "17")]


def test_confusion_must_match_the_classes() -> None:
    with pytest.raises(UserError, match=r"shape \(2, 2\).*3 classes"):
        confusion(np.eye(2, dtype=int), ["a", "b", "c"])
