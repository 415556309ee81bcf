"""The one call: run a model on an image and say which of its clusters mattered."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from PIL import Image
from torch import Tensor, nn

from visualtokens.data import Preprocess
from visualtokens.data.decode import as_rgb
from visualtokens.errors import UserError, unknown
from visualtokens.explain import importance as paca
from visualtokens.explain.explanation import Explanation
from visualtokens.explain.importance import Box
from visualtokens.explain.layers import (
    Attended,
    Layer,
    assignment_of,
    form_of,
    layers_of,
    on_patches,
    record_attention,
)
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


# Asking a classifier for probabilities, and leaving it as it was.


def probabilities(model: nn.Module, x: Tensor) -> Tensor:
    """``(B, classes)`` for ``x (B, 3, H, W)``."""
    logits, kind = model(x), type(model).__name__
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(
            f"{kind} gives {got}; explain a classifier that gives (B, classes), 2 or more classes"
        )
    if not logits.isfinite().all():
        raise UserError(f"{kind} gives values that are not finite; check its weights and the image")
    return logits.float().softmax(1)


def input_like(model: nn.Module) -> Tensor:
    """A tensor of the device and floating type that the model's input must have."""
    tensors = chain(model.parameters(), model.buffers())
    return next((t for t in tensors if t.is_floating_point()), torch.empty(0))


def check_class(count: int, classes: Sequence[str] | None, **numbers: int | None) -> None:
    """That there are as many names as classes, and that each of ``numbers`` is one of them, if given."""
    if classes is not None and len(classes) != count:
        raise UserError(f"{len(classes)} class names for a model of {count} classes; give one for each")
    for name, number in numbers.items():
        if number is not None and not 0 <= number < count:
            raise UserError(f"{name}={number}, but the model has {count} classes; give 0 to {count - 1}")


def check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise UserError(f"{name}={value}; give at least 1")


_modes: dict[nn.Module, tuple[int, list[tuple[nn.Module, bool]]]] = {}  # users now, flags before
_modes_lock = threading.Lock()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards every submodule has its own flag back.

    Threads that explain one model side by side share the switch: the first sets it, the last restores it.
    """
    with _modes_lock:
        users, flags = _modes.get(model) or (0, [(m, m.training) for m in model.modules()])
        _modes[model] = users + 1, flags
        model.eval()
    try:
        yield
    finally:
        with _modes_lock:
            users, flags = _modes.pop(model)
            if users > 1:
                _modes[model] = users - 1, flags
            else:
                for module, training in flags:
                    module.training = training


# From what the caller gives (a PIL image or a tensor) to what the model takes.

# Of an image that is cropped to fewer pixels a side, a heat map says nothing; the digits have 8.
LEAST_SIDE = 4


class TooSmall(UserError):
    """An image of which the model would see next to nothing."""


@dataclass(frozen=True)
class Input:
    """One image, as the model sees it and as the user knows it."""

    x: Tensor  # (3, H, W), normalised, float32
    black: Tensor  # (3, 1, 1): the normalised value of a black pixel
    image: Image.Image  # RGB, uncropped
    crop_box: Box  # the part of the image that x shows


def prepare(model: nn.Module, image: Image.Image | Tensor, preprocess: Preprocess | None) -> Input:
    """Apply ``preprocess``, or the one in the model's timm configuration, unless a tensor is given."""
    preprocess = preprocess or preprocess_of(model)
    mean = torch.tensor(preprocess.mean).view(3, 1, 1)
    std = torch.tensor(preprocess.std).view(3, 1, 1)
    if isinstance(image, Image.Image):
        image = as_rgb(image)
        box = preprocess.crop_box(*image.size)
        _check_box(image, box)
        return Input(preprocess(image), -mean / std, image, box)
    if isinstance(image, Tensor):
        x = _checked(image)
        picture = (x * std + mean).clamp(0, 1).mul(255).round().byte()  # (3, H, W)
        shown = Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())
        return Input(x, -mean / std, shown, (0.0, 0.0, float(shown.width), float(shown.height)))
    raise UserError(
        f"image is a {type(image).__name__}; give a PIL image (visualtokens.data.read_image opens a file) "
        "or a normalised (3, H, W) tensor"
    )


def _check_box(image: Image.Image, box: Box) -> None:
    across, down = box[2] - box[0], box[3] - box[1]
    if min(across, down) < LEAST_SIDE:
        raise TooSmall(
            f"the image has {image.width}×{image.height} pixels, of which the model sees "
            f"{across:.3g}×{down:.3g}: too few to explain, give a larger one"
        )


def preprocess_of(model: nn.Module) -> Preprocess:
    """What the model's timm configuration says: size, mean, std and centre crop."""
    from timm.data import resolve_model_data_config

    kind = type(model).__name__
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if not config:
        raise UserError(
            f"{kind} does not say how its images are prepared (it has no pretrained_cfg); "
            "give preprocess=visualtokens.data.Preprocess(...)"
        )
    data = resolve_model_data_config(model, pretrained_cfg=config)
    if data["crop_mode"] != "center":
        raise UserError(
            f"{kind} wants its images cropped in the mode {data['crop_mode']!r}, not 'center'; "
            "give preprocess=visualtokens.data.Preprocess(...) or a tensor with it"
        )
    return Preprocess(data["input_size"][1:], data["mean"], data["std"], data["crop_pct"])


def _checked(image: Tensor) -> Tensor:
    if image.ndim != 3 or image.shape[0] != 3:
        raise UserError(f"image has shape {tuple(image.shape)}; give one image as a (3, H, W) tensor")
    if not image.is_floating_point():
        raise UserError(f"image is a {image.dtype} tensor; give normalised floats, or a PIL image")
    if not image.isfinite().all():
        raise UserError("image has values that are not finite; check how it was normalised")
    return image.detach().float().cpu()
