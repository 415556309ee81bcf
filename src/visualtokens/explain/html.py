"""Parts of HTML pages that need no script, file or network.

Functions take plain text and return HTML; all escaping happens here.
"""

from __future__ import annotations

import datetime
import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from visualtokens.errors import UserError
from visualtokens.files import write_atomically
from visualtokens.tables import printable

KeyFigure = tuple[str, str, str]  # label, value, note
MAX_EXTENSION = 6  # characters, as in .jpeg; a longer one is part of the name
LONG_WORD = 16  # characters; shorter words are not broken


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What made a page, shown in its footer; empty parts are left out."""

    model: str = ""
    checkpoint: str = ""  # shown as it is; a path may name the machine or its user
    date: datetime.date | None = None


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
    parts = [f"Model {wrappable(origin.model)}"] if origin.model else []
    parts += [f"Checkpoint {wrappable(origin.checkpoint)}"] if origin.checkpoint else []
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
        f'<div><dt>{escape(label)}</dt><dd class="value">{wrappable(value)}</dd>'
        f'<dd class="note">{escape(note)}</dd></div>\n'
        for label, value, note in figures
    )
    row = f'<dl class="figures">\n{cells}</dl>\n' if figures else ""
    return f"<header>\n<h1>{wrappable(title)}</h1>\n{row}</header>\n"


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
        return wrappable(name)
    stem = name.removesuffix(extension)
    last = re.split(r"[/_-]", stem)[-1]
    kept = len(last) if 0 < len(last) <= 8 else min(len(stem), 4)  # characters that stay with the extension
    before, end = stem[: len(stem) - kept], stem[len(stem) - kept :] + extension
    wrap = "<wbr>" if before else ""
    return f'{wrappable(before)}{wrap}<span class="nowrap">{escape(end)}</span>'


def wrappable(text: str) -> str:
    """Text with break opportunities after the separators of long words; copying it adds no character."""
    words = (
        re.sub(r"(?<=\w)([/_-]+)(?=\w)", r"\1<wbr>", escape(word)) if len(word) >= LONG_WORD else escape(word)
        for word in re.split(r"(\s+)", text)
    )
    return "".join(words)


# Parts of a page of many images.


def index(links: Iterable[str]) -> str:
    """The :func:`index_link` of every image."""
    return f'<ol class="index">\n{"".join(links)}</ol>\n'


def index_link(anchor: str, source: str, caption: str, *, alt: str, kind: str) -> str:
    """A small picture with a caption that links to an anchor; ``kind`` are its CSS classes."""
    return (
        f'<li class="{kind}"><a href="#{anchor}"><img src="{source}" alt="{escape(alt)}">'
        f"<span>{wrappable(caption)}</span></a></li>\n"
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


def by_width(*lengths: tuple[float, str]) -> str:
    """The CSS length that applies to a width: those up to so many pixels, the narrowest first.

    In a padding, 100% is the width of the box around an element; so the height of a frame can follow the
    layout inside it without a script.
    """
    parts, before = [], 0.0
    for end, length in lengths:
        upper = "" if math.isinf(end) else f", ({end + 0.5:g}px - 100%) * 9999"
        parts.append(f"min({length}, (100% - {before - 0.5:g}px) * 9999{upper})")
        before = end + 1
    return f"max({', '.join(parts)})"


def bar(*parts: tuple[str, float]) -> str:
    """A bar of adjacent parts: the CSS class and the share, 0 to 1, of each."""
    inside = "".join(f'<i class="{kind}" style="width: {100 * share:.1f}%"></i>' for kind, share in parts)
    return f'<div class="bar">{inside}</div>'
