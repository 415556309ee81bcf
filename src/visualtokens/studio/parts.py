"""The HTML parts of the studio: answers, pictures side by side, the trade-off curve, and code to copy."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from shlex import quote

from PIL import Image

from visualtokens.explain.cards import bars, how_to_read, numbered_photo
from visualtokens.explain.explanation import Explanation
from visualtokens.explain.html import page
from visualtokens.explain.layers import Layer
from visualtokens.explain.render import Box, cut_to_box, data_uri, draw_layer, resize_for_display
from visualtokens.studio.workbench import Point, Setting, Source
from visualtokens.tasks.prediction import Classification

SIDE = 448  # pixels of the longer side of a picture

# The studio's own parts use the colours of its theme, in light and dark.
CSS = """
.dark { --color-accent: var(--primary-400); }
#photo img { width: 100%; object-fit: contain; }
:is(#left, #right) h2 { font-size: 1.1rem; overflow-wrap: anywhere; }
.vt-answer { margin: 0; padding: 0; list-style: none; font-variant-numeric: tabular-nums; }
.vt-answer li { display: grid; grid-template-columns: minmax(6rem, 1fr) 2fr 4rem; gap: .6rem;
  align-items: center; padding: .15rem 0; }
.vt-answer li:first-child { font-weight: 600; }
.vt-track { height: .7rem; border-radius: .35rem; background: var(--border-color-primary); overflow: hidden; }
.vt-track i { display: block; height: 100%; background: #2f6fb0; }
.vt-answer output { text-align: right; }
.vt-pair { display: flex; flex-wrap: wrap; gap: 1rem; }
.vt-pair figure { margin: 0; flex: 1 1 14rem; max-width: 28rem; }
.vt-pair img { width: 100%; height: auto; border-radius: .4rem; display: block; }
.vt-pair figcaption { padding-top: .35rem; }
.vt-answer + .vt-pair { margin-top: 1rem; }
.vt-frame { width: 100%; height: 31rem; border: 0; border-radius: .4rem; }
@media (max-width: 700px) {
  .vt-frame { height: 50rem; }
  .tab-wrapper button { padding: 0 .5rem !important; }
}
.vt-curve { width: 100%; max-width: 40rem; height: auto; }
.vt-curve text { fill: var(--body-text-color); font-size: 13px; }
.vt-facts { display: flex; flex-wrap: wrap; gap: .5rem 2rem; margin: .3rem 0 .8rem; }
.vt-facts div { min-width: 7rem; }
.vt-facts dt { font-size: .85rem; margin: 0; }
.vt-facts dd { margin: 0; font-size: 1.35rem; font-weight: 600; }
"""


def answer(found: Classification, *, before: Classification | None = None) -> str:
    """Return the most probable classes with bars; ``before``, the change of each is named."""
    known = {} if before is None else dict(zip(before.classes, before.probabilities, strict=True))
    rows = []
    for name, p in found.top:
        was = f' title="before: {float(known[name]):.1%}"' if name in known else ""
        bar = f'<span class="vt-track"><i style="width: {100 * p:.1f}%"></i></span>'
        rows.append(f"<li{was}><span>{escape(name)}</span>{bar}<output>{p:.1%}</output></li>\n")
    return f'<ol class="vt-answer" aria-label="Most probable classes">\n{"".join(rows)}</ol>\n'


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Return labels with values."""
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>\n" for name, value in pairs)
    return f'<dl class="vt-facts">\n{cells}</dl>\n'


def pair(pictures: Sequence[tuple[Image.Image, str]]) -> str:
    """Return pictures with captions, side by side if there is room."""
    figures = "".join(
        f'<figure><img src="{data_uri(picture)}" alt="{escape(caption)}"><figcaption>{escape(caption)}'
        "</figcaption></figure>\n"
        for picture, caption in pictures
    )
    return f'<div class="vt-pair">\n{figures}</div>\n'


def seen(image: Image.Image, box: Box) -> Image.Image:
    """Return the part of a photo that the model saw, for display."""
    return cut_to_box(*resize_for_display(image, box, side=SIDE))[0]


def mosaic(image: Image.Image, box: Box, layer: Layer) -> Image.Image:
    """Return the tokens of a layer, drawn on that part."""
    return draw_layer(layer, *cut_to_box(*resize_for_display(image, box, side=SIDE)))


def explanation_frame(explanation: Explanation) -> str:
    """Return the photo with its regions and their values, in the style of all pages, in a frame."""
    body = (
        f'<p class="intro">{escape(how_to_read(explanation))}</p>\n<div class="answer">\n'
        f'{numbered_photo(explanation, side=640)}<div class="effects">\n{bars(explanation)}</div>\n</div>\n'
    )
    css = (
        "main { max-width: none; padding: .5rem; } .answer { margin: 0; }\n"
        "@media (min-width: 480px) { .answer { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); "
        "gap: 24px; } .bars li { grid-template-columns: 3.6rem minmax(0, 1fr) 6.2rem; gap: 8px; } }\n"
    )
    document = page(f"Why {explanation.class_name(explanation.target)}", [body], css=css)
    title = "The regions that matter"
    return f'<iframe class="vt-frame" title="{title}" sandbox="" srcdoc="{escape(document)}"></iframe>'


# The trade-off.

WIDTH, HEIGHT, LEFT, BOTTOM, MARGIN = 640, 320, 72, 48, 36


def curve(points: Sequence[Point], here: Point, *, label: str) -> str:
    """Return the trade-off as SVG: the probability of the whole model's answer over the multiply-adds.

    The whole model is on the left, cheaper ones follow to the right.
    """
    least = min(point.share for point in [*points, here]) - 0.04
    axis = HEIGHT - BOTTOM

    def place(point: Point) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - MARGIN) * (1 - point.share) / (1 - least)
        return x, MARGIN + (axis - MARGIN) * (1 - point.probability)

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, points))
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#2f6fb0"><title>{point.share:.0%} of the '
        f"multiply-adds: {point.probability:.1%}</title></circle>\n"
        for point, (x, y) in zip(points, map(place, points), strict=True)
    )
    x, y = place(here)
    side = ("end", -12) if x > WIDTH * 0.8 else ("start", 12)
    marker = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="none" stroke="#c4501b" stroke-width="3"/>\n'
        f'<text x="{x + side[1]:.1f}" y="{y - 14:.1f}" text-anchor="{side[0]}" font-weight="600">'
        "you are here</text>\n"
    )
    shares = [tenth / 10 for tenth in range(10, 0, -1) if tenth / 10 > least]
    ticks = "".join(
        f'<text x="{place(Point(share, 0))[0]:.1f}" y="{axis + 18}" text-anchor="middle">{share:.0%}</text>\n'
        for share in shares
    )
    levels = "".join(
        f'<text x="{LEFT - 22}" y="{place(Point(1, p))[1] + 4:.1f}" text-anchor="end">{p:.0%}</text>'
        for p in (0, 0.5, 1)
    )
    described = "; ".join(f"{p.share:.0%} of the multiply-adds: {p.probability:.0%}" for p in points)
    return (
        f'<svg class="vt-curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(f"{label}. {described}.")}">\n'
        f'<path d="M{LEFT - 14},{MARGIN}V{axis}H{WIDTH - MARGIN}" fill="none" stroke="currentColor" '
        'opacity=".4"/>'
        f'<polyline points="{line}" fill="none" stroke="#2f6fb0" stroke-width="2"/>\n'
        f'{dots}{marker}{ticks}{levels}<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 8}" '
        'text-anchor="middle">share of the multiply-adds; faster to the right</text>\n</svg>\n'
    )


# Code to copy.


def python_lines(source: Source, setting: Setting, share: float) -> str:
    """Return the Python that reduces the same model in the same way."""
    imports, opened = "import visualtokens", f"model = visualtokens.load({source.name!r}).model"
    if not source.is_checkpoint:
        weights = (
            "pretrained=True" if source.weights == "pretrained" else f"checkpoint_path={source.weights!r}"
        )
        imports, opened = (
            "import timm\nimport visualtokens",
            (f"model = timm.create_model({source.name!r}, {weights}).eval()"),
        )
    return (
        f"{imports}\n\n{opened}\n# {share:.0%} of the multiply-adds\n"
        f"visualtokens.reduce(model, {setting.method!r}, keep={list(setting.keep)})"
    )


def command(source: Source, setting: Setting, share: float) -> str:
    """Return the command that does the same and writes a checkpoint."""
    weights = "" if source.is_checkpoint else f" --weights {quote(source.weights)}"
    budget = f"{share:.3f}".rstrip("0")
    return (
        f"vtok reduce {quote(source.name)}{weights} --method {setting.method} --macs {budget} --out reduced/"
    )
