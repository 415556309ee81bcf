"""The building blocks of a page that needs nothing but itself: no script, no file, no network.

Every function here takes plain text and returns HTML; the escaping happens here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from visualtokens.explain.explanation import Explanation
from visualtokens.explain.render import (
    change,
    colour_stops,
    data_uri,
    draw_cluster,
    draw_layer,
    drawn_layers,
    for_display,
    framed,
    layer_title,
    overlay,
)
from visualtokens.explain.style import CSS

KeyFigure = tuple[str, str, str]  # label, value, note
SIDE = 384  # pixels of a picture's longer side: sharp on a phone, and a page of many stays small


def page(title: str, body: Iterable[str]) -> str:
    """A whole document."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(body)}</main>\n</body>\n</html>\n"
    )


def header(title: str, figures: Sequence[KeyFigure]) -> str:
    """The title and the key figures under it."""
    cells = "".join(
        f'<div><dt>{escape(label)}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="note">{escape(note)}</dd></div>\n'
        for label, value, note in figures
    )
    row = f'<dl class="figures">\n{cells}</dl>\n' if figures else ""
    return f"<header>\n<h1>{escape(title)}</h1>\n{row}</header>\n"


def section(title: str, intro: str, body: str) -> str:
    """A heading, one sentence on what is shown and how to read it, and what is shown (as HTML)."""
    return f'<section>\n<h2>{escape(title)}</h2>\n<p class="intro">{escape(intro)}</p>\n{body}</section>\n'


def notes(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>\n" for line in lines)
    return f'<ul class="notes">\n{items}</ul>\n'


def command(text: str) -> str:
    return f"<pre><code>{escape(text)}</code></pre>\n"


def colour_key() -> str:
    """What the colours of the heat maps mean."""
    gradient = ", ".join(colour_stops())
    return (
        '<p class="key"><span>outside the cluster</span>'
        f'<i style="background: linear-gradient(90deg, {gradient})"></i><span>at its heart</span></p>\n'
    )


def ranked_classes(explanation: Explanation, *, count: int = 5) -> str:
    """The most probable classes with a bar each."""
    best = explanation.probabilities.argsort(kind="stable")[::-1][:count].tolist()
    rows = "".join(
        f'<tr><th scope="row">{escape(explanation.class_name(c))}</th>'
        f'<td class="number">{explanation.probabilities[c]:.3f}</td>'
        f'<td class="track">{_bar(("lost", float(explanation.probabilities[c])))}</td></tr>\n'
        for c in best
    )
    return f'<div class="wide"><table class="list">\n<tbody>\n{rows}</tbody>\n</table></div>\n'


def sample_card(explanation: Explanation, *, name: str = "", side: int = SIDE) -> str:
    """The image with what the model said of it, and its top clusters, most important first."""
    picture, box = for_display(explanation.image, explanation.crop_box, side=side)
    clusters = []
    for position, k in enumerate(explanation.top, start=1):
        drawn = draw_cluster(explanation, k, picture, box)
        clusters.append(_cluster(explanation, k, position, data_uri(drawn)))
    alt = f"{name or 'The image'}, taken for {explanation.class_name(explanation.predicted)}"
    return (
        '<article class="sample">\n<div class="subject">\n'
        f'<img src="{data_uri(framed(picture, box))}" alt="{escape(alt)}">\n'
        f'<div class="verdict">\n{_verdict(explanation, name)}</div>\n</div>\n'
        f'<ol class="clusters">\n{"".join(clusters)}</ol>\n</article>\n'
    )


def layer_strip(explanation: Explanation) -> str:
    """What the tokens stand for, layer by layer."""
    picture, box = for_display(explanation.image, explanation.crop_box, side=SIDE)
    items = []
    for one in drawn_layers(explanation):
        name, count = layer_title(one)
        source = data_uri(draw_layer(one, picture, box))
        items.append(_captioned(source, str(one.tokens), name, alt=f"{name}: {count}"))
    return f'<ol class="clusters strip">\n{"".join(items)}</ol>\n'


def attention_strip(explanation: Explanation) -> str:
    """For each of the top clusters, how the patches attend to it."""
    if explanation.attention is None:
        return ""
    picture, box = for_display(explanation.image, explanation.crop_box, side=SIDE)
    items = []
    for k in explanation.top:
        drawn = overlay(picture, explanation.attention[k], box=box)
        alt = f"Where patches attend to cluster {k}"
        items.append(_captioned(data_uri(drawn), change(explanation, k), f"cluster {k}", alt=alt))
    return f'<ol class="clusters strip">\n{"".join(items)}</ol>\n'


def _captioned(source: str, value: str, caption: str, *, alt: str) -> str:
    return (
        f'<li><img src="{source}" alt="{escape(alt)}">'
        f'<p class="drop"><b>{escape(value)}</b>{escape(caption)}</p></li>\n'
    )


def _verdict(explanation: Explanation, name: str) -> str:
    said, p = explanation.predicted, explanation.probabilities[explanation.predicted]
    truth = explanation.truth
    lines = [f'<p class="says">{escape(explanation.class_name(said))} <b>{p:.2f}</b></p>\n']
    if truth == said:
        lines.append('<p class="truth right">✓ right</p>\n')
    elif truth is not None:
        lines.append(f'<p class="truth wrong">✗ wrong: it is {escape(explanation.class_name(truth))}</p>\n')
    else:
        lines.append('<p class="aside">whether it is right is not known</p>\n')
    if not explanation.target_is_prediction:
        lines.append(
            f'<p class="aside">explained: {escape(explanation.class_name(explanation.target))}</p>\n'
        )
    if name:
        lines.append(f'<p class="aside">{escape(name)}</p>\n')
    return "".join(lines)


def _cluster(explanation: Explanation, k: int, position: int, source: str) -> str:
    before, after = float(explanation.probabilities[explanation.target]), explanation.masked_probability(k)
    difference = change(explanation, k)
    word = {"−": "drop in probability", "+": "rise in probability"}.get(difference[0], "hardly any change")
    alt = (
        f"Cluster {k}, number {position} in importance: "
        f"without it the probability goes from {before:.2f} to {after:.2f}"
    )
    moved = ("lost" if after <= before else "gained", abs(before - after))
    return (
        f'<li><img src="{source}" alt="{escape(alt)}"><p class="drop"><b>{difference}</b>{word}</p>'
        f"{_bar(('kept', min(before, after)), moved)}</li>\n"
    )


def _bar(*parts: tuple[str, float]) -> str:
    """Parts of 0 to 1, side by side; the first of each is its style."""
    inside = "".join(f'<i class="{kind}" style="width: {100 * share:.1f}%"></i>' for kind, share in parts)
    return f'<div class="bar">{inside}</div>'
