"""Whole pages: the report of a training run, and one explanation by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from visualtokens.errors import UserError
from visualtokens.explain import html
from visualtokens.explain.charts import MOST_CLASSES, Line, confusion, line_chart
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
