"""The page of one explanation."""

from __future__ import annotations

from html import escape
from typing import Any

import torch

from visualtokens.explain.cards import (
    SIDE,
    bars,
    card,
    card_height,
    how_to_read,
    key,
    numbered_photo,
    tile,
    what_if,
)
from visualtokens.explain.explanation import Explanation
from visualtokens.explain.html import KeyFigure, Origin, bar, header, page, section
from visualtokens.explain.layers import Layer, quantise
from visualtokens.explain.render import (
    cut_to_box,
    data_uri,
    draw_layer,
    draw_subject,
    drawn_layers,
    format_change,
    layer_counts,
    module_name,
    overlay,
    resize_for_display,
)
from visualtokens.explain.view import token_view, view_frame

LARGE = 640  # pixels of the longer side of the main photo
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
VIEW = "Point at a patch or tap it: the token that represents it lights up in every layer."
TOKEN_NAMES = {"soft": "Clusters", "tessellation": "Super tokens", "hard": "Tokens"}
CLASSES = {
    "image": ("Class probabilities", "The most probable classes."),
    "area": ("Classes in this area", "The mean probability of each class over the outlined pixels."),
    "object": ("Classes of this object", "The best score × IoU with the outlined box, for each class."),
}
METHODS = {"shapley": "Shapley", "greedy": "Greedy", "gradient": "Gradient", "cluster": "Clusters"}


def explanation_page(
    explanation: Explanation,
    *,
    origin: Origin | None = None,
    beside: Explanation | None = None,
    interactive: bool = False,
) -> str:
    """The page of one explanation, and of another class of the same image ``beside`` it.

    An ``interactive`` page has the token view, with a script; without scripts it shows what other pages do.
    """
    title = _question(explanation)
    body = [header(title, _figures(explanation))]
    if explanation.method == "cluster":
        body.append(
            section("Cluster importance", how_to_read(explanation), key(explanation) + card(explanation))
        )
    else:
        body += [_regions(explanation), _what_if(explanation)]
    if beside is not None:
        body.append(_beside(explanation, beside))
    if explanation.attention is not None and explanation.of == "groups":
        body.append(section("Attention to the clusters", ATTENTION, _attention_strip(explanation)))
    if interactive or drawn_layers(explanation):
        body.append(_layers(explanation, interactive=interactive))
    heading, intro = CLASSES[explanation.kind]
    body.append(section(heading, intro, _class_table(explanation)))
    return page(title, body, origin=origin)


def _question(explanation: Explanation) -> str:
    target = explanation.class_name(explanation.target)
    if explanation.against is not None:
        return f"Why “{target}” rather than “{explanation.class_name(explanation.against)}”?"
    if explanation.kind != "image":
        return f"Why “{target}” here?"
    if not explanation.target_is_prediction:
        return f"What speaks for “{target}”?"
    if explanation.truth in (None, explanation.target):
        return f"Why “{target}”?"
    return f"Why “{target}” and not “{explanation.class_name(explanation.truth)}”?"


def _figures(explanation: Explanation) -> list[KeyFigure]:
    grid = " × ".join(map(str, explanation.maps.shape[1:]))
    where = f"on a grid of {grid} patches, in {module_name(explanation.layer)}"
    what = {"image": "Class", "area": "Class", "object": "Object"}[explanation.kind]
    name = explanation.class_name(explanation.target)
    score = explanation.score_name[0].upper() + explanation.score_name[1:]
    if explanation.method == "cluster":
        return [
            (what, name, explanation.about),
            (score, f"{explanation.full:.2f}", "of the whole image"),
            (TOKEN_NAMES[explanation.form], str(len(explanation.order)), where),
        ]
    hidden = "" if explanation.empty is None else f"; {explanation.empty:.2f} with every region hidden"
    passes = f"values, by {explanation.evaluations} forward passes"
    return [
        (what, name, explanation.about),
        (score, f"{explanation.full:.2f}", f"of the whole image{hidden}"),
        ("Regions", str(len(explanation.order)), where),
        ("Method", METHODS[explanation.method], passes),
    ]


# Regions.


def _regions(explanation: Explanation) -> str:
    body = (
        f'<div class="answer">\n{numbered_photo(explanation, side=LARGE)}'
        f'<div class="effects">\n{bars(explanation)}{_balance(explanation)}</div>\n</div>\n'
    )
    return section("The regions that matter", how_to_read(explanation), body)


def _balance(explanation: Explanation) -> str:
    """The sum of the values, for the methods whose values add up."""
    if explanation.empty is None or explanation.method == "gradient":
        return ""
    total = float(explanation.values.sum())
    text = f"{explanation.empty:.2f} with every region hidden, plus {total:.2f} from all regions, "
    return f'<p class="aside">{escape(text)}makes {explanation.empty + total:.2f}.</p>\n'


def _what_if(explanation: Explanation) -> str:
    """What the model sees, its heat map, and the image with and without its best regions."""
    image, box = cut_to_box(*resize_for_display(explanation.image, explanation.crop_box, side=SIDE))
    framed = data_uri(draw_subject(explanation, image, box))
    whole = tile(explanation, framed, "the whole image", explanation.full, alt="The whole image")
    if explanation.heat is not None:
        source = data_uri(overlay(image, explanation.patch_saliency(), box=box))
        alt = "How much the score depends on each patch"
        whole = _captioned(source, "every patch", "brighter matters more", alt=alt) + whole
    intro = (
        "The same model, asked again: with the best regions alone, and with everything but them. If the "
        "explanation is right, the first score stays high and the second one drops."
    )
    return section("Put to the test", intro, what_if(explanation, whole=whole))


def _beside(explanation: Explanation, other: Explanation) -> str:
    name = other.class_name(other.target)
    true = ", the true class" if explanation.truth == other.target else ""
    intro = (
        f"The same image and regions, explained for “{name}”{true}, whose {other.score_name} is "
        f"{other.full:.2f}. Regions are numbered anew, by their values for it."
    )
    body = (
        f'<div class="answer">\n{numbered_photo(other, side=LARGE)}'
        f'<div class="effects">\n{bars(other)}{what_if(other)}</div>\n</div>\n'
    )
    return section(f"And “{name}”?", intro, body)


# Layers, attention, classes.


def _layers(explanation: Explanation, *, interactive: bool) -> str:
    """The tokens of each layer as pictures, or as the token view, with the pictures in case of no scripts."""
    drawn = drawn_layers(explanation)
    strip = _layer_strip(explanation) if drawn else ""
    if not interactive:
        return section("Tokens of each layer", LAYERS[drawn[-1].form], strip)
    title = "Tokens of each layer" if explanation.layers else "Patches and regions"
    view = token_view(explanation.image, **_viewed(explanation))
    instead = "This needs JavaScript." + (f" {LAYERS[drawn[-1].form]}" if drawn else "")
    hidden = "<style>.token-view { display: none; }</style>\n" if drawn else ""  # the photo is in the strip
    fallback = f'<noscript>\n{hidden}<p class="intro">{escape(instead)}</p>\n{strip}</noscript>\n'
    return section(title, VIEW, fallback + view)


def _viewed(explanation: Explanation) -> dict[str, Any]:
    """The arguments of a token view. A model that groups nothing has one layer: the explained regions."""
    if explanation.layers:
        return dict(layers=explanation.layers, box=explanation.crop_box)
    maps = quantise(torch.from_numpy(explanation.maps)) if explanation.form == "soft" else None
    regions = Layer(explanation.layer, explanation.form, len(explanation.maps), explanation.regions, maps)
    return dict(layers=[regions], box=explanation.crop_box, noun="" if maps is not None else "region")


def explanation_frame(explanation: Explanation) -> str:
    """The token view and the values of the explanation in one frame, for notebooks."""
    viewed = _viewed(explanation)
    return view_frame(
        explanation.image,
        **viewed,
        caption=_question(explanation),
        after=card(explanation),
        after_height=card_height(explanation),
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
    """The most probable classes with a bar each; those that the page is about are among them."""
    best = explanation.probabilities.argsort(kind="stable")[::-1][:count].tolist()
    asked = (explanation.target, explanation.against, explanation.truth)
    best += [c for c in dict.fromkeys(asked) if c is not None and c not in best]
    rows = "".join(
        f'<tr><th scope="row">{escape(explanation.class_name(c))}{_mark(explanation, c)}</th>'
        f'<td class="number">{explanation.probabilities[c]:.3f}</td>'
        f'<td class="track">{bar(("lost", float(explanation.probabilities[c])))}</td></tr>\n'
        for c in best
    )
    return f'<div class="wide"><table class="list">\n<tbody>\n{rows}</tbody>\n</table></div>\n'


def _mark(explanation: Explanation, number: int) -> str:
    return " <small>true class</small>" if number == explanation.truth else ""
