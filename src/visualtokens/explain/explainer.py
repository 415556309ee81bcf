"""``explain``: run a classifier on an image and measure which regions its answer depends on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from visualtokens.data import Preprocess
from visualtokens.errors import UserError, unknown
from visualtokens.explain.evidence import PASS, STEPS, gradient_map, path_cost, path_map
from visualtokens.explain.explanation import Explanation, Variant
from visualtokens.explain.hiding import Filler, Hide, make_game, pixel_labels
from visualtokens.explain.importance import Floats, entropy, masked_probabilities, normalise, rank
from visualtokens.explain.inputs import (
    Input,
    Score,
    Unit,
    as_batch,
    check_class,
    check_positive,
    input_like,
)
from visualtokens.explain.layers import (
    Attention,
    assignment_of,
    attention_channels,
    form_of,
    layers_of,
    patch_attention,
    record_attention,
)
from visualtokens.explain.regions import LAST, Ints, Regions, consecutive, find_regions, select_layers
from visualtokens.explain.subject import Subject, class_subject
from visualtokens.explain.values import Game, attribution, greedy, shapley
from visualtokens.grouping import Grouping, Tap, record_groupings
from visualtokens.modes import eval_mode

MapSource = Literal["groups", "attention"]
Method = Literal["shapley", "greedy", "gradient", "cluster"]
METHOD: Method = "shapley"  # default
BUDGET = 128  # default
HIGHLIGHTED = 3  # regions of Explanation.only and Explanation.without


def explain(
    model: nn.Module,
    image: Image.Image | Tensor,
    *,
    method: Method = METHOD,
    preprocess: Preprocess | None = None,
    target: int | None = None,
    against: int | None = None,
    regions: int | Ints | None = None,
    layer: int | Sequence[int] | None = None,
    hide: Hide = "mean",
    budget: int = BUDGET,
    unit: Unit = "probability",
    path: int = STEPS,
    seed: int = 0,
    top: int = 6,
    of: MapSource = "groups",
    batch: int = 16,
    classes: Sequence[str] | None = None,
    truth: int | None = None,
) -> Explanation:
    """Which regions of an image the probability of a class depends on.

    ``image`` is a PIL image, transformed by ``preprocess`` (default: from the model's ``pretrained_cfg``),
    or a tensor ``(3, H, W)`` normalised in the same way. ``target`` is the class to explain, by default the
    predicted one; ``against`` another class, to explain why this one and not that; ``truth`` the true class,
    if known. ``classes`` are the class names. The ``top`` regions are drawn.

    ``method``:

    - "shapley": the share of each region in the score, over all orders in which regions could be shown
    - "greedy": the order in which hiding regions, one after the other, lowers the score fastest
    - "gradient": gradient times feature, by one backward pass
    - "cluster": PaCa-ViT, Sec. 3.5, the drop when one cluster of ``layer`` is masked, for models that group

    Regions come from the model's groupings at ``layer`` (counted from the first, or from the last if
    negative; several layers are intersected), or from its patch features if it groups nothing. By default
    ``layer`` is the last, and clusters that are vague (at most three places, or scattered over the image)
    give way to regions of patch features. ``regions`` is their number, at most (by default 24 of groupings
    and 12 of features), or their labels ``(h, w)`` themselves. ``hide`` is what stands in for hidden regions:
    "mean" colour, "black", "blur", "inpaint", or "tokens" to remove their tokens inside a vision transformer.
    ``budget`` is the number of forward passes, ``batch`` of them at a time; a smaller budget gives larger
    standard errors. The heat map of all patches, which :meth:`Explanation.saliency` returns, comes from
    gradients and attention while random halves of the image are hidden, and while the strongest patches are
    removed in ``path`` steps; with ``path=0`` it is made of the regions' values. ``unit`` is that of the
    score: "probability" or "log-odds". ``of="attention"`` lets "cluster" mask the patches that attend to
    each cluster.

    The model's mode, device and gradients are left unchanged.
    """
    subject = class_subject(
        model, image, preprocess=preprocess, target=target, against=against, unit=unit, classes=classes
    )
    return explain_subject(
        subject,
        method=method,
        regions=regions,
        layer=layer,
        hide=hide,
        budget=budget,
        path=path,
        seed=seed,
        top=top,
        of=of,
        batch=batch,
        classes=classes,
        truth=truth,
    )


def explain_subject(
    subject: Subject,
    *,
    method: Method = METHOD,
    regions: int | Ints | None = None,
    layer: int | Sequence[int] | None = None,
    hide: Hide = "mean",
    budget: int = BUDGET,
    path: int = STEPS,
    seed: int = 0,
    top: int = 6,
    of: MapSource = "groups",
    batch: int = 16,
    classes: Sequence[str] | None = None,
    truth: int | None = None,
) -> Explanation:
    """Which regions of an image the score of a ``subject`` depends on; the options are those of ``explain``.

    The tasks of this library describe what is explained: ``visualtokens.load("run/").explain(image)``.
    """
    check_positive(top=top, batch=batch, budget=budget)
    if method not in get_args(Method):
        raise unknown("method", method, get_args(Method))
    check_class(len(subject.probabilities), classes, target=subject.target, truth=truth)
    model, inputs = subject.model, subject.inputs
    with eval_mode(model), torch.no_grad():
        groupings, recorded = _record(subject, attention=method == "cluster")
        if method == "cluster":
            measured = _clusters(subject, groupings, recorded, layer=layer, of=of, batch=batch)
        else:
            x = as_batch(model, inputs.x)
            found = find_regions(model, x, groupings, regions=regions, layer=layer)
            found = _without_padding(found, inputs)
            # the heat map of a path needs a gradient in each step; a lost object has none
            steps = path if subject.kind == "image" else 0
            options: dict[str, Any] = dict(hide=hide, batch=batch, budget=budget, seed=seed, path=steps)
            measured = attribute(model, inputs, subject.score, found, method=method, **options)
    return Explanation(
        **measured,
        image=inputs.image,
        crop_box=inputs.crop_box,
        input_size=(inputs.x.shape[1], inputs.x.shape[2]),
        probabilities=subject.probabilities,
        target=subject.target,
        against=subject.against,
        truth=truth,
        classes=None if classes is None else tuple(classes),
        layers=layers_of(groupings),
        shown=top,
        method=method,
        unit=subject.unit,
        kind=subject.kind,
        focus=subject.focus,
    )


def _without_padding(regions: Regions, inputs: Input) -> Regions:
    """The regions, of which none consists of padding alone: padded patches join the last one before them."""
    h, w = regions.labels.shape
    below, right = inputs.padding
    rows = math.ceil(h * (1 - below / inputs.x.shape[1]))
    columns = math.ceil(w * (1 - right / inputs.x.shape[2]))
    if (rows, columns) == (h, w):
        return regions
    row, column = np.minimum(np.arange(h), rows - 1), np.minimum(np.arange(w), columns - 1)
    return Regions(consecutive(regions.labels[row[:, None], column]), regions.source)


def attribute(
    model: nn.Module,
    inputs: Input,
    score: Score,
    regions: Regions,
    *,
    method: Method,
    hide: Hide,
    budget: int,
    batch: int,
    seed: int = 0,
    path: int = STEPS,
) -> dict[str, Any]:
    """The fields of an :class:`Explanation` that depend on the ``score`` of any task and on the regions.

    ``path=0`` leaves the heat map out, for a score without gradients.
    """
    like = input_like(model)
    x, black = inputs.x.to(like.device), inputs.black.to(like.device)
    with torch.no_grad():
        game = make_game(model, x, regions.labels, score, hide=hide, black=black, batch=batch)
        heat, detail, passes = None, None, 0
        if method == "gradient":
            heat = gradient_map(model, x, score)  # (h, w)
            passes = 1 + PASS
            found = attribution(region_sums(heat, regions))
        elif method == "greedy":
            found = greedy(game, budget=budget)
        else:
            found = shapley(game, budget=budget, seed=seed)
        if path and method != "gradient":
            found_on_path = path_map(model, x, score, steps=path, seed=seed)
            if found_on_path is not None:
                heat, detail, passes = found_on_path.patches, found_on_path.pixels, path_cost(path)
        full, empty, evaluations = game.full, game.empty, game.evaluations + passes
        only, without = _variants(game, found.order[:HIGHLIGHTED], inputs, regions.labels, hide)
    masks = regions.masks()
    return dict(
        maps=masks,
        values=found.values.astype(np.float32),
        errors=None if found.errors is None else found.errors.astype(np.float32),
        entropy=np.log(regions.sizes).astype(np.float32),
        order=found.order,
        layer=regions.source,
        form="hard",
        regions=regions.labels,
        hide=hide,
        full=full,
        empty=empty,
        evaluations=evaluations,
        heat=heat,
        detail=detail,
        only=only,
        without=without,
    )


def variants(
    subject: Subject, explanation: Explanation, chosen: Sequence[int], *, batch: int = 16
) -> tuple[Variant, Variant]:
    """The image of an ``explanation`` of ``subject`` with only the ``chosen`` regions, and without them."""
    count = len(explanation.order)
    for k in chosen:
        if k not in range(count):
            raise UserError(f"region {k} does not exist; the explanation has regions 0 to {count - 1}")
    model, inputs, hide = subject.model, subject.inputs, cast(Hide, explanation.hide)
    like = input_like(model)
    x, black = inputs.x.to(like.device), inputs.black.to(like.device)
    with eval_mode(model), torch.no_grad():
        labels = explanation.regions
        game = make_game(model, x, labels, subject.score, hide=hide, black=black, batch=batch)
        return _variants(game, chosen, inputs, labels, hide)


def _variants(
    game: Game, chosen: Sequence[int], inputs: Input, labels: Ints, hide: Hide
) -> tuple[Variant, Variant]:
    """The image with only some regions, and without them."""
    best = np.zeros(game.players, dtype=bool)
    best[list(chosen)] = True
    scores = game(np.stack((best, ~best)))
    filler = Filler(inputs.x, "mean" if hide == "tokens" else hide, inputs.black)
    region = pixel_labels(labels, (inputs.x.shape[1], inputs.x.shape[2]))
    pictures = filler(torch.from_numpy(np.stack((best, ~best)))[:, region].unsqueeze(1))
    only, without = (
        Variant(tuple(np.flatnonzero(kept).tolist()), float(value), inputs.picture(picture))
        for kept, value, picture in zip((best, ~best), scores, pictures, strict=True)
    )
    return only, without


def region_sums(heat: Floats, regions: Regions) -> Floats:
    """``(K,)``: the sum of ``heat`` over each region."""
    labels = regions.labels
    rows = (np.arange(heat.shape[0]) * labels.shape[0]) // heat.shape[0]
    columns = (np.arange(heat.shape[1]) * labels.shape[1]) // heat.shape[1]
    sums = np.bincount(labels[rows[:, None], columns].ravel(), heat.ravel(), minlength=regions.count)
    return sums.astype(np.float64)


def _record(subject: Subject, *, attention: bool) -> tuple[Mapping[str, Grouping], Sequence[Attention]]:
    """The groupings by tap, and the attention, of the model on the image."""
    model, batch = subject.model, as_batch(subject.model, subject.inputs.x)
    taps = any(isinstance(module, Tap) for module in model.modules())
    if not taps and not attention:
        return {}, []
    with contextlib.ExitStack() as stack:
        groupings = stack.enter_context(record_groupings(model)) if taps else {}
        # of a model with taps, only the attention to its clusters is wanted
        recorder = record_attention(groupings, square=not taps)
        recorded = stack.enter_context(recorder) if attention else []
        subject.score(batch)
    return groupings, recorded


# PaCa-ViT, Sec. 3.5.


def _clusters(
    subject: Subject,
    groupings: Mapping[str, Grouping],
    recorded: Sequence[Attention],
    *,
    layer: int | Sequence[int] | None,
    of: MapSource,
    batch: int,
) -> dict[str, Any]:
    """The drop of the score when each cluster of one layer is masked.

    All clusters are measured, ``batch`` masked copies at a time.
    """
    if of not in get_args(MapSource):
        raise unknown("of", of, get_args(MapSource))
    layer = LAST if layer is None else layer
    if not isinstance(layer, int):
        raise UserError(f"layer={layer}: method='cluster' masks the clusters of one layer; give one number")
    if subject.against is not None or subject.unit != "probability":
        raise UserError("method='cluster' measures the probability of one class; leave against and unit out")
    inputs, score = subject.inputs, subject.score
    if groupings:
        maps, attention, described = _cluster_maps(subject.model, groupings, recorded, layer, of)
    else:
        maps, attention, described = _channel_maps(subject, recorded, layer, of)
    if not maps.isfinite().all():
        name = described["layer"]
        raise UserError(f"the clusters of {name} are not finite; check the model's weights and the image")
    like = input_like(subject.model)
    x, black = inputs.x.to(like.device), inputs.black.to(like.device)
    full = float(subject.probabilities[subject.target])
    drops = full - masked_probabilities(score, x, black, normalise(maps), batch=batch)  # (K,)
    entropies = entropy(maps)  # (K,)
    return described | dict(
        maps=normalise(maps).cpu().numpy(),
        values=drops.cpu().numpy(),
        entropy=entropies.cpu().numpy(),
        order=tuple(rank(drops.tolist(), entropies.tolist())),
        attention=None if attention is None else normalise(attention).cpu().numpy(),
        of=of,
        full=full,
        evaluations=2 + len(maps),
    )


def _cluster_maps(
    model: nn.Module,
    groupings: Mapping[str, Grouping],
    recorded: Sequence[Attention],
    layer: int,
    of: MapSource,
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """The maps to mask and the attention to the clusters, both ``(K, h, w)``, and what describes them."""
    (tap,) = select_layers(groupings, layer, type(model).__name__)
    grouping = groupings[tap]
    attention = patch_attention(recorded, tap, grouping)  # (K, h, w)
    maps = grouping.maps()[0].float() if of == "groups" else attention  # (K, h, w)
    if maps is None:
        raise UserError(f"no patches attend to the clusters of {tap}; explain it with of='groups'")
    return maps, attention, dict(layer=tap, form=form_of(grouping), regions=assignment_of(grouping))


def _channel_maps(
    subject: Subject, recorded: Sequence[Attention], layer: int, of: MapSource
) -> tuple[Tensor, None, dict[str, Any]]:
    """PaCa-ViT, Figs. 5 and 6: the columns of an attention matrix of a model that has no clusters."""
    kind = type(subject.model).__name__
    if of == "groups":
        raise UserError(
            f"{kind} does not group its patches; explain it with method='shapley', or after "
            "visualtokens.reduce, or its attention with of='attention'"
        )
    channels = attention_channels(recorded, (subject.inputs.x.shape[1], subject.inputs.x.shape[2]))
    if not -len(channels) <= layer < len(channels):
        raise UserError(f"layer={layer}, but {kind} has {len(channels)} attention layers over its patches")
    position = layer % len(channels)
    maps = channels[position]  # (M, h, w)
    assignment = maps.argmax(0).cpu().numpy()
    return maps, None, dict(layer=f"attention {position + 1}", form="soft", regions=assignment)
