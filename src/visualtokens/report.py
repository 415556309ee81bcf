"""Whole pages: the report of a training run, and one explanation by itself."""

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
from visualtokens.explain.explanation import Explanation
from visualtokens.explain.render import place_name

LEARNING = (
    "One point per epoch, from left to right. The loss should fall and the accuracy should rise; when the "
    "accuracy on training images runs far ahead of that on validation images, the model learns them by heart."
)
CONFUSION = (
    "Each row is a true class, each column what the model said. Right answers lie on the blue diagonal; an "
    "orange number counts images of the row that were taken for the column."
)
CONFUSIONS = (
    "The pairs of classes that the model mixes up most: what the image shows and what the model said."
)
CLUSTERS = (
    "The model sees an image as a few clusters of similar places; each heat map lights up one. Those places "
    "are blacked out and the model is asked again: the further the probability of its answer drops, the more "
    "it relied on them. Most important first; the vivid end of a bar is the probability that was lost (blue) "
    "or gained (orange)."
)
ATTENDED = (
    "Every place of the image attends to a few clusters; each heat map lights up the places that attend to "
    "one. Those places are blacked out and the model is asked again: the further the probability of its "
    "answer drops, the more it relied on them. Most important first."
)
READ = (
    "A cluster is made of the places above; here is where its message goes: the brighter a place, the more "
    "it attends to the cluster (patch-to-cluster attention, mean over the heads)."
)
LAYERS = {
    "tessellation": "Layer by layer: the borders of the super tokens, each place given to the one that holds "
    "most of it, and how many there are.",
    "hard": "Layer by layer: the tokens that are left and the places each stands for, filled with their mean "
    "colour. Places of one colour within a layer belong together; dark ones were dropped.",
}
WORDS = {"soft": "Clusters", "tessellation": "Super tokens", "hard": "Tokens"}
NOTES = "What to keep in mind when reading the above."
COMMAND = "This command makes this report."
RANKED = "The classes that the model finds most probable."


@dataclass(frozen=True)
class Sample:
    """An explained image, its true class if known, and how to name the image to a person."""

    explanation: Explanation
    truth: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Report:
    """What a report shows; whatever is left empty is left out.

    ``history`` has one mapping per epoch: ``epoch``, ``loss``, ``train_accuracy`` and ``accuracy``, the
    accuracies from 0 to 1. ``confusion`` counts images, rows are the truth.
    """

    title: str
    summary: Sequence[tuple[str, str, str]] = ()  # label, value, note
    history: Sequence[Mapping[str, float]] = ()
    confusion: ArrayLike | None = None  # (classes, classes)
    classes: Sequence[str] = ()
    samples: Sequence[Sample] = ()
    notes: Sequence[str] = ()
    command: str = ""


def write_report(path: str | Path, report: Report) -> Path:
    """Write the report as one self-contained HTML file."""
    path = Path(path)
    if path.suffix != ".html":
        raise UserError(f"cannot write a report to {path.name!r}; end the name in .html")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report_page(report), encoding="utf-8")
    return path


def report_page(report: Report) -> str:
    body = [html.header(report.title, report.summary)]
    if report.history:
        body.append(html.section("How it learned", LEARNING, _curves(report.history)))
    if report.confusion is not None:
        intro = CONFUSION if len(report.classes) <= MOST_CLASSES else CONFUSIONS
        counts = np.asarray(report.confusion)
        body.append(html.section("Where it errs", intro, confusion(counts, report.classes)))
    if report.samples:
        cards = "".join(_card(sample, report.classes) for sample in report.samples)
        body.append(html.section("What it looked at", CLUSTERS, html.colour_key() + cards))
    if report.notes:
        body.append(html.section("Good to know", NOTES, html.notes(report.notes)))
    if report.command:
        body.append(html.section("Do it again", COMMAND, html.command(report.command)))
    return html.page(report.title, body)


def explanation_page(explanation: Explanation) -> str:
    name = explanation.class_name(explanation.target)
    p = float(explanation.probabilities[explanation.target])
    grid = " × ".join(map(str, explanation.maps.shape[1:]))
    figures = [
        ("Class", name, explanation.about),
        ("Probability", f"{p:.2f}", "of this class, from 0 to 1"),
        (
            WORDS[explanation.form],
            str(len(explanation.order)),
            f"on a grid of {grid} places, in {place_name(explanation.layer)}",
        ),
    ]
    title = f"Why “{name}”?"
    cards = html.colour_key() + html.sample_card(explanation)
    intro = CLUSTERS if explanation.of == "groups" else ATTENDED
    body = [html.header(title, figures), html.section("What it looked at", intro, cards)]
    if explanation.attention is not None and explanation.of == "groups":
        body.append(html.section("Who reads them", READ, html.attention_strip(explanation)))
    if explanation.layers:
        intro = LAYERS[explanation.layers[-1].form]
        body.append(html.section("What the tokens stand for", intro, html.layer_strip(explanation)))
    body.append(html.section("What it could be", RANKED, html.ranked_classes(explanation)))
    return html.page(title, body)


def _curves(history: Sequence[Mapping[str, float]]) -> str:
    def line(name: str, style: str, key: str) -> Line:
        found = [(float(row["epoch"]), row[key]) for row in history if row.get(key) is not None]
        return Line(name, style, [(epoch, float(value)) for epoch, value in found])

    loss = line_chart("Loss on training images", [line("training", "main", "loss")])
    accuracy = line_chart(
        "Accuracy: images named rightly",
        [line("training", "second", "train_accuracy"), line("validation", "main", "accuracy")],
        percent=True,
    )
    return f'<div class="panels">\n{loss}{accuracy}</div>\n'


def _card(sample: Sample, classes: Sequence[str]) -> str:
    """With the report's class names and the sample's truth, unless the explanation has its own."""
    explanation = sample.explanation
    if explanation.classes is None and classes:
        explanation = replace(explanation, classes=tuple(classes))
    if explanation.truth is None:
        explanation = replace(explanation, truth=sample.truth)
    return html.sample_card(explanation, name=sample.name)


# Learning curves as inline SVG and confusion matrices as tables, both coloured by the page's style.

Point = tuple[float, float]
WIDTH, HEIGHT = 410, 230
LEFT, RIGHT, TOP, BOTTOM = 48, 82, 12, 30  # room for the labels around the plot
MOST_CLASSES = 20  # a larger matrix is not readable on a page; its commonest confusions are


@dataclass(frozen=True)
class Line:
    """One curve: ``style`` is "main" (solid) or "second" (dotted), as grey prints need."""

    name: str
    style: str
    points: Sequence[Point]  # (epoch, value)


@dataclass(frozen=True)
class _Frame:
    """The plot's range: the epochs, and the ticks of the values from the lowest to the highest."""

    epochs: tuple[float, float]
    ticks: list[float]

    def at(self, point: Point) -> Point:
        """Where the point lies in the SVG."""
        first, last = self.epochs
        x = (point[0] - first) / ((last - first) or 1)
        y = (point[1] - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])
        return LEFT + x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)


def line_chart(title: str, lines: Sequence[Line], *, percent: bool = False) -> str:
    """The curves over the epochs, each named at its end; nothing if no line has a finite value.

    Values start at 0, or, as ``percent``, end at 1.
    """
    lines = [Line(c.name, c.style, [p for p in c.points if math.isfinite(p[1])]) for c in lines]
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    epochs = [x for line in lines for x, _ in line.points]
    values = [y for line in lines for _, y in line.points]
    ticks = _ticks(min(*values, 0.9), 1.0, most=4) if percent else _ticks(0.0, max(values) or 1.0, most=4)
    frame = _Frame((min(epochs), max(epochs)), ticks)
    curves = [_curve([frame.at(p) for p in line.points], line.style) for line in lines]
    finals = [_label(line.points[-1][1], percent) for line in lines]
    heights = _spread([frame.at(line.points[-1])[1] for line in lines], gap=34)
    names = [_end(*end) for end in zip(heights, lines, finals, strict=True)]
    said = "; ".join(f"{line.name} ends at {final}" for line, final in zip(lines, finals, strict=True))
    return (
        f"<figure><h3>{escape(title)}</h3>\n"
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(said)}">\n'
        f"{_axes(frame, percent)}{''.join(curves + names)}</svg></figure>\n"
    )


def _ticks(low: float, high: float, *, most: int, whole: bool = False) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    locator = MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10], integer=whole)
    return [float(tick) for tick in locator.tick_values(low, high)]


def _axes(frame: _Frame, percent: bool) -> str:
    first, last = frame.epochs
    marks = [_y_tick(frame.at((first, tick))[1], _label(tick, percent)) for tick in frame.ticks]
    whole = [first] if first == last else _ticks(first, last, most=6, whole=True)
    marks += [_x_tick(frame.at((tick, 0))[0], f"{tick:g}") for tick in whole if first <= tick <= last]
    marks.append(f'<text class="tick" x="{WIDTH - RIGHT + 20}" y="{HEIGHT - 8}">epoch</text>\n')
    return "".join(marks)


def _label(value: float, percent: bool) -> str:
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


def _end(y: float, line: Line, value: str) -> str:
    x = WIDTH - RIGHT + 10
    return (
        f'<text class="end-{line.style}" x="{x}" y="{y:.1f}"><tspan class="end">{value}</tspan>'
        f'<tspan x="{x}" dy="16">{escape(line.name)}</tspan></text>\n'
    )


def _spread(heights: Sequence[float], *, gap: float) -> list[float]:
    """Move labels apart until none is less than ``gap`` below another, keeping their order."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    out = list(heights)
    for above, below in pairwise(order):
        out[below] = max(out[below], out[above] + gap)
    overflow = max(max(out) - (HEIGHT - BOTTOM - 16), 0)
    return [y - overflow for y in out]


def confusion(counts: NDArray[np.integer], classes: Sequence[str]) -> str:
    """Rows are the truth, columns what the model said; for many classes, the commonest confusions."""
    n = len(classes)
    if counts.shape != (n, n):
        raise UserError(
            f"confusion has shape {counts.shape}, but there are {n} classes; give it as ({n}, {n})"
        )
    return _matrix(counts, classes) if n <= MOST_CLASSES else _commonest(counts, classes)


def _matrix(counts: NDArray[np.integer], classes: Sequence[str]) -> str:
    tall = ' class="tall"' if max(map(len, classes), default=0) > 3 else ""
    head = "".join(f'<th scope="col"><div{tall}>{escape(name)}</div></th>' for name in classes)
    rows = []
    for i, name in enumerate(classes):
        total = int(counts[i].sum())
        cells = "".join(_cell(int(n), total, right=i == j) for j, n in enumerate(counts[i]))
        share = f"{100 * counts[i, i] / total:.0f}%" if total else "–"
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}<td class="share">{share}</td></tr>\n')
    return (
        f'<div class="wide"><table class="matrix">\n'
        f'<thead><tr><td></td>{head}<th scope="col" class="share">right</th></tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody>\n</table></div>\n"
    )


def _cell(count: int, total: int, *, right: bool) -> str:
    if count == 0:
        return '<td class="none">·</td>'
    return f'<td class="{"hit" if right else "miss"}" style="--share: {count / total:.3f}">{count}</td>'


def _commonest(counts: NDArray[np.integer], classes: Sequence[str], *, most: int = 15) -> str:
    wrong = counts - np.diag(np.diag(counts))
    if not wrong.any():
        return "<p>None: every image was named rightly.</p>\n"
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    pairs = [(i, j) for i, j in zip(*np.unravel_index(order, wrong.shape), strict=True) if wrong[i, j]]
    rows = "".join(
        f"<tr><td>{escape(classes[i])}</td><td>{escape(classes[j])}</td>"
        f'<td class="number">{wrong[i, j]}</td>'
        f'<td class="number">{100 * wrong[i, j] / counts[i].sum():.0f}%</td></tr>\n'
        for i, j in pairs
    )
    return (
        '<div class="wide"><table class="list">\n<thead><tr>'
        '<th scope="col">it is</th><th scope="col">taken for</th>'
        '<th scope="col" class="number">images</th><th scope="col" class="number">of its class</th>'
        f"</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n"
    )
