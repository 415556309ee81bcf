"""A folder of images, explained one by one on one page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from visualtokens.data import BadImage, Preprocess, read_image
from visualtokens.errors import UserError
from visualtokens.explain import html
from visualtokens.explain.explainer import TooSmall, View, explain
from visualtokens.explain.explanation import Explanation
from visualtokens.report import CLUSTERS

SIDE = 288  # pixels of a picture's longer side: a page of a hundred photos stays near 10 MB

REFUSED = "These files are not explained, and why."


@dataclass(frozen=True)
class Entry:
    """What is kept of one explained image: numbers and its part of the page, not its pixels."""

    name: str  # relative to the folder
    size: tuple[int, int]  # (width, height)
    predicted: str
    target: str
    probability: float  # of the target
    truth: str | None
    about: str
    clusters: tuple[tuple[int, float], ...]  # the top ones and their importance
    card: str  # HTML


@dataclass
class Gallery:
    """The explained images, and those that could not be."""

    title: str
    entries: list[Entry] = field(default_factory=list)
    refused: list[BadImage] = field(default_factory=list)

    def add(self, explanation: Explanation, name: str) -> None:
        width, height = explanation.image.size
        self.entries.append(
            Entry(
                name=name,
                size=(width, height),
                predicted=explanation.class_name(explanation.predicted),
                target=explanation.class_name(explanation.target),
                probability=float(explanation.probabilities[explanation.target]),
                truth=explanation.class_name(explanation.truth) if explanation.truth is not None else None,
                about=explanation.about,
                clusters=tuple((k, float(explanation.importance[k])) for k in explanation.top),
                card=html.sample_card(explanation, name=f"{name} ({width}×{height})", side=SIDE),
            )
        )

    def page(self) -> str:
        body = [html.header(self.title, self._figures())]
        if self.entries:
            cards = "".join(entry.card for entry in self.entries)
            body.append(html.section("What it looked at", CLUSTERS, html.colour_key() + cards))
        if self.refused:
            lines = [f"{bad.path}: {bad.reason}" for bad in self.refused]
            body.append(html.section("Not explained", REFUSED, html.notes(lines)))
        return html.page(self.title, body)

    def write(self, path: str | Path) -> Path:
        """Write the page as one self-contained HTML file."""
        path = Path(path)
        if path.suffix != ".html":
            raise UserError(f"cannot write a gallery to {path.name!r}; end the name in .html")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.page(), encoding="utf-8")
        return path

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        explained = [
            {
                "image": entry.name,
                "predicted": entry.predicted,
                "target": entry.target,
                "probability": entry.probability,
                "truth": entry.truth,
                "about": entry.about,
                "clusters": [{"cluster": k, "importance": value} for k, value in entry.clusters],
            }
            for entry in self.entries
        ]
        refused = [{"path": bad.path, "reason": bad.reason} for bad in self.refused]
        return {"explained": explained, "unreadable": refused}

    def _figures(self) -> list[html.KeyFigure]:
        figures = [("Images", str(len(self.entries)), "explained, one below the other")]
        judged = [entry for entry in self.entries if entry.truth is not None]
        if judged:
            right = sum(entry.truth == entry.predicted for entry in judged)
            note = f"of {len(judged)} that lie in a folder named after their class"
            figures.append(("Right", str(right), note))
        if self.refused:
            figures.append(("Left out", str(len(self.refused)), "files, named at the end of the page"))
        return figures


def find_files(folder: str | Path) -> list[Path]:
    """Every file below the folder, sorted; what is hidden is left alone."""
    found: list[Path] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    if not found:
        raise UserError(f"{folder} holds no files; give a folder of images")
    return sorted(found)


def class_of(path: Path, classes: Sequence[str]) -> int | None:
    """The class that the folder of an image is named after, if it is."""
    folder = path.resolve().parent.name
    return classes.index(folder) if folder in classes else None


def explain_folder(
    model: nn.Module,
    folder: str | Path,
    *,
    preprocess: Preprocess | None = None,
    target: int | None = None,
    layer: int = -1,
    top: int = 6,
    of: View = "groups",
    batch: int = 16,
    classes: Sequence[str] | None = None,
    progress: bool | None = None,
) -> Gallery:
    """Explain every image in a folder and the folders inside it; the options are those of ``explain``.

    An image in a folder that is named after one of the ``classes`` is known to be of that class. A file
    that is no image, or one that cannot be explained, is named in ``refused`` and does not stop the
    others. ``progress`` shows a bar; by default on a terminal.
    """
    from tqdm import tqdm

    gallery = Gallery(f"What the model saw in {Path(folder).resolve().name}")
    hidden = None if progress is None else not progress
    for path in tqdm(find_files(folder), desc="explain", unit="image", leave=False, disable=hidden):
        name = str(path.relative_to(folder))
        try:
            explanation = explain(
                model,
                read_image(path),
                preprocess=preprocess,
                target=target,
                layer=layer,
                top=top,
                of=of,
                batch=batch,
                classes=classes,
                truth=class_of(path, classes or ()),
            )
        except BadImage as bad:
            gallery.refused.append(BadImage(name, bad.reason))
        except TooSmall as error:
            gallery.refused.append(BadImage(name, str(error)))
        else:
            gallery.add(explanation, name)
    return gallery
