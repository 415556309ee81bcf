from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from visualtokens.errors import UserError
from visualtokens.report import HEIGHT, MOST_CLASSES, WIDTH, Line, confusion, line_chart


def curves(svg: str) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, p.split(","))) for p in points.split()]
        for points in re.findall(r'points="([^"]*)"', svg)
    ]


def labels(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)  # so it is well-formed too
    return ["".join(t.itertext()) for t in root.iter("text")]


def test_points_are_where_their_values_are() -> None:
    values = [2.0, 1.0, 0.5, 0.0]
    [points] = curves(line_chart("Loss", [Line("training", "main", list(enumerate(values)))]))
    xs, ys = zip(*points, strict=True)
    assert np.allclose(np.diff(xs), xs[1] - xs[0], atol=0.11)
    heights = np.array(ys[-1]) - np.array(ys)
    assert np.allclose(heights / heights[0], np.array(values) / 2, atol=0.01)


@pytest.mark.parametrize(
    "values", [[0.1], [1.0, 1.0], [0.0, 0.0], [0.999, 1.0], [0.2, 0.9, 0.95], [0.97] * 3]
)
@pytest.mark.parametrize("percent", [True, False])
def test_everything_stays_inside_the_picture(values: list[float], percent: bool) -> None:
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


def test_values_that_are_not_finite_are_left_out() -> None:
    lines = [Line("a", "main", [(1, math.nan), (2, 1.0), (3, 0.5)]), Line("b", "second", [(1, math.inf)])]
    svg = line_chart("x", lines)
    assert [len(points) for points in curves(svg)] == [2]
    assert line_chart("x", lines[1:]) == ""


def test_epochs_are_whole_numbers() -> None:
    svg = line_chart("x", [Line("a", "main", [(1, 1.0), (2, 0.5), (3, 0.2)])])
    ticks = re.findall(r'text-anchor="middle">([^<]*)<', svg)
    assert ticks == ["1", "2", "3"]


def test_matrix_shows_every_count_and_marks_the_wrong_ones() -> None:
    html = confusion(np.array([[5, 1, 0], [0, 8, 0], [0, 0, 0]]), ["a", "b", "c"])
    assert re.findall(r'class="hit"[^>]*>(\d+)<', html) == ["5", "8"]
    assert re.findall(r'class="miss" style="--share: 0.167">(\d+)<', html) == ["1"]
    assert html.count('class="none"') == 6
    assert re.findall(r'<td class="share">([^<]*)<', html) == ["83%", "100%", "–"]
    ElementTree.fromstring(html)


def test_many_classes_become_a_list_of_the_commonest_confusions() -> None:
    n = MOST_CLASSES + 5
    counts = np.eye(n, dtype=int) * 10
    counts[3, 7], counts[7, 3], counts[0, 1] = 5, 2, 10
    html = confusion(counts, [f"c{i}" for i in range(n)])
    rows = re.findall(r"<tr><td>(\w+)</td><td>(\w+)</td><td[^>]*>(\d+)</td><td[^>]*>(\d+)%</td>", html)
    assert rows == [("c0", "c1", "10", "50"), ("c3", "c7", "5", "33"), ("c7", "c3", "2", "17")]


def test_many_classes_without_any_confusion() -> None:
    n = MOST_CLASSES + 1
    assert "every image was named rightly" in confusion(np.eye(n, dtype=int), [str(i) for i in range(n)])


def test_confusion_must_match_the_classes() -> None:
    with pytest.raises(UserError, match=r"shape \(2, 2\).*3 classes"):
        confusion(np.eye(2, dtype=int), ["a", "b", "c"])
