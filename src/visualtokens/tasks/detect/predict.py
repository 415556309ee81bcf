"""What a detector sees on one image."""

from __future__ import annotations

import torch
from PIL import Image
from torch import nn
from torchvision.transforms.v2 import functional

from visualtokens.data.detection_sizes import to_floats
from visualtokens.errors import UserError
from visualtokens.tasks.detect.detections import Detections, from_detector


def predict(model: nn.Module, image: Image.Image, *, score: float = 0.5) -> Detections:
    """The objects on an RGB image that the detector is sure enough about, on the device it is on."""
    if not 0 <= score <= 1:
        raise UserError(f"score={score} is not between 0 and 1")
    if model.training:
        raise UserError("the detector is in training mode; call model.eval() first")
    pixels = functional.pil_to_tensor(image.convert("RGB")).to(next(model.parameters()).device)
    with torch.inference_mode():
        return from_detector(model([to_floats(pixels)])[0]).above(score)
