"""The one call: run a model on an image and say which of its clusters mattered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from PIL import Image
from torch import Tensor, nn

from visualtokens.data import Preprocess
from visualtokens.errors import UserError, unknown
from visualtokens.explain import importance as paca
from visualtokens.explain.attention import Attended, record_attention
from visualtokens.explain.classifier import (
    check_class,
    check_positive,
    evaluating,
    input_like,
    probabilities,
)
from visualtokens.explain.explanation import Explanation
from visualtokens.explain.inputs import Input, prepare
from visualtokens.explain.layers import Layer, assignment_of, form_of, layers_of, on_patches
from visualtokens.grouping import Grouping, Tap, record_groupings

View = Literal["groups", "attention"]


def explain(
    model: nn.Module,
    image: Image.Image | Tensor,
    *,
    preprocess: Preprocess | None = None,
    target: int | None = None,
    layer: int = -1,
    top: int = 6,
    of: View = "groups",
    batch: int = 16,
    classes: Sequence[str] | None = None,
    truth: int | None = None,
) -> Explanation:
    """PaCa Sec. 3.5: rank the clusters of one layer by what hiding each does to a class's probability.

    ``image`` is a PIL image, prepared by ``preprocess`` (by default as the model's ``pretrained_cfg``
    says), or a tensor ``(3, H, W)`` that is already normalised so. ``target`` is the class to explain,
    by default the predicted one; ``truth``, if known, is the right one: the explanation says so where the
    prediction is wrong. ``layer`` counts the model's groupings from the first, or back from the last if
    negative. ``of="attention"`` explains by the maps of how the patches attend to the clusters, instead
    of those of what the clusters are made of. ``top`` clusters are drawn; all are measured, ``batch`` at
    a time. ``classes`` names the classes.

    The model is left as it was: its mode, its device and its gradients are not touched.
    """
    check_positive(top=top, batch=batch)
    if of not in ("groups", "attention"):
        raise unknown("of", of, ("groups", "attention"))
    given = prepare(model, image, preprocess)
    with evaluating(model), torch.no_grad():
        look = _look(model, given.x, layer)
        check_class(len(look.probabilities), classes, target=target, truth=truth)
        chosen = int(look.probabilities.argmax()) if target is None else target
        maps = look.maps if of == "groups" else look.attention_maps()  # (K, h, w)
        drop = look.probabilities[chosen] - _hidden(model, given, maps, chosen, batch=batch)  # (K,)
    named = None if classes is None else tuple(classes)
    return _explanation(given, look, maps, drop, target=chosen, truth=truth, classes=named, of=of, top=top)


def _hidden(model: nn.Module, given: Input, maps: Tensor, target: int, *, batch: int) -> Tensor:
    """``(K,)``: the probability of the target once each of the maps ``(K, h, w)`` is blacked out."""
    like = input_like(model)

    def probability(pictures: Tensor) -> Tensor:
        return probabilities(model, pictures.to(like.dtype))[:, target]

    x, black = given.x.to(like.device), given.black.to(like.device)
    return paca.masked_probabilities(probability, x, black, paca.normalise(maps), batch=batch)


@dataclass(frozen=True)
class _Look:
    """What one pass over the untouched image shows."""

    probabilities: Tensor  # (classes,)
    layer: str  # the name of its tap
    grouping: Grouping
    maps: Tensor  # (K, h, w)
    attention: Tensor | None  # (K, h, w): how the patches attend to each cluster
    layers: tuple[Layer, ...]

    def attention_maps(self) -> Tensor:
        if self.attention is None:
            raise UserError(
                f"in {self.layer} no patches are seen to attend to the clusters; explain it with of='groups'"
            )
        return self.attention


def _explanation(
    given: Input,
    look: _Look,
    maps: Tensor,
    drop: Tensor,
    *,
    target: int,
    truth: int | None,
    classes: tuple[str, ...] | None,
    of: View,
    top: int,
) -> Explanation:
    spread = paca.entropy(maps)  # (K,)
    return Explanation(
        image=given.image,
        crop_box=given.crop_box,
        input_size=(given.x.shape[1], given.x.shape[2]),
        probabilities=look.probabilities.cpu().numpy(),
        target=target,
        truth=truth,
        classes=classes,
        maps=paca.normalise(maps).cpu().numpy(),
        importance=drop.cpu().numpy(),
        entropy=spread.cpu().numpy(),
        order=tuple(paca.rank(drop.tolist(), spread.tolist())),
        layer=look.layer,
        form=form_of(look.grouping),
        assignment=assignment_of(look.grouping),
        attention=None if look.attention is None else paca.normalise(look.attention).cpu().numpy(),
        of=of,
        layers=look.layers,
        shown=top,
    )


def _look(model: nn.Module, x: Tensor, layer: int) -> _Look:
    """Run the model on ``x (3, H, W)``."""
    kind, like = type(model).__name__, input_like(model)
    if not any(isinstance(module, Tap) for module in model.modules()):
        raise UserError(
            f"{kind} does not group its patches; explain one of visualtokens.list_models(), or a vision "
            "transformer that visualtokens.reduce has given fewer tokens"
        )
    with record_groupings(model) as recorded, record_attention(recorded, square=False) as attended:
        found = probabilities(model, x.to(like.device, like.dtype).unsqueeze(0))[0]
    groupings = on_patches(recorded, (x.shape[1], x.shape[2]))
    # Published schedules end with the class token alone: what has no tokens is no layer to explain.
    names = [name for name, one in groupings.items() if one.tokens]
    count = len(names)
    if not count:
        raise UserError(f"{kind} has no tokens left on this image that could be explained")
    if not -count <= layer < count:
        raise UserError(f"layer={layer}, but {kind} made {count} groupings; give {-count} to {count - 1}")
    name = names[layer]
    grouping = groupings[name]
    maps = grouping.maps()[0].float()  # (K, h, w)
    if not maps.isfinite().all():
        raise UserError(f"the clusters of {name} are not finite; check the model's weights and the image")
    return _Look(found, name, grouping, maps, _attention(grouping, name, attended), layers_of(groupings))


def _attention(grouping: Grouping, name: str, attended: Sequence[Attended]) -> Tensor | None:
    """``(K, h, w)``: how the patches attended to the clusters of this layer, when they last did.

    Recognised by its shape. With as many clusters as patches it could also be the clusters attending to
    each other, so then there is none: square ones are not recorded.
    """
    patches, tokens = grouping.grid[0] * grouping.grid[1], grouping.tokens
    for one in reversed(attended):
        if one.tap == name and one.weights.shape[1:] == (patches, tokens):
            return one.weights[0].T.unflatten(1, grouping.grid)  # (K, h, w)
    return None
