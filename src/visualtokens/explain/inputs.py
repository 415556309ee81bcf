"""From what the caller gives (a PIL image or a tensor) to what the model takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor, nn

from visualtokens.data import Preprocess
from visualtokens.data.decode import as_rgb
from visualtokens.errors import UserError
from visualtokens.explain.geometry import Box

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
