"""``explain``: run a classifier on an image and measure which of its clusters the answer depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from PIL import Image
from torch import Tensor, nn

from visualtokens.data import Preprocess
from visualtokens.data.decode import as_rgb
from visualtokens.errors import UserError, unknown
from visualtokens.explain.explanation import Explanation
from visualtokens.explain.importance import entropy, masked_probabilities, normalise, rank
from visualtokens.explain.layers import (
    Attention,
    assignment_of,
    form_of,
    layers_of,
    patch_attention,
    record_attention,
)
from visualtokens.explain.render import Box
from visualtokens.grouping import Grouping, Tap, record_groupings
from visualtokens.modes import eval_mode
from visualtokens.progress import count as number_of

MapSource = Literal["groups", "attention"]
MIN_SIDE = 4  # pixels of the image inside the crop; a heat map over fewer is meaningless


def explain(
    model: nn.Module,
    image: Image.Image | Tensor,
    *,
    preprocess: Preprocess | None = None,
    target: int | None = None,
    layer: int = -1,
    top: int = 6,
    of: MapSource = "groups",
    batch: int = 16,
    classes: Sequence[str] | None = None,
    truth: int | None = None,
) -> Explanation:
    """PaCa-ViT, Sec. 3.5: rank the clusters of one layer by how far masking each lowers a class probability.

    ``image`` is a PIL image, transformed by ``preprocess`` (default: from the model's ``pretrained_cfg``),
    or a tensor ``(3, H, W)`` normalised in the same way. ``target`` is the class to explain, by default the
    predicted one; ``truth`` is the true class, if known. ``layer`` counts the model's groupings from the
    first, or from the last if negative. ``of="attention"`` masks the patches that attend to each cluster
    instead of those that form it. All clusters are measured, ``batch`` masked copies at a time; the ``top``
    ones are drawn. ``classes`` are the class names.

    The model's mode, device and gradients are left unchanged.
    """
    check_positive(top=top, batch=batch)
    if of not in ("groups", "attention"):
        raise unknown("of", of, ("groups", "attention"))
    inputs = prepare(model, image, preprocess)
    with eval_mode(model), torch.no_grad():
        probabilities, groupings, recorded = _record(model, inputs.x)
        check_class(len(probabilities), classes, target=target, truth=truth)
        target = int(probabilities.argmax()) if target is None else target
        tap = _select_layer(groupings, layer, type(model).__name__)
        grouping = groupings[tap]
        attention = patch_attention(recorded, tap, grouping)  # (K, h, w)
        maps = grouping.maps()[0].float() if of == "groups" else attention  # (K, h, w)
        if maps is None:
            raise UserError(f"no patches attend to the clusters of {tap}; explain it with of='groups'")
        if not maps.isfinite().all():
            raise UserError(f"the clusters of {tap} are not finite; check the model's weights and the image")
        masked = _masked_probabilities(model, inputs, maps, target, batch=batch)  # (K,)
        importance = probabilities[target] - masked  # (K,)
        entropies = entropy(maps)  # (K,)
    return Explanation(
        image=inputs.image,
        crop_box=inputs.crop_box,
        input_size=(inputs.x.shape[1], inputs.x.shape[2]),
        probabilities=probabilities.cpu().numpy(),
        target=target,
        truth=truth,
        classes=None if classes is None else tuple(classes),
        maps=normalise(maps).cpu().numpy(),
        importance=importance.cpu().numpy(),
        entropy=entropies.cpu().numpy(),
        order=tuple(rank(importance.tolist(), entropies.tolist())),
        layer=tap,
        form=form_of(grouping),
        assignment=assignment_of(grouping),
        attention=None if attention is None else normalise(attention).cpu().numpy(),
        of=of,
        layers=layers_of(groupings),
        shown=top,
    )


def _record(model: nn.Module, x: Tensor) -> tuple[Tensor, Mapping[str, Grouping], Sequence[Attention]]:
    """The class probabilities ``(classes,)`` of ``x (3, H, W)``, the groupings by tap, and the attention."""
    if not any(isinstance(module, Tap) for module in model.modules()):
        raise UserError(
            f"{type(model).__name__} does not group its patches; explain one of visualtokens.list_models(), "
            "or a timm ViT after visualtokens.reduce"
        )
    with record_groupings(model) as groupings, record_attention(groupings, square=False) as recorded:
        probabilities = class_probabilities(model, as_batch(model, x))[0]
    return probabilities, groupings, recorded


def _select_layer(groupings: Mapping[str, Grouping], layer: int, kind: str) -> str:
    """The tap of a layer, counted among those that have tokens.

    Published reduction schedules end with the class token alone, so the last blocks may have none.
    """
    taps = [tap for tap, grouping in groupings.items() if grouping.tokens]
    count = len(taps)
    if not count:
        raise UserError(f"{kind} has no tokens left on this image; reduce it with a larger keep")
    if not -count <= layer < count:
        raise UserError(f"layer={layer}, but {kind} made {count} groupings; give {-count} to {count - 1}")
    return taps[layer]


def _masked_probabilities(
    model: nn.Module, inputs: Input, maps: Tensor, target: int, *, batch: int
) -> Tensor:
    """``(K,)``: the probability of the target with the region of each map ``(K, h, w)`` masked."""
    like = input_like(model)

    def probability(images: Tensor) -> Tensor:
        return class_probabilities(model, images.to(like.dtype))[:, target]

    x, black = inputs.x.to(like.device), inputs.black.to(like.device)
    return masked_probabilities(probability, x, black, normalise(maps), batch=batch)


def class_probabilities(model: nn.Module, x: Tensor) -> Tensor:
    """``(B, classes)`` for ``x (B, 3, H, W)``."""
    logits, kind = model(x), type(model).__name__
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(f"{kind} returns {got}; explain a classifier that returns (B, classes), classes ≥ 2")
    if not logits.isfinite().all():
        raise UserError(f"{kind} returns values that are not finite; check its weights and the image")
    return logits.float().softmax(1)


def input_like(model: nn.Module) -> Tensor:
    """A tensor with the device and floating type of the model's input."""
    tensors = chain(model.parameters(), model.buffers())
    return next((t for t in tensors if t.is_floating_point()), torch.empty(0))


def as_batch(model: nn.Module, x: Tensor) -> Tensor:
    """The image ``x (3, H, W)`` as a batch of one, with the device and type of the model."""
    like = input_like(model)
    return x.to(like.device, like.dtype).unsqueeze(0)  # (1, 3, H, W)


def check_class(count: int, classes: Sequence[str] | None, **numbers: int | None) -> None:
    """Raise :class:`UserError` unless there are ``count`` class names and each given number is a class."""
    known = number_of(count, "class")
    if classes is not None and len(classes) != count:
        raise UserError(f"{number_of(len(classes), 'class name')} for a model of {known}; give one for each")
    for name, number in numbers.items():
        if number is not None and not 0 <= number < count:
            raise UserError(f"{name}={number}, but the model has {known}; give 0 to {count - 1}")


def check_positive(**values: int) -> None:
    """Raise :class:`UserError` for the first value below 1."""
    for name, value in values.items():
        if value < 1:
            raise UserError(f"{name}={value}; give at least 1")


# The model's input.


class TooSmall(UserError):
    """The model would see only a few pixels of the image."""


@dataclass(frozen=True)
class Input:
    """The model's input for one image, and the image it came from."""

    x: Tensor  # (3, H, W), normalised, float32
    black: Tensor  # (3, 1, 1): the normalised value of a black pixel
    image: Image.Image  # RGB, uncropped
    crop_box: Box  # the part of the image that x shows


def prepare(model: nn.Module, image: Image.Image | Tensor, preprocess: Preprocess | None) -> Input:
    """Apply ``preprocess``, by default that of the model's timm configuration, to a PIL image.

    A tensor ``(3, H, W)`` is already normalised; its image is recovered from the mean and std.
    """
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
        pixels = (x * std + mean).clamp(0, 1).mul(255).round().byte()  # (3, H, W)
        recovered = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        return Input(x, -mean / std, recovered, (0.0, 0.0, float(recovered.width), float(recovered.height)))
    raise UserError(
        f"image is a {type(image).__name__}; give a PIL image (visualtokens.data.read_image opens a file) "
        "or a normalised (3, H, W) tensor"
    )


def preprocess_of(model: nn.Module) -> Preprocess:
    """The size, mean, std and centre crop of the model's timm configuration."""
    from timm.data import resolve_model_data_config

    kind = type(model).__name__
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if not config:
        raise UserError(
            f"{kind} has no pretrained_cfg that describes its preprocessing; "
            "give preprocess=visualtokens.data.Preprocess(...)"
        )
    data = resolve_model_data_config(model, pretrained_cfg=config)
    if data["crop_mode"] != "center":
        raise UserError(
            f"{kind} uses crop mode {data['crop_mode']!r}, not 'center'; "
            "give preprocess=visualtokens.data.Preprocess(...) or a tensor with it"
        )
    return Preprocess(
        data["input_size"][1:], data["mean"], data["std"], data["crop_pct"], data["interpolation"]
    )


def _check_box(image: Image.Image, box: Box) -> None:
    width, height = box[2] - box[0], box[3] - box[1]
    if min(width, height) < MIN_SIDE:
        raise TooSmall(
            f"the image has {image.width}×{image.height} pixels, of which the model sees "
            f"{width:.3g}×{height:.3g}: too few to explain, give a larger one"
        )


def _checked(image: Tensor) -> Tensor:
    if image.ndim != 3 or image.shape[0] != 3:
        raise UserError(f"image has shape {tuple(image.shape)}; give one image as a (3, H, W) tensor")
    if not image.is_floating_point():
        raise UserError(f"image is a {image.dtype} tensor; give normalised floats, or a PIL image")
    if not image.isfinite().all():
        raise UserError("image has values that are not finite; check how it was normalised")
    return image.detach().float().cpu()
