"""A classifier and its input: preprocessing, class probabilities and the scores that are explained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, get_args

import torch
from PIL import Image
from torch import Tensor, nn

from visualtokens.data import Preprocess
from visualtokens.data.decode import as_rgb
from visualtokens.errors import UserError, unknown
from visualtokens.explain.render import Box
from visualtokens.progress import count as number_of

MIN_SIDE = 4  # pixels of the image inside the crop; a heat map over fewer is meaningless
Unit = Literal["probability", "log-odds"]
Score = Callable[[Tensor], Tensor]  # images (B, 3, H, W) → (B,), by running the model


def class_probabilities(model: nn.Module, x: Tensor) -> Tensor:
    """``(B, classes)`` for ``x (B, 3, H, W)``."""
    logits, kind = model(x), type(model).__name__
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(f"{kind} returns {got}; explain a classifier that returns (B, classes), classes ≥ 2")
    if not logits.isfinite().all():
        raise UserError(f"{kind} returns values that are not finite; check its weights and the image")
    return logits.float().softmax(1)


def class_score(model: nn.Module, target: int, *, against: int | None, unit: Unit) -> Score:
    """The score that is explained: images ``(B, 3, H, W)`` → ``(B,)``, differentiable.

    p of the target class, or log p / (1 − p). With another class ``against`` it, the difference of the two
    probabilities, or log p / q.
    """
    if unit not in get_args(Unit):
        raise unknown("unit", unit, get_args(Unit))
    like = input_like(model)

    def score(images: Tensor) -> Tensor:
        probabilities = class_probabilities(model, images.to(like.device, like.dtype))  # (B, classes)
        p = probabilities[:, target]
        if unit == "probability":
            return p if against is None else p - probabilities[:, against]
        other = 1 - p if against is None else probabilities[:, against]
        tiny = torch.finfo(p.dtype).tiny
        return p.clamp_min(tiny).log() - other.clamp_min(tiny).log()

    return score


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


class NotExplainable(UserError):
    """This image cannot be explained; others may be."""


@dataclass(frozen=True)
class Input:
    """The model's input for one image, and the image it came from."""

    x: Tensor  # (3, H, W), normalised, float32
    mean: Tensor  # (3, 1, 1)
    std: Tensor  # (3, 1, 1)
    image: Image.Image  # RGB, uncropped
    crop_box: Box  # the part of the image that x shows
    padding: tuple[int, int] = (0, 0)  # rows below and columns to the right of x that show nothing

    @property
    def black(self) -> Tensor:
        """``(3, 1, 1)``: the normalised value of a black pixel."""
        return -self.mean / self.std

    def picture(self, x: Tensor) -> Image.Image:
        """The normalised ``x (3, H, W)`` as an image, without padding and in the proportions of the crop."""
        below, right = self.padding
        shown = to_image(x[:, : x.shape[1] - below, : x.shape[2] - right], self.mean, self.std)
        left, top, end, bottom = self.crop_box  # with the padding
        stretched = (bottom - top) / x.shape[1] * x.shape[2] / (end - left)
        height = round(shown.height * stretched)
        # a segmenter's input has sides that are multiples of 32
        return shown if height == shown.height else shown.resize((shown.width, height))


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
        return Input(preprocess(image), mean, std, image, box)
    if isinstance(image, Tensor):
        x = _checked(image)
        recovered = to_image(x, mean, std)
        return Input(x, mean, std, recovered, (0.0, 0.0, float(recovered.width), float(recovered.height)))
    raise UserError(
        f"image is a {type(image).__name__}; give a PIL image (visualtokens.data.read_image opens a file) "
        "or a normalised (3, H, W) tensor"
    )


def to_image(x: Tensor, mean: Tensor, std: Tensor) -> Image.Image:
    """The image of the normalised ``x (3, H, W)``."""
    pixels = (x.cpu() * std + mean).clamp(0, 1).mul(255).round().byte()  # (3, H, W)
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


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
        raise NotExplainable(
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
