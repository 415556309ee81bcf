"""The token view: a photo on which pointing at a patch lights its token in every layer.

It is one HTML fragment with its data, style and script inside, for pages, notebooks and apps.
"""

from __future__ import annotations

import base64
import functools
import json
import math
from collections.abc import Sequence
from html import escape
from importlib import resources

import numpy as np
from PIL import Image

from visualtokens.errors import UserError
from visualtokens.explain.html import by_width, page
from visualtokens.explain.layers import Layer
from visualtokens.explain.render import Box, data_uri, module_name

SIDE = 640  # pixels of the longer side of the photo, at most
NOUNS = {"soft": "cluster", "tessellation": "super token", "hard": "token"}
HELP = (
    "Point at a patch, or focus the photo: <span><kbd>←↑→↓</kbd> patch</span>, "
    '<span class="tv-layer-keys"><span><kbd>[</kbd> <kbd>]</kbd> layer</span>, <span><kbd>Space</kbd> play'
    "</span>, </span><span><kbd>Esc</kbd> clear</span>."
)
TITLE = "Tokens of each layer"
DOCUMENT_CSS = "main { max-width: none; padding: 12px; }"


def token_view(
    image: Image.Image, layers: Sequence[Layer], *, box: Box, caption: str = "", noun: str = ""
) -> str:
    """The view as an HTML fragment.

    ``box`` is the part of the image that the model saw, which the patches of ``layers`` divide. ``noun`` is
    what a token is called, by default "token", "super token" or "cluster", after the layer's form.
    """
    if not layers:
        raise UserError("a token view needs at least one layer; the model groups nothing: give its regions")
    photo = _photo(image, box)
    single = " tv-single" if len(layers) == 1 else ""
    title = f'<p class="tv-caption">{escape(caption)}</p>\n' if caption else ""
    data = _json([_data(layer, noun) for layer in layers])
    return (
        f'<div class="token-view{single}">\n<style>{_asset("view.css")}</style>\n<div class="tv-body">\n'
        f"{title}{_grid(photo, layers[0], caption or 'The photo')}"
        '<div class="tv-side">\n<div>\n<p class="tv-name"></p>\n'
        '<p class="tv-status" role="status" aria-live="polite"></p>\n</div>\n'
        f'{_controls(len(layers))}{_strip(layers, photo)}<p class="tv-help">{HELP}</p>\n</div>\n</div>\n'
        f'<script type="application/json">{data}</script>\n<script>{_asset("view.js")}</script>\n</div>\n'
    )


def view_document(
    image: Image.Image,
    layers: Sequence[Layer],
    *,
    box: Box,
    caption: str = "",
    noun: str = "",
    after: str = "",
) -> str:
    """The view as a whole document; ``after`` is HTML below it."""
    view = token_view(image, layers, box=box, caption=caption, noun=noun)
    return page(caption or TITLE, [view, after], css=DOCUMENT_CSS)


def view_frame(
    image: Image.Image,
    layers: Sequence[Layer],
    *,
    box: Box,
    caption: str = "",
    noun: str = "",
    after: str = "",
    after_height: str = "0px",
) -> str:
    """The document in a sandboxed ``<iframe>``, for notebooks and apps: they run no script of a fragment.

    Its height follows its width. ``after_height`` is that of the HTML ``after`` the view, in CSS, where 100%
    is the width.
    """
    document = view_document(image, layers, box=box, caption=caption, noun=noun, after=after)
    height = f"calc({_height(box, len(layers), caption=bool(caption))} + {after_height})"
    return (
        f'<div style="position: relative; padding-bottom: {height}">\n'
        f'<iframe title="{escape(caption or TITLE)}" sandbox="allow-scripts allow-downloads" '
        'style="position: absolute; inset: 0; width: 100%; height: 100%; border: 0" '
        f'srcdoc="{escape(document)}"></iframe>\n</div>\n'
    )


def _height(box: Box, layers: int, *, caption: bool) -> str:
    """The height of the document as CSS, enough for each layout of view.css; 100% is its width.

    The constants are the heights of texts and controls.
    """
    ratio = (box[3] - box[1]) / (box[2] - box[0])
    four, six = (math.ceil(layers / columns) if layers > 1 else 0 for columns in (4, 6))
    fixed = 60 if caption else 24
    narrow = f"100% * {ratio * (1 + four / 4):.3f} + {fixed + 270 + 36 * four}px"
    medium = f"100% * {ratio * (1 + six / 6):.3f} + {fixed + 240 + 36 * six}px"
    photo = f"min(60%, 640px) * {ratio:.3f} + {fixed}px"
    side = f"min(40%, 428px) * {ratio * four / 4:.3f} + {fixed + 240 + 36 * four}px"
    return by_width((503, narrow), (783, medium), (math.inf, f"max({photo}, {side})"))  # with 24 of padding


def _grid(photo: Image.Image, layer: Layer, name: str) -> str:
    """The photo, with the canvas on it that lights patches."""
    height, width = layer.assignment.shape
    label = f"{name}: {width} by {height} patches. The arrow keys move the patch that is lit."
    return (
        f'<div class="tv-grid" tabindex="0" role="application" aria-label="{escape(label)}">'
        f'<img class="tv-photo" src="{data_uri(photo)}" alt="{escape(name)}" width="{photo.width}" '
        f'height="{photo.height}"><canvas class="tv-canvas" aria-hidden="true"></canvas></div>\n'
    )


def _controls(layers: int) -> str:
    return (
        '<div class="tv-controls tv-layers">\n<button type="button" class="tv-play">▶ Play</button>\n'
        f'<input type="range" class="tv-slider" min="1" max="{layers}" step="1" aria-label="Layer">\n</div>\n'
        '<div class="tv-controls">\n'
        '<label><input type="checkbox" class="tv-fill"> Mosaic</label>\n'
        '<button type="button" class="tv-png" aria-label="Download as PNG">↓ PNG</button>\n'
        '<button type="button" class="tv-svg" aria-label="Download as SVG">↓ SVG</button>\n</div>\n'
    )


def _strip(layers: Sequence[Layer], photo: Image.Image) -> str:
    """A button with a small picture for each layer, which the script draws."""
    if len(layers) == 1:
        return ""
    items = "".join(
        f'<li><button type="button" title="{escape(module_name(layer.name))}" aria-label="Layer {i}: '
        f'{escape(module_name(layer.name))}, {layer.tokens} {NOUNS[layer.form]}s">'
        f'<canvas style="aspect-ratio: {photo.width} / {photo.height}"></canvas><b>{i}</b><small></small>'
        "</button></li>\n"
        for i, layer in enumerate(layers, start=1)
    )
    return f'<ol class="tv-strip">\n{items}</ol>\n'


def _photo(image: Image.Image, box: Box) -> Image.Image:
    """What the model saw; padding is black. Small images are enlarged so that their pixels stay visible."""
    left, top, right, bottom = (round(side) for side in box)
    part = image.convert("RGB").crop((left, top, max(right, left + 1), max(bottom, top + 1)))
    factor = SIDE / max(part.size)
    if factor >= 2:
        return part.resize((part.width * int(factor), part.height * int(factor)), Image.Resampling.NEAREST)
    if factor >= 1:
        return part
    size = max(round(part.width * factor), 1), max(round(part.height * factor), 1)
    return part.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)


def _data(layer: Layer, noun: str) -> dict[str, object]:
    height, width = layer.assignment.shape
    data: dict[str, object] = dict(
        name=module_name(layer.name),
        noun=noun or NOUNS[layer.form],
        tokens=layer.tokens,
        width=width,
        height=height,
        assignment=layer.assignment.ravel().tolist(),
    )
    if layer.maps is not None:
        rows, columns = layer.maps.shape[1:]
        weights = base64.b64encode(np.ascontiguousarray(layer.maps).tobytes()).decode("ascii")
        data["maps"] = dict(width=columns, height=rows, data=weights)
    return data


def _json(value: object) -> str:
    """JSON that cannot end the script element around it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


@functools.cache
def _asset(name: str) -> str:
    return resources.files("visualtokens.explain").joinpath(name).read_text("utf-8")
