"""The page of a training run: learning curves, confusion matrix and explained samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from visualtokens.errors import UserError
from visualtokens.explain import html
from visualtokens.explain.cards import card, how_to_read, key
from visualtokens.explain.explanation import Explanation

CURVES = (
    "One point per epoch. The loss should fall and the accuracy rise; a training accuracy far above the "
    "validation accuracy is overfitting."
)
MATRIX = (
    "Rows are true classes, columns are predictions. Correct predictions are on the blue diagonal; an orange "
    "number counts images of the row's class predicted as the column's."
)
COMMON_CONFUSIONS = "The pairs of classes that the model confuses most often."

Point = tuple[float, float]
WIDTH, HEIGHT = 410, 230  # of a chart
LEFT, RIGHT, TOP, BOTTOM = 48, 82, 12, 30  # margins for the labels
MAX_CLASSES = 20  # a larger matrix is unreadable and becomes a list of the most frequent confusions


@dataclass(frozen=True)
class Sample:
    """An explained image with its true class, if known, and its name."""

    explanation: Explanation
    truth: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Report:
    """The contents of a report; empty parts are left out.

    ``history`` has one mapping per epoch: ``epoch``, ``loss``, ``train_accuracy`` and ``accuracy``, the
    accuracies from 0 to 1. ``confusion`` counts images; rows are true classes.
    """

    title: str
    summary: Sequence[html.KeyFigure] = ()
    history: Sequence[Mapping[str, float]] = ()
    confusion: ArrayLike | None = None  # (classes, classes)
    classes: Sequence[str] = ()
    samples: Sequence[Sample] = ()
    notes: Sequence[str] = ()
    command: str = ""
    origin: html.Origin | None = None  # for the footer


def write_report(path: str | Path, report: Report) -> Path:
    """Write the report as one self-contained HTML file."""
    return html.write_page(path, report_page(report))


def report_page(report: Report) -> str:
    """The HTML document of a report."""
    body = [html.header(report.title, report.summary)]
    if report.history:
        body.append(html.section("Learning curves", CURVES, _learning_curves(report.history)))
    if report.confusion is not None:
        table = confusion(np.asarray(report.confusion), report.classes)
        if len(report.classes) <= MAX_CLASSES:
            body.append(html.section("Confusion matrix", MATRIX, table))
        else:
            body.append(html.section("Most frequent confusions", COMMON_CONFUSIONS, table))
    if report.samples:
        cards = "".join(_card(sample, report.classes) for sample in report.samples)
        first = report.samples[0].explanation
        body.append(html.section("Which regions matter", how_to_read(first), key(first) + cards))
    if report.notes:
        body.append(html.section("Notes", "About the data and the method.", html.notes(report.notes)))
    if report.command:
        intro = "The command that wrote this report."
        body.append(html.section("Reproduce", intro, html.command(report.command)))
    return html.page(report.title, body, origin=report.origin)


def _card(sample: Sample, classes: Sequence[str]) -> str:
    """A sample's card; the explanation's own class names and true class take precedence."""
    explanation = sample.explanation
    if explanation.classes is None and classes:
        explanation = replace(explanation, classes=tuple(classes))
    if explanation.truth is None:
        explanation = replace(explanation, truth=sample.truth)
    return card(explanation, name=sample.name)


# Learning curves as inline SVG.


@dataclass(frozen=True)
class Line:
    """One curve; ``style`` is "main" (solid) or "second" (dotted, to differ in greyscale print)."""

    name: str
    style: str
    points: Sequence[Point]  # (epoch, value)


@dataclass(frozen=True)
class _Axes:
    """The data range of a chart: the first and last epoch, and the ticks of the values."""

    epochs: tuple[float, float]
    ticks: list[float]

    def to_svg(self, point: Point) -> Point:
        """The SVG coordinates of a data point."""
        first, last = self.epochs
        x = (point[0] - first) / ((last - first) or 1)
        y = (point[1] - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])
        return LEFT + x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)


def _learning_curves(history: Sequence[Mapping[str, float]]) -> str:
    def line(name: str, style: str, key: str) -> Line:
        rows = [row for row in history if row.get(key) is not None]
        return Line(name, style, [(float(row["epoch"]), float(row[key])) for row in rows])

    loss = line_chart("Training loss", [line("training", "main", "loss")])
    accuracy = line_chart(
        "Accuracy",
        [line("training", "second", "train_accuracy"), line("validation", "main", "accuracy")],
        percent=True,
    )
    return f'<div class="panels">\n{loss}{accuracy}</div>\n'


def line_chart(title: str, lines: Sequence[Line], *, percent: bool = False) -> str:
    """The curves over the epochs, labelled at their ends; empty if no line has a finite value.

    The value axis starts at 0, or with ``percent`` ends at 1.
    """
    lines = [Line(c.name, c.style, [p for p in c.points if math.isfinite(p[1])]) for c in lines]
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    epochs = [x for line in lines for x, _ in line.points]
    values = [y for line in lines for _, y in line.points]
    ticks = _ticks(min(*values, 0.9), 1.0, count=4) if percent else _ticks(0.0, max(values) or 1.0, count=4)
    axes = _Axes((min(epochs), max(epochs)), ticks)
    curves = [_curve([axes.to_svg(p) for p in line.points], line.style) for line in lines]
    finals = [_format(line.points[-1][1], percent) for line in lines]
    heights = _spread([axes.to_svg(line.points[-1])[1] for line in lines], gap=34)
    labels = [_end_label(*end) for end in zip(heights, lines, finals, strict=True)]
    summary = "; ".join(f"{line.name} ends at {final}" for line, final in zip(lines, finals, strict=True))
    return (
        f"<figure><h3>{escape(title)}</h3>\n"
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(summary)}">\n'
        f"{_draw_axes(axes, percent)}{''.join(curves + labels)}</svg></figure>\n"
    )


def _ticks(low: float, high: float, *, count: int, integer: bool = False) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    locator = MaxNLocator(nbins=count, steps=[1, 2, 2.5, 5, 10], integer=integer)
    return [float(tick) for tick in locator.tick_values(low, high)]


def _draw_axes(axes: _Axes, percent: bool) -> str:
    first, last = axes.epochs
    marks = [_y_tick(axes.to_svg((first, tick))[1], _format(tick, percent)) for tick in axes.ticks]
    epochs = [first] if first == last else _ticks(first, last, count=6, integer=True)
    marks += [_x_tick(axes.to_svg((tick, 0))[0], f"{tick:g}") for tick in epochs if first <= tick <= last]
    marks.append(f'<text class="tick" x="{WIDTH - RIGHT + 20}" y="{HEIGHT - 8}">epoch</text>\n')
    return "".join(marks)


def _format(value: float, percent: bool) -> str:
    return f"{100 * value:.3g}%" if percent else f"{value:.3g}"


def _y_tick(y: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>\n'
    )


def _x_tick(x: float, text: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{text}</text>\n'


def _curve(points: Sequence[Point], style: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    x, y = points[-1]
    return (
        f'<polyline class="line {style}" points="{path}"/>'
        f'<circle class="dot-{style}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>\n'
    )


def _end_label(y: float, line: Line, value: str) -> str:
    x = WIDTH - RIGHT + 10
    return (
        f'<text class="end-{line.style}" x="{x}" y="{y:.1f}"><tspan class="end">{value}</tspan>'
        f'<tspan x="{x}" dy="16">{escape(line.name)}</tspan></text>\n'
    )


def _spread(heights: Sequence[float], *, gap: float) -> list[float]:
    """Move labels down until each is at least ``gap`` below the previous one, in their order."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    out = list(heights)
    for above, below in pairwise(order):
        out[below] = max(out[below], out[above] + gap)
    overflow = max(max(out) - (HEIGHT - BOTTOM - 16), 0)
    return [y - overflow for y in out]


# Confusion matrices as tables.


def confusion(counts: NDArray[np.integer], classes: Sequence[str]) -> str:
    """A table of ``counts (classes, classes)``, rows are true classes; a list if there are many classes."""
    n = len(classes)
    if counts.shape != (n, n):
        raise UserError(
            f"confusion has shape {counts.shape}, but there are {n} classes; give it as ({n}, {n})"
        )
    return _matrix(counts, classes) if n <= MAX_CLASSES else _most_frequent(counts, classes)


def _matrix(counts: NDArray[np.integer], classes: Sequence[str]) -> str:
    tall = ' class="tall"' if max(map(len, classes), default=0) > 3 else ""
    head = "".join(f'<th scope="col"><div{tall}>{escape(name)}</div></th>' for name in classes)
    rows = []
    for i, name in enumerate(classes):
        total = int(counts[i].sum())
        cells = "".join(_cell(int(n), total, correct=i == j) for j, n in enumerate(counts[i]))
        share = f"{100 * counts[i, i] / total:.0f}%" if total else "–"
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}<td class="share">{share}</td></tr>\n')
    return (
        f'<div class="wide"><table class="matrix">\n'
        f'<thead><tr><td></td>{head}<th scope="col" class="share">correct</th></tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody>\n</table></div>\n"
    )


def _cell(count: int, total: int, *, correct: bool) -> str:
    if count == 0:
        return '<td class="none">·</td>'
    return f'<td class="{"hit" if correct else "miss"}" style="--share: {count / total:.3f}">{count}</td>'


def _most_frequent(counts: NDArray[np.integer], classes: Sequence[str], *, limit: int = 15) -> str:
    wrong = counts - np.diag(np.diag(counts))
    if not wrong.any():
        return "<p>None: all predictions are correct.</p>\n"
    order = np.argsort(-wrong, axis=None, kind="stable")[:limit]
    pairs = [(i, j) for i, j in zip(*np.unravel_index(order, wrong.shape), strict=True) if wrong[i, j]]
    rows = "".join(
        f"<tr><td>{escape(classes[i])}</td><td>{escape(classes[j])}</td>"
        f'<td class="number">{wrong[i, j]}</td>'
        f'<td class="number">{100 * wrong[i, j] / counts[i].sum():.0f}%</td></tr>\n'
        for i, j in pairs
    )
    return (
        '<div class="wide"><table class="list">\n<thead><tr>'
        '<th scope="col">true class</th><th scope="col">prediction</th>'
        '<th scope="col" class="number">images</th><th scope="col" class="number">of the class</th>'
        f"</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n"
    )
