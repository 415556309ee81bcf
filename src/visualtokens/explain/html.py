"""HTML pages that need no script, file or network, and the page of one explanation.

Functions take plain text and return HTML; all escaping happens here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

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


def explanation_page(explanation: Explanation) -> str:
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
    title = f"Why “{name}”?"
    intro = CLUSTERS if explanation.of == "groups" else ATTENTION_CLUSTERS
    body = [header(title, figures), section("Cluster importance", intro, colour_key() + card(explanation))]
    if explanation.attention is not None and explanation.of == "groups":
        body.append(section("Attention to the clusters", ATTENTION, _attention_strip(explanation)))
    if explanation.layers:
        intro = LAYERS[explanation.layers[-1].form]
        body.append(section("Tokens of each layer", intro, _layer_strip(explanation)))
    body.append(section("Class probabilities", "The most probable classes.", _class_table(explanation)))
    return page(title, body)


# Parts of every page.


def page(title: str, body: Iterable[str]) -> str:
    """A whole document."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(body)}</main>\n</body>\n</html>\n"
    )


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
        f'<div><dt>{escape(label)}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="note">{escape(note)}</dd></div>\n'
        for label, value, note in figures
    )
    row = f'<dl class="figures">\n{cells}</dl>\n' if figures else ""
    return f"<header>\n<h1>{escape(title)}</h1>\n{row}</header>\n"


def section(title: str, intro: str, body: str) -> str:
    """A heading, an introduction and the content, which is HTML."""
    return f'<section>\n<h2>{escape(title)}</h2>\n<p class="intro">{escape(intro)}</p>\n{body}</section>\n'


def notes(lines: Sequence[str]) -> str:
    """A bullet list."""
    items = "".join(f"<li>{escape(line)}</li>\n" for line in lines)
    return f'<ul class="notes">\n{items}</ul>\n'


def command(text: str) -> str:
    """A shell command."""
    return f"<pre><code>{escape(text)}</code></pre>\n"


# Parts that show explanations.


def colour_key() -> str:
    """The legend of the heat maps."""
    gradient = ", ".join(colour_stops())
    return (
        '<p class="key"><span>outside the cluster</span>'
        f'<i style="background: linear-gradient(90deg, {gradient})"></i><span>inside</span></p>\n'
    )


def card(explanation: Explanation, *, name: str = "", side: int = SIDE) -> str:
    """The image with its prediction, and the top clusters by decreasing importance."""
    image, box = resize_for_display(explanation.image, explanation.crop_box, side=side)
    clusters = []
    for position, k in enumerate(explanation.top, start=1):
        drawn = draw_cluster(explanation, k, image, box)
        clusters.append(_cluster(explanation, k, position, data_uri(drawn)))
    alt = f"{name or 'The image'}, predicted as {explanation.class_name(explanation.predicted)}"
    return (
        '<article class="sample">\n<div class="subject">\n'
        f'<img src="{data_uri(frame_crop(image, box))}" alt="{escape(alt)}">\n'
        f'<div class="prediction">\n{_prediction(explanation, name)}</div>\n</div>\n'
        f'<ol class="clusters">\n{"".join(clusters)}</ol>\n</article>\n'
    )


def _prediction(explanation: Explanation, name: str) -> str:
    predicted, truth = explanation.predicted, explanation.truth
    p = explanation.probabilities[predicted]
    lines = [f'<p class="class">{escape(explanation.class_name(predicted))} <b>{p:.2f}</b></p>\n']
    if truth is None:
        lines.append('<p class="aside">true class unknown</p>\n')
    elif truth == predicted:
        lines.append('<p class="truth correct">✓ correct</p>\n')
    else:
        true_class = escape(explanation.class_name(truth))
        lines.append(f'<p class="truth wrong">✗ true class: {true_class}</p>\n')
    if not explanation.target_is_prediction:
        target = escape(explanation.class_name(explanation.target))
        lines.append(f'<p class="aside">explained class: {target}</p>\n')
    if name:
        lines.append(f'<p class="aside">{escape(name)}</p>\n')
    return "".join(lines)


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


# One column, system fonts, and two colours that colour-blind readers can tell apart.
CSS = """
:root {
  color-scheme: light dark;
  --page: #fbfaf7; --panel: #ffffff; --ink: #1b1c20; --soft: #62656e; --line: #e4e2dc; --track: #eceae4;
  --right: 31 94 168; --wrong: 196 73 17;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", sans-serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #131417; --panel: #1b1c21; --ink: #ededf0; --soft: #a2a5b0; --line: #2f3139; --track: #2b2d34;
    --right: 122 174 242; --wrong: 255 146 89;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 var(--font); font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%;
}
main { max-width: 1120px; margin: 0 auto; padding: clamp(24px, 6vw, 72px) clamp(18px, 4vw, 40px); }
h1 {
  margin: 0; max-width: 24ch; overflow-wrap: anywhere; text-wrap: balance;
  font-size: clamp(1.8rem, 1.3rem + 2.4vw, 2.9rem); line-height: 1.12; letter-spacing: -.022em;
  font-weight: 680;
}
h2 { margin: 0 0 6px; font-size: 1.35rem; line-height: 1.25; letter-spacing: -.012em; font-weight: 650; }
h3 { margin: 0 0 8px; font-size: .95rem; font-weight: 600; }
p { margin: 0; }
section { margin-top: clamp(44px, 6vw, 76px); }
.intro { max-width: 68ch; margin-bottom: 24px; color: var(--soft); text-wrap: pretty; }
img, svg { display: block; max-width: 100%; }

.figures {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 24px 28px;
  margin: clamp(26px, 4vw, 44px) 0 0; padding: 0;
}
.figures div { max-width: 320px; border-top: 2px solid var(--ink); padding-top: 10px; }
.figures dt { font-size: .875rem; font-weight: 600; }
.figures dd { margin: 0; overflow-wrap: anywhere; }
.figures .value { margin: 4px 0 2px; font-size: clamp(1.6rem, 1.2rem + 1.6vw, 2.2rem); line-height: 1.15;
  letter-spacing: -.02em; font-weight: 640; }
.figures .note { font-size: .875rem; line-height: 1.4; color: var(--soft); }

.panels { display: grid; gap: 28px 40px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 310px), 1fr)); }
figure { margin: 0; }
.chart { width: 100%; max-width: 500px; height: auto; font: 13px var(--font); }
.chart .grid { stroke: var(--line); stroke-width: 1; }
.chart .tick { fill: var(--soft); }
.chart .line { fill: none; stroke-width: 2.5; stroke-linecap: round; stroke-linejoin: round; }
.chart .end { font-weight: 650; }
.chart .main { stroke: rgb(var(--right)); } .chart .second { stroke: var(--soft); stroke-dasharray: 1.5 5; }
.chart .dot-main, .chart .end-main { fill: rgb(var(--right)); }
.chart .dot-second, .chart .end-second { fill: var(--soft); }

.wide { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 1px; font-size: .875rem; }
.matrix { font-size: .8rem; }
caption { caption-side: bottom; padding-top: 10px; text-align: left; color: var(--soft); }
th { font-weight: 500; color: var(--soft); }
tbody th { padding-right: 8px; text-align: right; max-width: 18ch; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }
thead th { padding-bottom: 4px; vertical-align: bottom; }
thead .tall { writing-mode: vertical-rl; transform: rotate(180deg); text-align: left; white-space: nowrap;
  padding: 4px 0 0; margin: 0 auto; }
.matrix td { min-width: 23px; height: 34px; padding: 0 1px; text-align: center; border-radius: 4px; }
@media (min-width: 700px) { .matrix td { min-width: 50px; height: 44px; }
  .matrix { font-size: 1rem; border-spacing: 2px; } }
.matrix .hit { background: rgb(var(--right) / calc(.1 + .3 * var(--share))); font-weight: 600; }
.matrix .miss { background: rgb(var(--wrong) / calc(.3 + .6 * var(--share))); font-weight: 700;
  outline: 1.5px solid rgb(var(--wrong)); outline-offset: -1.5px; }
.matrix .none { color: var(--soft); opacity: .45; }
.matrix .share { padding-left: 8px; text-align: right; color: var(--soft); }
.list td, .list th { max-width: none; padding: 7px 18px 7px 0; text-align: left;
  border-bottom: 1px solid var(--line); }
.list { border-spacing: 0; }
.list .number { text-align: right; }
.list .track { min-width: min(24vw, 220px); }
.list .bar { margin: 0; }

.key { display: flex; align-items: center; gap: 10px; margin-bottom: 20px;
  font-size: .875rem; color: var(--soft); white-space: nowrap; }
.key i { flex: 0 1 180px; height: 10px; border-radius: 5px; }
.sample {
  display: grid; grid-template-columns: 150px 1fr; gap: 20px 28px; margin-top: 16px; padding: 22px;
  background: var(--panel); border: 1px solid var(--line); border-radius: 14px;
}
.sample img { width: 100%; border-radius: 6px; }
.prediction { margin-top: 12px; line-height: 1.4; overflow-wrap: anywhere; }
.class { font-size: 1.2rem; font-weight: 650; letter-spacing: -.01em; }
.class b { font-weight: 400; color: var(--soft); }
.truth { font-size: .9rem; }
.truth.correct { color: rgb(var(--right)); }
.truth.wrong { color: rgb(var(--wrong)); font-weight: 650; }
.aside { margin-top: 4px; font-size: .8rem; color: var(--soft); }
.clusters { display: grid; grid-template-columns: repeat(6, 1fr); gap: 18px 14px;
  align-content: start; margin: 0; padding: 0; list-style: none; }
.change { margin-top: 8px; font-size: .75rem; line-height: 1.35; color: var(--soft); }
.change b { display: block; font-size: 1.1rem; font-weight: 650; color: var(--ink); }
.bar { display: flex; height: 6px; margin-top: 6px; border-radius: 3px; overflow: hidden;
  background: var(--track); }
.bar .kept { background: rgb(var(--right) / .35); } .bar .lost { background: rgb(var(--right)); }
.bar .gained { background: rgb(var(--wrong)); }
.strip { max-width: 900px; }
@media (max-width: 900px) { .clusters { grid-template-columns: repeat(3, 1fr); } }
@media (max-width: 640px) {
  .sample { grid-template-columns: 1fr; padding: 16px; }
  .subject { display: grid; grid-template-columns: 42% 1fr; gap: 16px; align-items: center; }
  .prediction { margin-top: 0; }
  .clusters { gap: 16px 10px; }
  .figures { grid-template-columns: 1fr 1fr; gap: 20px; }
  .key { font-size: .8rem; }
}

.notes { max-width: 72ch; margin: 0; padding-left: 1.2em; } .notes li + li { margin-top: 6px; }
pre { margin: 0; padding: 14px 16px; overflow-x: auto; background: var(--panel);
  border: 1px solid var(--line); border-radius: 10px; font: .875rem/1.5 var(--mono); }
@media print {
  :root { --page: #fff; } main { padding: 0; max-width: none; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .sample, .figures div, figure, .matrix, tr { break-inside: avoid; }
  h2, .intro, .key { break-after: avoid; break-inside: avoid; }
  .sample { grid-template-columns: 110px 1fr; padding: 14px; }
  .clusters { grid-template-columns: repeat(6, 1fr); gap: 10px; }
  pre { white-space: pre-wrap; }
}
"""
