"""The parts of a page that show one explanation: its photo with regions, values, clusters."""

from __future__ import annotations

import math
from html import escape
from typing import NamedTuple

from visualtokens.explain.explanation import Explanation, Variant
from visualtokens.explain.html import bar, by_width, file_name, wrappable
from visualtokens.explain.render import (
    MAX_ASPECT,
    colour_stops,
    data_uri,
    draw_cluster,
    draw_numbered,
    draw_subject,
    format_change,
    resize_for_display,
    signed,
)

SIDE = 384  # pixels of an image's longer side: sharp on a phone, small in a page of many
INTERVAL = 1.96  # standard errors on either side of a value: 95 %

CLUSTERS = (
    "The model groups the patches of an image into clusters; each heat map shows one cluster. Its region is "
    "masked with black and the model runs again: the further the score drops, the more the prediction "
    "depends on the cluster. Clusters are sorted by importance. A bar is the score; its dark end is "
    "the part that masking removes (blue) or adds (orange)."
)
ATTENTION_CLUSTERS = (
    "Every patch attends to a few clusters; each heat map shows the patches that attend to one cluster. They "
    "are masked with black and the model runs again: the further the score drops, the more the "
    "prediction depends on them. Clusters are sorted by importance."
)
VALUES = {
    "shapley": "Shapley values: how much the {score} rises when a region is shown, averaged over the orders "
    "in which the regions could be shown.",
    "greedy": "Regions are hidden one after the other, each time the one whose loss hurts most. The value of "
    "a region is the drop of the {score} at its turn.",
    "gradient": "The value of a region is the sum of gradient × feature over its patches: a linear estimate "
    "of what it adds to the {score}.",
}
HIDDEN = {
    "mean": "filled with the mean colour",
    "black": "blackened",
    "blur": "blurred",
    "inpaint": "filled in from their border",
    "tokens": "left out, by removing their tokens inside the model",
}


def how_to_read(explanation: Explanation) -> str:
    """What the regions and their values mean, in a few sentences."""
    if explanation.method == "cluster":
        return CLUSTERS if explanation.of == "groups" else ATTENTION_CLUSTERS
    value = VALUES[explanation.method].format(score=explanation.score_name)
    lines = "; lines are 95\N{NO-BREAK SPACE}% intervals" if explanation.errors is not None else ""
    yellow = "" if explanation.focus is None else " What is explained is outlined in yellow."
    colours = "Blue raises it, orange lowers it"
    return f"{value} Hidden regions are {HIDDEN[explanation.hide]}. {colours}{lines}.{yellow}"


def key(explanation: Explanation) -> str:
    """The legend of the heat maps of clusters; regions need none."""
    return colour_key() if explanation.method == "cluster" else ""


def colour_key() -> str:
    """The legend of the heat maps."""
    gradient = ", ".join(colour_stops())
    return (
        '<p class="key"><span>outside the cluster</span>'
        f'<i style="background: linear-gradient(90deg, {gradient})"></i><span>inside</span></p>\n'
    )


def card(explanation: Explanation, *, name: str = "", note: str = "", side: int = SIDE) -> str:
    """The image with its prediction, and its top regions or clusters, most important first.

    ``note`` is shown after the ``name`` of the image's file.
    """
    if explanation.method == "cluster":
        return _cluster_card(explanation, name, note, side)
    return (
        f'<article class="sample regions">\n<div>\n{numbered_photo(explanation, name=name, side=side)}'
        f'{what_if(explanation)}</div>\n<div class="effects">\n<div class="prediction">\n'
        f"{prediction(explanation, name, note)}</div>\n{bars(explanation)}</div>\n</article>\n"
    )


def card_height(explanation: Explanation) -> str:
    """The height of a card without name as CSS, enough for the layouts of page.css; 100% is its width."""
    ratio = min(explanation.image.height / explanation.image.width, MAX_ASPECT)
    if explanation.method == "cluster":
        wide = f"max({168 * ratio + 190:.0f}px, 16% * {ratio:.3f} + 180px)"
        return by_width((640, f"100% * {1.1 * ratio:.3f} + 320px"), (math.inf, wide))
    values = 110 + 37 * (len(explanation.listed) + 1)
    tiles = 132 + 90 if explanation.only is not None else 0
    wide = f"max(42% * {ratio:.3f} + {tiles}px, {values}px) + 50px"
    return by_width((640, f"100% * {ratio:.3f} + {tiles + values + 50}px"), (math.inf, wide))


def prediction(explanation: Explanation, name: str, note: str) -> str:
    """The predicted class, whether it is the true one, and the name of the image's file."""
    predicted, truth = explanation.predicted, explanation.truth

    def named(number: int) -> str:
        shown = probability(float(explanation.probabilities[number]))
        return f"{wrappable(explanation.class_name(number))} <b>{shown}</b>"

    lines = [f'<p class="class">{named(predicted)}</p>\n']
    if explanation.kind != "image":
        lines.append(f'<p class="aside">{escape(explanation.score_name)}</p>\n')
    elif truth is None:
        lines.append('<p class="aside">true class unknown</p>\n')
    elif truth == predicted:
        lines.append('<p class="truth correct">✓ correct</p>\n')
    else:
        lines.append(f'<p class="truth wrong">✗ true class: {named(truth)}</p>\n')
    if not explanation.target_is_prediction:
        target = wrappable(explanation.class_name(explanation.target))
        p = probability(float(explanation.probabilities[explanation.target]))
        lines.append(f'<p class="aside">explained class: {target} ({p})</p>\n')
    if name:
        after = f' <span class="nowrap">{escape(note)}</span>' if note else ""
        lines.append(f'<p class="aside">{file_name(name)}{after}</p>\n')
    return "".join(lines)


def probability(p: float) -> str:
    """A probability as HTML."""
    return "&lt; 0.01" if p < 0.005 else f"{p:.2f}"


# Regions.


def numbered_photo(explanation: Explanation, *, name: str = "", side: int) -> str:
    """The photo with the listed regions numbered."""
    image, box = resize_for_display(explanation.image, explanation.crop_box, side=side)
    alt = f"{name or 'The image'}, predicted as {explanation.class_name(explanation.predicted)}: "
    alt += f"its {len(explanation.listed)} most important regions, numbered"
    source = data_uri(draw_numbered(explanation, image, box))
    return f'<figure class="photo"><img src="{source}" alt="{escape(alt)}"></figure>\n'


def bars(explanation: Explanation) -> str:
    """A bar for the value of each listed region with its interval, and one for all others together."""
    listed = explanation.listed
    values = [float(explanation.values[k]) for k in listed]
    known = explanation.errors
    errors = [None if known is None else INTERVAL * float(known[k]) for k in listed]
    rest, others = float(explanation.values.sum()) - sum(values), len(explanation.values) - len(listed)
    ends = [v + sign * (e or 0.0) for v, e in zip(values, errors, strict=True) for sign in (-1, 1)]
    low, high = min(0.0, rest, *ends), max(0.0, rest, *ends)
    axis = Axis(low, high if high > low else low + 1)
    rows = [
        axis.row(f'<span class="no {_side(v)}">{i}</span>', v, e)
        for i, (v, e) in enumerate(zip(values, errors, strict=True), start=1)
    ]
    if others:
        noun = "other" if others == 1 else "others"
        rows.append(axis.row(f'<span class="rest">{others} {noun}</span>', rest, None))
    return f'<ol class="bars">\n{"".join(rows)}</ol>\n'


def _side(value: float) -> str:
    return "for" if value >= 0 else "against"


class Axis(NamedTuple):
    """The range of values that the width of a bar's track stands for."""

    low: float
    high: float

    def row(self, label: str, value: float, error: float | None) -> str:
        """A label, the bar from zero to the value with its interval, and the value as a number."""
        start, end = sorted((self._place(0), self._place(value)))
        width = max(end - start, 0.4)
        marks = f'<i class="{_side(value)}" style="left: {start:.1f}%; width: {width:.1f}%"></i>'
        if error:
            left, right = self._place(value - error), self._place(value + error)
            marks += f'<u style="left: {left:.1f}%; width: {right - left:.1f}%"></u>'
        marks += f'<s style="left: {self._place(0):.1f}%"></s>'
        spread = "" if error is None else f" <small>± {error:.{self._decimals}f}</small>"
        amount = f'<span class="amount">{signed(value, self._decimals)}{spread}</span>'
        return f'<li>{label}<span class="effect">{marks}</span>{amount}</li>\n'

    def _place(self, value: float) -> float:
        """The position on the track, in percent."""
        return 100 * (value - self.low) / (self.high - self.low)

    @property
    def _decimals(self) -> int:
        """Two, or as many as small values need to differ."""
        return 2 if self.high - self.low > 0.1 else 3 if self.high - self.low > 0.01 else 4


def what_if(explanation: Explanation, *, whole: str = "") -> str:
    """The image with its best regions only, and without them, each with its score; ``whole`` comes first."""
    parts = [(explanation.only, "only"), (explanation.without, "without")]
    items = [_variant(explanation, variant, word) for variant, word in parts if variant is not None]
    return f'<ol class="whatif">\n{whole}{"".join(items)}</ol>\n' if items else ""


def _variant(explanation: Explanation, variant: Variant, word: str) -> str:
    picture, _ = resize_for_display(variant.picture, (0, 0, *variant.picture.size), side=224)
    text = f"{word} {explanation.highlighted}"
    return tile(explanation, data_uri(picture), text, variant.score, alt=f"The image {word} its best regions")


def tile(explanation: Explanation, source: str, text: str, score: float, *, alt: str) -> str:
    """A picture with its score and, if that is from 0 to 1, a bar."""
    scale = ""
    if explanation.unit == "probability" and explanation.against is None:
        scale = bar(("lost", min(max(score, 0.0), 1.0)))
    value = probability(score) if scale else signed(score)
    return (
        f'<li><img src="{source}" alt="{escape(alt)}"><p class="change"><b>{value}</b>{escape(text)}</p>'
        f"{scale}</li>\n"
    )


# Clusters.


def _cluster_card(explanation: Explanation, name: str, note: str, side: int) -> str:
    image, box = resize_for_display(explanation.image, explanation.crop_box, side=side)
    clusters = []
    for position, k in enumerate(explanation.top, start=1):
        drawn = draw_cluster(explanation, k, image, box)
        clusters.append(_cluster(explanation, k, position, data_uri(drawn)))
    alt = f"{name or 'The image'}, predicted as {explanation.class_name(explanation.predicted)}"
    return (
        '<article class="sample">\n<div class="subject">\n'
        f'<img src="{data_uri(draw_subject(explanation, image, box))}" alt="{escape(alt)}">\n'
        f'<div class="prediction">\n{prediction(explanation, name, note)}</div>\n</div>\n'
        f'<ol class="clusters">\n{"".join(clusters)}</ol>\n</article>\n'
    )


def _cluster(explanation: Explanation, k: int, position: int, source: str) -> str:
    before, after = float(explanation.probabilities[explanation.target]), explanation.masked_probability(k)
    change, score = format_change(explanation, k), explanation.score_name
    word = {"−": f"drop in {score}", "+": f"rise in {score}"}.get(change[0], "negligible change")
    alt = (
        f"Cluster {k}, number {position} in importance: "
        f"masking it changes the {score} from {before:.2f} to {after:.2f}"
    )
    difference = ("lost" if after <= before else "gained", abs(before - after))
    return (
        f'<li><img src="{source}" alt="{escape(alt)}"><p class="change"><b>{change}</b>{word}</p>'
        f"{bar(('kept', min(before, after)), difference)}</li>\n"
    )
