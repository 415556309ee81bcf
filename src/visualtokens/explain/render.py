"""Heat maps over pictures.

One colour scheme throughout: a perceptually uniform map whose lightness only rises, over the picture
in greys and with one strength everywhere. So a place is lighter than it was exactly where the cluster
is stronger, on a grey print and to colour-blind eyes too, and no colour of the photo looks like heat.
"""

from __future__ import annotations

import base64
import io
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

from visualtokens.errors import UserError
from visualtokens.explain.importance import OUTSIDE, Box, Floats, mosaic, outlined, place, scale_box
from visualtokens.explain.layers import Layer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from visualtokens.explain.explanation import Explanation


COLORMAP = "magma"
STRENGTH = 0.6  # how much of a pixel is heat; the rest is the photo
LIFT = 0.6  # exponent that brightens the photo's greys, which the dark end of the colours would swallow
LONGEST = 4  # times as long as wide: of what is longer, only the part around the crop is drawn
MOST_LAYERS = 12


def overlay(
    image: Image.Image, heat: Floats, *, box: Box | None = None, strength: float = STRENGTH
) -> Image.Image:
    """Draw ``heat (h, w)``, from 0 to 1, over the ``box`` of the image it describes (default: all of it).

    What lies outside the box is dimmed.
    """
    canvas, inside = place(heat, box or (0, 0, *image.size), image.size)  # (H, W), (H, W)
    grey = np.asarray(image.convert("L"), dtype=np.float32)[..., None] / 255  # (H, W, 1)
    mixed = (1 - strength) * grey**LIFT + strength * _colours(canvas)  # (H, W, 3)
    mixed = np.where(inside[..., None], mixed, OUTSIDE * grey)
    return Image.fromarray((mixed * 255).round().astype(np.uint8))


def framed(image: Image.Image, box: Box) -> Image.Image:
    """The picture in its own colours, dimmed outside the box, with a thin line around what is inside."""
    _, inside = place(np.zeros((1, 1), dtype=np.float32), box, image.size)
    if inside.all():
        return image
    pixels = np.asarray(image, dtype=np.float32)  # (H, W, 3)
    dimmed = np.where(inside[..., None], pixels, OUTSIDE * pixels)
    out = Image.fromarray(dimmed.round().astype(np.uint8))
    width, height = image.size
    left, top = max(round(box[0]), 0), max(round(box[1]), 0)
    right, bottom = min(round(box[2]), width) - 1, min(round(box[3]), height) - 1
    thickness = max(width, height) // 160 or 1
    ImageDraw.Draw(out).rectangle((left, top, right, bottom), outline="white", width=thickness)
    return out


def for_display(image: Image.Image, box: Box, *, side: int) -> tuple[Image.Image, Box]:
    """The image with its longer side near ``side`` pixels, and the box on it.

    Tiny images grow by a whole factor and keep hard pixels, so that a heat map over them is smooth while
    the pixels stay what they are.
    """
    image, box = _trimmed(image, box)
    factor = side / max(image.size)
    if factor >= 2:
        after = image.width * int(factor), image.height * int(factor)
        enlarged = image.resize(after, Image.Resampling.NEAREST)
    else:
        after = max(round(image.width * factor), 1), max(round(image.height * factor), 1)
        # A photo of a scanner's size is halved a few times first, which looks the same and is much faster.
        enlarged = image.resize(after, Image.Resampling.LANCZOS, reducing_gap=3.0)
    return enlarged, scale_box(box, image.size, after)


def _trimmed(image: Image.Image, box: Box) -> tuple[Image.Image, Box]:
    """Without the far ends of an image that is a mere strip, whose crop nobody would see."""
    width, height = image.size
    across, down = min(width, LONGEST * height), min(height, LONGEST * width)
    if (across, down) == image.size:
        return image, box
    left = min(max(round((box[0] + box[2] - across) / 2), 0), width - across)
    top = min(max(round((box[1] + box[3] - down) / 2), 0), height - down)
    part = image.crop((left, top, left + across, top + down))
    return part, (box[0] - left, box[1] - top, box[2] - left, box[3] - top)


def data_uri(image: Image.Image) -> str:
    """The image inside an HTML page, without a file beside it."""
    buffer = io.BytesIO()
    # JPEG, because a page of photos would weigh ten times more as PNG
    image.save(buffer, format="JPEG", quality=90, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def draw_cluster(explanation: Explanation, k: int, picture: Image.Image, box: Box) -> Image.Image:
    """What was blacked out as cluster k, on the picture; where patches belong to one token, its outline."""
    drawn = overlay(picture, explanation.maps[k], box=box)
    if explanation.form == "soft" or explanation.of == "attention":
        return drawn
    return outlined(drawn, explanation.assignment, box=box, token=k)


def draw_layer(one: Layer, picture: Image.Image, box: Box) -> Image.Image:
    """What the tokens of a layer stand for: super tokens by their borders, groups as a mosaic."""
    if one.form == "hard":
        return mosaic(picture, one.assignment, box=box)
    return outlined(framed(picture, box), one.assignment, box=box)


def layer_title(one: Layer) -> tuple[str, str]:
    """The name of the layer, and how many tokens stand for how much."""
    patches = one.assignment.size
    dropped = f", {one.dropped} dropped" if one.dropped else ""
    return place_name(one.name), f"{one.tokens} tokens for {patches} patches{dropped}"


def place_name(tap: str) -> str:
    """Where in the model a tap sits."""
    return tap.removesuffix(".tap").removesuffix(".reduction") if tap != "tap" else "the model"


def drawn_layers(explanation: Explanation) -> list[Layer]:
    """The layers that are drawn: all, or of very many some, the first and the last among them."""
    layers = explanation.layers
    if len(layers) <= MOST_LAYERS:
        return list(layers)
    return [layers[round(i)] for i in np.linspace(0, len(layers) - 1, MOST_LAYERS)]


def figure(explanation: Explanation) -> Figure:
    """The image and its top clusters side by side, each with its drop in probability."""
    picture, box = for_display(explanation.image, explanation.crop_box, side=512)
    name = textwrap.shorten(explanation.class_name(explanation.target), 36, placeholder="…")
    p = explanation.probabilities[explanation.target]
    panels = [(framed(picture, box), f"{name}\nprobability {p:.2f}")]
    if explanation.form != "soft":
        now = Layer(explanation.layer, explanation.form, len(explanation.maps), explanation.assignment)
        panels.append((draw_layer(now, picture, box), "\n".join(layer_title(now))))
    for k in explanation.top:
        panels.append((draw_cluster(explanation, k, picture, box), f"cluster {k}\n{change(explanation, k)}"))
    return _panels(
        panels,
        f"{explanation.about}\n"
        "Each heat map is one cluster, the brighter the stronger. "
        "The number is how the probability changes when it is blacked out.",
    )


def layers_figure(explanation: Explanation) -> Figure:
    """The layers that divide the patches among tokens, side by side."""
    if not explanation.layers:
        raise UserError(
            f"{place_name(explanation.layer)} does not divide the patches among its tokens: every token "
            "looks at all of them; plot() shows its maps"
        )
    picture, box = for_display(explanation.image, explanation.crop_box, side=512)
    panels = [
        (draw_layer(one, picture, box), "\n".join(layer_title(one))) for one in drawn_layers(explanation)
    ]
    return _panels(panels, "Which patches each token stands for, layer by layer.")


def _panels(panels: Sequence[tuple[Image.Image, str]], caption: str) -> Figure:
    from matplotlib.figure import Figure  # not pyplot, which keeps figures alive and is not for threads

    columns = min(len(panels), 4)
    rows = math.ceil(len(panels) / columns)
    first = panels[0][0]
    height = 3 * first.height / first.width + 0.6  # inches, with the title
    fig = Figure(figsize=(3 * columns, height * rows + 0.6), layout="constrained")
    axes = list(fig.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.set_axis_off()
    for ax, (shown, title) in zip(axes, panels, strict=False):
        ax.imshow(np.asarray(shown))
        ax.set_title(title, fontsize=10, parse_math=False)  # a class may be called "$1"
    text = "\n".join(textwrap.fill(line, 38 * columns) for line in caption.splitlines())
    fig.supxlabel(text, fontsize=9, parse_math=False)
    return fig


def change(explanation: Explanation, k: int) -> str:
    """How blacking out cluster k changes the target's probability, as "−0.42"."""
    text = f"{-explanation.importance[k]:+.2f}".replace("-", "−")
    return "0.00" if text in ("+0.00", "−0.00") else text


def colour_stops(count: int = 9) -> list[str]:
    """The colour scheme from 0 to 1, as CSS colours."""
    rgb = (_colours(np.linspace(0, 1, count, dtype=np.float32)) * 255).round().astype(int)  # (count, 3)
    return [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in rgb]


def _colours(values: Floats) -> Floats:
    """``(..., 3)``, from 0 to 1."""
    from matplotlib import colormaps

    return colormaps[COLORMAP](values)[..., :3].astype(np.float32)
