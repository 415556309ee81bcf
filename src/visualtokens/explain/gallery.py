"""A folder of images, explained on one page."""

from __future__ import annotations

import mimetypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from visualtokens.data import BadImage, Preprocess, read_image
from visualtokens.data.decode import EXTENSIONS
from visualtokens.errors import UserError
from visualtokens.explain import html
from visualtokens.explain.explainer import MapSource, TooSmall, explain
from visualtokens.explain.explanation import Explanation
from visualtokens.progress import one_image, track

SIDE = 288  # pixels of an image's longer side: a page of 100 photos has about 10 MB


@dataclass(frozen=True)
class Entry:
    """One explained image: its numbers and its part of the page, without the pixels."""

    name: str  # relative to the folder
    predicted: str
    target: str
    probability: float  # of the target
    truth: str | None
    about: str
    clusters: tuple[tuple[int, float], ...]  # the top clusters and their importance
    card: str  # HTML


@dataclass
class Gallery:
    """The explained images, the images that could not be explained, and the other files."""

    title: str
    entries: list[Entry] = field(default_factory=list)
    refused: list[BadImage] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)  # files that are no images by their names
    not_reached: int = 0  # files left when the run was interrupted

    @property
    def files(self) -> int:
        """Number of files in the folder."""
        return len(self.entries) + len(self.refused) + len(self.ignored) + self.not_reached

    def add(self, explanation: Explanation, name: str) -> None:
        """Append an explained image."""
        width, height = explanation.image.size
        self.entries.append(
            Entry(
                name=name,
                predicted=explanation.class_name(explanation.predicted),
                target=explanation.class_name(explanation.target),
                probability=float(explanation.probabilities[explanation.target]),
                truth=explanation.class_name(explanation.truth) if explanation.truth is not None else None,
                about=explanation.about,
                clusters=tuple((k, float(explanation.importance[k])) for k in explanation.top),
                card=html.card(explanation, name=f"{name} ({width}×{height})", side=SIDE),
            )
        )

    def page(self) -> str:
        """The HTML document."""
        body = [html.header(self.title, self._figures())]
        if self.entries:
            cards = "".join(entry.card for entry in self.entries)
            body.append(html.section("Cluster importance", html.CLUSTERS, html.colour_key() + cards))
        if self.refused:
            lines = [f"{bad.path}: {bad.reason}" for bad in self.refused]
            intro = "Images that could not be explained, and why."
            body.append(html.section("Skipped images", intro, html.notes(lines)))
        return html.page(self.title, body)

    def write(self, path: str | Path) -> Path:
        """Write the page as one self-contained HTML file."""
        return html.write_page(path, self.page())

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
        interrupted = {"interrupted": True} if self.not_reached else {}
        return {"explained": explained, "unreadable": refused, "ignored": self.ignored, **interrupted}

    def _figures(self) -> list[html.KeyFigure]:
        figures = [("Images", str(len(self.entries)), "explained")]
        labelled = [entry for entry in self.entries if entry.truth is not None]
        if labelled:
            correct = sum(entry.truth == entry.predicted for entry in labelled)
            note = f"of {len(labelled)} in a folder named after a class"
            figures.append(("Correct", str(correct), note))
        if self.refused:
            figures.append(("Skipped", str(len(self.refused)), "images, listed at the end"))
        if self.not_reached:
            figures.append(("Not reached", str(self.not_reached), "files; the run was interrupted"))
        return figures


def find_files(folder: str | Path) -> list[Path]:
    """Every file below the folder, sorted, without hidden files and folders."""
    found: list[Path] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    if not found:
        raise UserError(f"{folder} holds no files; give a folder of images")
    return sorted(found)


def is_named_as_image(path: Path) -> bool:
    """Whether a file has the name of an image, also of one in a format that is not supported."""
    kind = mimetypes.guess_type(path.name)[0] or ""
    return path.suffix.lower() in EXTENSIONS or kind.startswith("image/")


def class_of(path: Path, classes: Sequence[str]) -> int | None:
    """The class that the parent folder of an image is named after, None if it is not."""
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
    of: MapSource = "groups",
    batch: int = 16,
    classes: Sequence[str] | None = None,
    progress: bool | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Gallery:
    """Explain every image in a folder and its subfolders; the options are those of ``explain``.

    The true class of an image is that of its parent folder, if it is named after one of the ``classes``.
    Images that cannot be explained are collected in ``refused``, files that are no images in ``ignored``.
    ``progress`` shows a bar; None shows it on a terminal and logs the progress elsewhere. Between two images,
    ``stop()`` ends the work.
    """
    gallery = Gallery(f"Explanations of {Path(folder).resolve().name}")
    files = find_files(folder)
    for path in track(files, "explain", unit="files", images=one_image, shown=progress):
        if stop():
            gallery.not_reached = len(files) - gallery.files
            break
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
            if is_named_as_image(path):
                gallery.refused.append(BadImage(name, bad.reason))
            else:
                gallery.ignored.append(name)
        except TooSmall as error:
            gallery.refused.append(BadImage(name, str(error)))
        else:
            gallery.add(explanation, name)
    return gallery
