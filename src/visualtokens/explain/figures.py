"""Explanations as matplotlib figures: pictures side by side."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from visualtokens.errors import UserError
from visualtokens.explain.layers import Layer
from visualtokens.explain.render import (
    Box,
    draw_cluster,
    draw_layer,
    draw_numbered,
    draw_subject,
    drawn_layers,
    format_change,
    layer_counts,
    module_name,
    overlay,
    resize_for_display,
    signed,
)
from visualtokens.tables import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from visualtokens.explain.explanation import Explanation


def figure(explanation: Explanation) -> Figure:
    """The image and its top regions or clusters, each with its value."""
    image, box = resize_for_display(explanation.image, explanation.crop_box, side=512)
    name = textwrap.shorten(printable(explanation.class_name(explanation.target)), 36, placeholder="…")
    first = (
        draw_subject(explanation, image, box),
        f"{name}\n{explanation.score_name} {explanation.full:.2f}",
    )
    if explanation.method != "cluster":
        return _panels([first, *_region_panels(explanation, image, box)], printable(explanation.about))
    panels = [first]
    if explanation.form != "soft":
        layer = Layer(explanation.layer, explanation.form, len(explanation.maps), explanation.regions)
        panels.append(_layer_panel(layer, image, box))
    for k in explanation.top:
        drawn = draw_cluster(explanation, k, image, box)
        panels.append((drawn, f"cluster {k}\n{format_change(explanation, k)}"))
    return _panels(
        panels,
        f"{printable(explanation.about)}\nEach heat map shows one cluster; brighter means a larger weight. "
        f"The number is the change of the {explanation.score_name} when the cluster is masked.",
    )


def _region_panels(explanation: Explanation, image: Image.Image, box: Box) -> list[tuple[Image.Image, str]]:
    values = [f"{i}: {signed(explanation.values[k])}" for i, k in enumerate(explanation.listed, start=1)]
    rows = [", ".join(values[i : i + 3]) for i in range(0, len(values), 3)]
    panels = [
        (draw_numbered(explanation, image, box), "\n".join(rows)),
        (overlay(image, explanation.patch_saliency(), box=box), "importance\nof every patch"),
    ]
    for variant, text in ((explanation.only, "only"), (explanation.without, "without")):
        if variant is not None:
            panels.append((variant.picture, f"{text} {explanation.highlighted}\n{variant.score:.2f}"))
    return panels


def layers_figure(explanation: Explanation) -> Figure:
    """The layers that divide the patches among tokens, side by side."""
    layers = drawn_layers(explanation)
    if not layers:
        raise UserError(
            f"{module_name(explanation.layer)} does not divide the patches among its tokens: every token "
            "has a weight on all of them; plot() shows the maps"
        )
    image, box = resize_for_display(explanation.image, explanation.crop_box, side=512)
    panels = [_layer_panel(layer, image, box) for layer in layers]
    return _panels(panels, "The patches that each token represents, layer by layer.")


def _layer_panel(layer: Layer, image: Image.Image, box: Box) -> tuple[Image.Image, str]:
    return draw_layer(layer, image, box), f"{module_name(layer.name)}\n{layer_counts(layer)}"


def _panels(panels: Sequence[tuple[Image.Image, str]], caption: str) -> Figure:
    from matplotlib.figure import Figure  # pyplot would keep every figure alive and is not thread-safe

    columns = len(panels) if len(panels) <= 5 else 4
    rows = math.ceil(len(panels) / columns)
    first = panels[0][0]
    height = 3 * first.height / first.width + 0.6  # inches, with the title
    fig = Figure(figsize=(3 * columns, height * rows + 0.6), layout="constrained")
    axes = list(fig.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.set_axis_off()
    for ax, (image, title) in zip(axes, panels, strict=False):
        ax.imshow(np.asarray(image))
        ax.set_title(title, fontsize=10, parse_math=False)  # a class name may contain "$"
    text = "\n".join(textwrap.fill(line, 38 * columns) for line in caption.splitlines())
    fig.supxlabel(text, fontsize=9, parse_math=False)
    return fig
