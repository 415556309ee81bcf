"""A folder of images, explained on one page."""

from __future__ import annotations

import mimetypes
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from PIL import Image
from torch import nn

from visualtokens.data import BadImage, Preprocess, read_image
from visualtokens.data.decode import EXTENSIONS
from visualtokens.errors import UserError
from visualtokens.explain import html
from visualtokens.explain.cards import card, how_to_read, key
from visualtokens.explain.explainer import explain
from visualtokens.explain.explanation import Explanation
from visualtokens.explain.inputs import NotExplainable
from visualtokens.explain.render import data_uri, resize_for_display
from visualtokens.progress import one_image, track

SIDE = 288  # pixels of an image's longer side: a page of 100 photos has about 10 MB
THUMBNAIL = 112  # likewise, in the index

Verdict = Literal["wrong", "correct", "unknown"]
# The parts of the page in their order: heading and introduction.
PARTS: dict[Verdict, tuple[str, str]] = {
    "wrong": ("Wrong answers", "The most confident first. The true class is the name of the image's folder."),
    "correct": ("Correct answers", "The predicted class is the name of the image's folder."),
    "unknown": ("Images of unknown class", "Their folder is not named after a class of the model."),
}
MARKS: dict[Verdict, str] = {"wrong": "✗", "correct": "✓", "unknown": ""}
LABELS: dict[Verdict, str] = {"wrong": "wrong", "correct": "correct", "unknown": "unknown class"}


@dataclass(frozen=True)
class Entry:
    """One explained image: its numbers and its part of the page, without the pixels."""

    name: str  # relative to the folder
    predicted: str
    confidence: float  # the probability of the predicted class
    target: str
    probability: float  # of the target
    truth: str | None
    truth_probability: float | None
    about: str
    regions: tuple[tuple[int, float], ...]  # the top regions or clusters and their values
    card: str  # HTML
    thumbnail: str  # data URI

    @property
    def verdict(self) -> Verdict:
        """Whether the prediction is the true class."""
        if self.truth is None:
            return "unknown"
        return "correct" if self.truth == self.predicted else "wrong"

    @property
    def classes(self) -> list[str]:
        """The predicted class, and the true one if it is another."""
        return [self.predicted, self.truth] if self.truth not in (None, self.predicted) else [self.predicted]


@dataclass
class Gallery:
    """The explained images, the images that could not be explained, and the other files."""

    folder: str  # its name
    entries: list[Entry] = field(default_factory=list)
    refused: list[BadImage] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)  # files that are no images by their names
    not_reached: int = 0  # files left when the run was interrupted
    legend: tuple[str, str] = ("", "")  # how to read the explanations, and the key of their colours (HTML)
    checkable: bool = True  # whether images have a true class: not those of segmenters and detectors

    @property
    def files(self) -> int:
        """Number of files in the folder."""
        return len(self.entries) + len(self.refused) + len(self.ignored) + self.not_reached

    @property
    def title(self) -> str:
        """One sentence: the number of images and of wrong predictions."""
        if not self.entries:
            return f"No image in {self.folder}/ could be explained"
        images = "1 image" if len(self.entries) == 1 else f"{len(self.entries)} images"
        answers = [entry.verdict for entry in self.entries if entry.verdict != "unknown"]
        if not answers:
            return f"What the model saw in {images} from {self.folder}/"
        return f"What the model saw in {images} from {self.folder}/: {self._score(answers)}"

    def _score(self, answers: Sequence[Verdict]) -> str:
        wrong, known = answers.count("wrong"), len(answers)
        checked = "" if known == len(self.entries) else " that can be checked"
        if known == 1:
            return f"the answer{checked} is {answers[0]}"
        if wrong in (0, known):
            return f"all answers{checked} are {answers[0]}"
        return f"{wrong} of the {known} answers{checked} {'is' if wrong == 1 else 'are'} wrong"

    def add(self, explanation: Explanation, name: str) -> None:
        """Append an explained image."""
        self.legend = how_to_read(explanation), key(explanation)
        self.checkable = explanation.kind == "image"
        width, height = explanation.image.size
        small, _ = resize_for_display(explanation.image, explanation.crop_box, side=THUMBNAIL)
        predicted, truth = explanation.predicted, explanation.truth
        self.entries.append(
            Entry(
                name=name,
                predicted=explanation.class_name(predicted),
                confidence=float(explanation.probabilities[predicted]),
                target=explanation.class_name(explanation.target),
                probability=float(explanation.probabilities[explanation.target]),
                truth=None if truth is None else explanation.class_name(truth),
                truth_probability=None if truth is None else float(explanation.probabilities[truth]),
                about=explanation.about,
                regions=tuple((k, float(explanation.values[k])) for k in explanation.top),
                card=card(explanation, name=name, note=f"({width}×{height})", side=SIDE),
                thumbnail=data_uri(small),
            )
        )

    def page(self, *, origin: html.Origin | None = None) -> str:
        """The HTML document: an index with a filter, the wrong predictions, the others, skipped files."""
        body, css = [html.header(self.title, self._figures())], ""
        if self.entries:
            items, options = self._items()
            index, css = _index(items, options)
            body += [index, html.section("How to read this page", *self.legend)]
            body += _parts(items, checkable=self.checkable)
        if self.refused:
            lines = [f"{bad.path}: {bad.reason}" for bad in self.refused]
            intro = "Images that could not be explained, and why."
            body.append(html.section("Skipped images", intro, html.notes(lines)))
        if len(self.entries) > 1:
            body.append(html.back_link("index", "Index"))
        return html.page(self.title, body, origin=origin, css=css)

    def write(self, path: str | Path, *, origin: html.Origin | None = None) -> Path:
        """Write the page as one self-contained HTML file; ``origin`` is shown in its footer."""
        return html.write_page(path, self.page(origin=origin))

    def ordered(self) -> list[Entry]:
        """The entries as on the page: wrong predictions, the most confident first, then the others."""
        order = list(PARTS)

        def place(entry: Entry) -> tuple[int, float]:
            return order.index(entry.verdict), -entry.confidence if entry.verdict == "wrong" else 0.0

        return sorted(self.entries, key=place)

    def _items(self) -> tuple[list[_Item], list[html.Choice]]:
        """The entries in the order of the page, and the choices of the filter."""
        entries = self.ordered()
        counts = Counter(name for entry in entries for name in entry.classes)
        number = {name: f"class-{k}" for k, name in enumerate(sorted(counts, key=str.casefold))}
        items = [
            _Item(
                f"image-{i}",
                " ".join(["item", entry.verdict, *(number[name] for name in entry.classes)]),
                entry,
            )
            for i, entry in enumerate(entries, start=1)
        ]
        verdicts = Counter(entry.verdict for entry in entries)
        choices = [html.Choice(v, LABELS[v], verdicts[v]) for v in PARTS if v in verdicts]
        choices += [html.Choice(number[name], name, counts[name]) for name in number]
        # a choice that shows everything is not one
        narrow = [choice for choice in choices if choice.size < len(entries)]
        return items, [html.Choice("item", "all", len(entries)), *narrow]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        explained = [
            {
                "image": entry.name,
                "predicted": entry.predicted,
                "target": entry.target,
                "probability": entry.probability,
                "truth": entry.truth,
                "truth_probability": entry.truth_probability,
                "about": entry.about,
                "regions": [{"region": k, "value": value} for k, value in entry.regions],
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
            noun = "image" if len(self.refused) == 1 else "images"
            figures.append(("Skipped", str(len(self.refused)), f"{noun}, listed at the end"))
        if self.not_reached:
            figures.append(("Not reached", str(self.not_reached), "files; the run was interrupted"))
        return figures


class _Item(NamedTuple):
    """An entry on the page: its anchor, and the CSS classes by which the filter finds it."""

    anchor: str
    kind: str
    entry: Entry


def _index(items: Sequence[_Item], options: Sequence[html.Choice]) -> tuple[str, str]:
    """The section of the index, and the CSS of its filter."""
    links = []
    for anchor, kind, entry in items:
        known = entry.verdict != "unknown"
        alt = f"{entry.name}, {entry.verdict} answer:" if known else f"{entry.name}:"
        instead = f", not {entry.truth}" if entry.verdict == "wrong" else ""
        caption = f"{MARKS[entry.verdict]} {entry.predicted}{instead}".lstrip()
        links.append(html.index_link(anchor, entry.thumbnail, caption, alt=alt, kind=kind))
    wrong = any(item.entry.verdict == "wrong" for item in items)
    intro = f"All images with their predicted classes{', wrong answers first' if wrong else ''}."
    form, css = html.choices(options) if len(options) > 1 else ("", "")
    return html.section("Index", intro, form + html.index(links), anchor="index"), css


def _parts(items: Sequence[_Item], *, checkable: bool) -> list[str]:
    """A section for each verdict that occurs."""
    parts = []
    for verdict, (heading, intro) in PARTS.items():
        if not checkable:
            heading, intro = "Images", "One object or one class of each image is explained."
        found = [item for item in items if item.entry.verdict == verdict]
        cards = "".join(html.item(anchor, entry.card, kind=kind) for anchor, kind, entry in found)
        if found:
            parts.append(html.section(heading, intro, cards, kind="group"))
    return parts


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
    classes: Sequence[str] | None = None,
    progress: bool | None = None,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Gallery:
    """Explain every image in a folder and its subfolders; ``options`` are those of ``explain``.

    The true class of an image is that of its parent folder, if it is named after one of the ``classes``.
    Images that cannot be explained are collected in ``refused``, files that are no images in ``ignored``.
    ``progress`` shows a bar; None shows it on a terminal and logs the progress elsewhere. Between two images,
    ``stop()`` ends the work.
    """

    def explain_one(image: Image.Image, truth: int | None) -> Explanation:
        return explain(model, image, preprocess=preprocess, classes=classes, truth=truth, **options)

    return explain_images(folder, explain_one, classes=classes or (), progress=progress, stop=stop)


def explain_images(
    folder: str | Path,
    explain_one: Callable[[Image.Image, int | None], Explanation],
    *,
    classes: Sequence[str],
    progress: bool | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Gallery:
    """:func:`explain_folder` with any function of an RGB image and its true class, if that is known."""
    gallery = Gallery(Path(folder).resolve().name)
    files = find_files(folder)
    for path in track(files, "explain", unit="file", images=one_image, shown=progress):
        if stop():
            gallery.not_reached = len(files) - gallery.files
            break
        name = str(path.relative_to(folder))
        try:
            explanation = explain_one(read_image(path), class_of(path, classes))
        except BadImage as bad:
            if is_named_as_image(path):
                gallery.refused.append(BadImage(name, bad.reason))
            else:
                gallery.ignored.append(name)
        except NotExplainable as error:
            gallery.refused.append(BadImage(name, str(error)))
        else:
            gallery.add(explanation, name)
    return gallery
