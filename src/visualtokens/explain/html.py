"""HTML pages that need no script, file or network: the page of one explanation, and the parts of others.

Functions take plain text and return HTML; all escaping happens here.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from visualtokens.errors import UserError
from visualtokens.explain.explanation import Explanation
from visualtokens.explain.render import (
    colour_stops,
    data_uri,
    draw_cluster,
    draw_layer,
    drawn_layers,
    format_change,
    frame_crop,
    layer_counts,
    module_name,
    overlay,
    resize_for_display,
)
from visualtokens.files import write_atomically
from visualtokens.tables import printable

KeyFigure = tuple[str, str, str]  # label, value, note
SIDE = 384  # pixels of an image's longer side: sharp on a phone, small in a page of many
MAX_EXTENSION = 6  # characters, as in .jpeg; a longer one is part of the name
LONG_WORD = 16  # characters; shorter words are not broken

CLUSTERS = (
    "The model groups the patches of an image into clusters; each heat map shows one cluster. Its region is "
    "masked with black and the model runs again: the further the probability drops, the more the prediction "
    "depends on the cluster. Clusters are sorted by importance. A bar is the probability; its dark end is "
    "the part that masking removes (blue) or adds (orange)."
)
ATTENTION_CLUSTERS = (
    "Every patch attends to a few clusters; each heat map shows the patches that attend to one cluster. They "
    "are masked with black and the model runs again: the further the probability drops, the more the "
    "prediction depends on them. Clusters are sorted by importance."
)
ATTENTION = (
    "How strongly the patches attend to each cluster: brighter is stronger (patch-to-cluster attention, mean "
    "over the heads)."
)
LAYERS = {
    "tessellation": "The borders of the super tokens in each layer, and their number. Each patch is drawn as "
    "part of the super token with the largest weight on it.",
    "hard": "The tokens left in each layer, and their number. The patches of a token are filled with their "
    "mean colour; dropped patches are dark.",
}
TOKEN_NAMES = {"soft": "Clusters", "tessellation": "Super tokens", "hard": "Tokens"}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What made a page, shown in its footer; empty parts are left out."""

    model: str = ""
    checkpoint: str = ""  # shown as it is; a path may name the machine or its user
    date: datetime.date | None = None


def explanation_page(explanation: Explanation, *, origin: Origin | None = None) -> str:
    """The page of one explanation."""
    name = explanation.class_name(explanation.target)
    p = float(explanation.probabilities[explanation.target])
    grid = " × ".join(map(str, explanation.maps.shape[1:]))
    figures = [
        ("Class", name, explanation.about),
        ("Probability", f"{p:.2f}", "of this class"),
        (
            TOKEN_NAMES[explanation.form],
            str(len(explanation.order)),
            f"on a grid of {grid} patches, in {module_name(explanation.layer)}",
        ),
    ]
    title = _question(explanation)
    intro = CLUSTERS if explanation.of == "groups" else ATTENTION_CLUSTERS
    body = [header(title, figures), section("Cluster importance", intro, colour_key() + card(explanation))]
    if explanation.attention is not None and explanation.of == "groups":
        body.append(section("Attention to the clusters", ATTENTION, _attention_strip(explanation)))
    if explanation.layers:
        intro = LAYERS[explanation.layers[-1].form]
        body.append(section("Tokens of each layer", intro, _layer_strip(explanation)))
    body.append(section("Class probabilities", "The most probable classes.", _class_table(explanation)))
    return page(title, body, origin=origin)


def _question(explanation: Explanation) -> str:
    target = explanation.class_name(explanation.target)
    if not explanation.target_is_prediction:
        return f"What speaks for “{target}”?"
    if explanation.truth in (None, explanation.target):
        return f"Why “{target}”?"
    return f"Why “{target}” and not “{explanation.class_name(explanation.truth)}”?"


# Parts of every page.


def page(title: str, body: Iterable[str], *, origin: Origin | None = None, css: str = "") -> str:
    """A whole document; ``css`` is added to the style of all pages."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{style()}{css}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(body)}</main>\n{_footer(origin or Origin())}</body>\n</html>\n"
    )


@functools.cache
def style() -> str:
    """The style of all pages."""
    return resources.files("visualtokens.explain").joinpath("page.css").read_text("utf-8")


def _footer(origin: Origin) -> str:
    parts = [f"Model {_wrappable(origin.model)}"] if origin.model else []
    parts += [f"Checkpoint {_wrappable(origin.checkpoint)}"] if origin.checkpoint else []
    if origin.date is not None:
        day = origin.date.isoformat()
        parts.append(f'<time datetime="{day}">{day}</time>')
    items = "".join(f"<li>{part}</li>\n" for part in parts)
    return f"<footer>\n<ul>\n{items}</ul>\n</footer>\n" if parts else ""


def write_page(path: str | Path, text: str) -> Path:
    """Write a document to a file that must end in .html; make its folder."""
    path = Path(path)
    if path.suffix != ".html":
        raise UserError(f"cannot write a page to {path.name!r}; end the name in .html")
    path.parent.mkdir(parents=True, exist_ok=True)
    content = printable(text, keep="\n").encode()
    write_atomically(path, lambda temporary: temporary.write_bytes(content))
    return path


def header(title: str, figures: Sequence[KeyFigure]) -> str:
    """The title and the key figures below it."""
    cells = "".join(
        f'<div><dt>{escape(label)}</dt><dd class="value">{_wrappable(value)}</dd>'
        f'<dd class="note">{escape(note)}</dd></div>\n'
        for label, value, note in figures
    )
    row = f'<dl class="figures">\n{cells}</dl>\n' if figures else ""
    return f"<header>\n<h1>{_wrappable(title)}</h1>\n{row}</header>\n"


def section(title: str, intro: str, body: str, *, anchor: str = "", kind: str = "") -> str:
    """A heading, an introduction and the content, which is HTML; ``anchor`` is its id, ``kind`` its class."""
    attributes = (f' id="{anchor}"' if anchor else "") + (f' class="{kind}"' if kind else "")
    return (
        f"<section{attributes}>\n<h2>{escape(title)}</h2>\n"
        f'<p class="intro">{escape(intro)}</p>\n{body}</section>\n'
    )


def notes(lines: Sequence[str]) -> str:
    """A bullet list."""
    items = "".join(f"<li>{escape(line)}</li>\n" for line in lines)
    return f'<ul class="notes">\n{items}</ul>\n'


def command(text: str) -> str:
    """A shell command."""
    return f"<pre><code>{escape(text)}</code></pre>\n"


def file_name(name: str) -> str:
    """A file name that wraps after separators, but not inside or just before its extension."""
    extension = PurePosixPath(name).suffix
    if not extension or len(extension) > MAX_EXTENSION:
        return _wrappable(name)
    stem = name.removesuffix(extension)
    last = re.split(r"[/_-]", stem)[-1]
    kept = len(last) if 0 < len(last) <= 8 else min(len(stem), 4)  # characters that stay with the extension
    before, end = stem[: len(stem) - kept], stem[len(stem) - kept :] + extension
    wrap = "<wbr>" if before else ""
    return f'{_wrappable(before)}{wrap}<span class="nowrap">{escape(end)}</span>'


def _wrappable(text: str) -> str:
    """Text with break opportunities after the separators of long words; copying it adds no character."""
    words = (
        re.sub(r"(?<=\w)([/_-]+)(?=\w)", r"\1<wbr>", escape(word)) if len(word) >= LONG_WORD else escape(word)
        for word in re.split(r"(\s+)", text)
    )
    return "".join(words)


# Parts that show explanations.


def colour_key() -> str:
    """The legend of the heat maps."""
    gradient = ", ".join(colour_stops())
    return (
        '<p class="key"><span>outside the cluster</span>'
        f'<i style="background: linear-gradient(90deg, {gradient})"></i><span>inside</span></p>\n'
    )


def card(explanation: Explanation, *, name: str = "", note: str = "", side: int = SIDE) -> str:
    """The image with its prediction, and the top clusters by decreasing importance.

    ``note`` is shown after the ``name`` of the image's file.
    """
    image, box = resize_for_display(explanation.image, explanation.crop_box, side=side)
    clusters = []
    for position, k in enumerate(explanation.top, start=1):
        drawn = draw_cluster(explanation, k, image, box)
        clusters.append(_cluster(explanation, k, position, data_uri(drawn)))
    alt = f"{name or 'The image'}, predicted as {explanation.class_name(explanation.predicted)}"
    return (
        '<article class="sample">\n<div class="subject">\n'
        f'<img src="{data_uri(frame_crop(image, box))}" alt="{escape(alt)}">\n'
        f'<div class="prediction">\n{_prediction(explanation, name, note)}</div>\n</div>\n'
        f'<ol class="clusters">\n{"".join(clusters)}</ol>\n</article>\n'
    )


def _prediction(explanation: Explanation, name: str, note: str) -> str:
    predicted, truth = explanation.predicted, explanation.truth

    def named(number: int) -> str:
        probability = _probability(float(explanation.probabilities[number]))
        return f"{_wrappable(explanation.class_name(number))} <b>{probability}</b>"

    lines = [f'<p class="class">{named(predicted)}</p>\n']
    if truth is None:
        lines.append('<p class="aside">true class unknown</p>\n')
    elif truth == predicted:
        lines.append('<p class="truth correct">✓ correct</p>\n')
    else:
        lines.append(f'<p class="truth wrong">✗ true class: {named(truth)}</p>\n')
    if not explanation.target_is_prediction:
        target = _wrappable(explanation.class_name(explanation.target))
        p = _probability(float(explanation.probabilities[explanation.target]))
        lines.append(f'<p class="aside">explained class: {target} ({p})</p>\n')
    if name:
        after = f' <span class="nowrap">{escape(note)}</span>' if note else ""
        lines.append(f'<p class="aside">{file_name(name)}{after}</p>\n')
    return "".join(lines)


def _probability(p: float) -> str:
    return "&lt; 0.01" if p < 0.005 else f"{p:.2f}"


def _cluster(explanation: Explanation, k: int, position: int, source: str) -> str:
    before, after = float(explanation.probabilities[explanation.target]), explanation.masked_probability(k)
    change = format_change(explanation, k)
    word = {"−": "drop in probability", "+": "rise in probability"}.get(change[0], "negligible change")
    alt = (
        f"Cluster {k}, number {position} in importance: "
        f"masking it changes the probability from {before:.2f} to {after:.2f}"
    )
    difference = ("lost" if after <= before else "gained", abs(before - after))
    return (
        f'<li><img src="{source}" alt="{escape(alt)}"><p class="change"><b>{change}</b>{word}</p>'
        f"{_bar(('kept', min(before, after)), difference)}</li>\n"
    )


# Parts of a page of many images.


def index(links: Iterable[str]) -> str:
    """The :func:`index_link` of every image."""
    return f'<ol class="index">\n{"".join(links)}</ol>\n'


def index_link(anchor: str, source: str, caption: str, *, alt: str, kind: str) -> str:
    """A small picture with a caption that links to an anchor; ``kind`` are its CSS classes."""
    return (
        f'<li class="{kind}"><a href="#{anchor}"><img src="{source}" alt="{escape(alt)}">'
        f"<span>{_wrappable(caption)}</span></a></li>\n"
    )


def item(anchor: str, body: str, *, kind: str) -> str:
    """Content with an anchor; ``kind`` are its CSS classes."""
    return f'<div id="{anchor}" class="{kind}">\n{body}</div>\n'


def back_link(anchor: str, text: str) -> str:
    """A link to an anchor that stays in view."""
    return f'<p class="back"><a href="#{anchor}">↑ {escape(text)}</a></p>\n'


class Choice(NamedTuple):
    """A choice of a filter: the CSS class of the items that it shows, its label, and their number."""

    kind: str
    label: str
    size: int


def choices(options: Sequence[Choice]) -> tuple[str, str]:
    """A filter of the elements of class ``item``, as HTML and CSS; the first choice shows all of them.

    Browsers without ``:has()`` show all items and no filter.
    """
    labels = [
        f'<label><input type="radio" name="show" id="show-{kind}"{" checked" if i == 0 else ""}> '
        f"{escape(label)} <small>({size})</small></label>\n"
        for i, (kind, label, size) in enumerate(options)
    ]
    rules = [
        f"body:has(#show-{kind}:checked) :is(.item:not(.{kind}), .group:not(:has(.{kind}))) "
        "{ display: none; }\n"
        for kind, _, _ in options[1:]
    ]
    form = (
        f'<fieldset class="filter">\n<legend>Show</legend>\n<div>\n{"".join(labels)}</div>\n'
        "<p>A class shows the images of this class and those predicted as it.</p>\n</fieldset>\n"
    )
    return form, "".join(rules)


# Parts of the page of one explanation.


def _layer_strip(explanation: Explanation) -> str:
    image, box = resize_for_display(explanation.image, explanation.crop_box, side=SIDE)
    items = []
    for layer in drawn_layers(explanation):
        name = module_name(layer.name)
        source = data_uri(draw_layer(layer, image, box))
        items.append(_captioned(source, str(layer.tokens), name, alt=f"{name}: {layer_counts(layer)}"))
    return f'<ol class="clusters strip">\n{"".join(items)}</ol>\n'


def _attention_strip(explanation: Explanation) -> str:
    assert explanation.attention is not None
    image, box = resize_for_display(explanation.image, explanation.crop_box, side=SIDE)
    items = []
    for k in explanation.top:
        source = data_uri(overlay(image, explanation.attention[k], box=box))
        alt = f"Attention of the patches to cluster {k}"
        items.append(_captioned(source, format_change(explanation, k), f"cluster {k}", alt=alt))
    return f'<ol class="clusters strip">\n{"".join(items)}</ol>\n'


def _captioned(source: str, value: str, caption: str, *, alt: str) -> str:
    return (
        f'<li><img src="{source}" alt="{escape(alt)}">'
        f'<p class="change"><b>{escape(value)}</b>{escape(caption)}</p></li>\n'
    )


def _class_table(explanation: Explanation, *, count: int = 5) -> str:
    """The most probable classes with a bar each."""
    best = explanation.probabilities.argsort(kind="stable")[::-1][:count].tolist()
    rows = "".join(
        f'<tr><th scope="row">{escape(explanation.class_name(c))}</th>'
        f'<td class="number">{explanation.probabilities[c]:.3f}</td>'
        f'<td class="track">{_bar(("lost", float(explanation.probabilities[c])))}</td></tr>\n'
        for c in best
    )
    return f'<div class="wide"><table class="list">\n<tbody>\n{rows}</tbody>\n</table></div>\n'


def _bar(*parts: tuple[str, float]) -> str:
    """A bar of adjacent parts: the CSS class and the share, 0 to 1, of each."""
    inside = "".join(f'<i class="{kind}" style="width: {100 * share:.1f}%"></i>' for kind, share in parts)
    return f'<div class="bar">{inside}</div>'
