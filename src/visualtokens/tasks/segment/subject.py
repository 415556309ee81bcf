"""What is explained about a segmented image: the probability of a class on the pixels predicted as it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional

from visualtokens.data.segmentation import SegmentPreprocess
from visualtokens.explain.inputs import Input, NotExplainable, as_batch, check_class, input_like
from visualtokens.explain.subject import Subject
from visualtokens.tasks.task import Checkpoint
from visualtokens.tasks.timm_models import has_fixed_size

MULTIPLE = 32  # of the sides of an explained image: the grids of all levels then divide it
BACKGROUND = "background"  # explained only if the image shows nothing else


def area_subject(
    checkpoint: Checkpoint, image: Image.Image, *, target: int | None, against: int | None
) -> Subject:
    """Return the mean probability of a class over the pixels predicted as it.

    By default the class with the largest area other than the background. With a class ``against`` it, the
    mean difference of the two probabilities.
    """
    model: Any = checkpoint.model
    inputs = _whole_image(checkpoint, image)
    like = input_like(model)
    with torch.no_grad():
        probabilities = model(as_batch(model, inputs.x)).float().softmax(1)[0]  # (classes, H, W)
    classes = checkpoint.classes
    check_class(len(probabilities), classes, target=target, against=against)
    predicted = probabilities.argmax(0)  # (H, W)
    target = _largest(predicted, classes) if target is None else target
    focus = predicted == target  # (H, W)
    if not focus.any():
        seen = ", ".join(classes[c] for c in predicted.unique().tolist())
        raise NotExplainable(f"no pixel is predicted as {classes[target]!r}; explain a class that is: {seen}")

    def score(images: Tensor) -> Tensor:
        p = model(images.to(like.device, like.dtype)).float().softmax(1)  # (B, classes, H, W)
        difference = p[:, target] if against is None else p[:, target] - p[:, against]
        return difference[:, focus].mean(1)

    return Subject(
        model=model,
        inputs=inputs,
        score=score,
        probabilities=probabilities[:, focus].mean(1).cpu().numpy(),
        target=target,
        against=against,
        kind="area",
        focus=focus.cpu().numpy(),
    )


def _largest(predicted: Tensor, classes: Sequence[str]) -> int:
    areas = torch.bincount(predicted.flatten(), minlength=len(classes))
    if BACKGROUND in classes and areas.count_nonzero() > 1:
        areas[classes.index(BACKGROUND)] = 0
    return int(areas.argmax())


def _rounded(side: int) -> int:
    return max(1, round(side / MULTIPLE)) * MULTIPLE


def _whole_image(checkpoint: Checkpoint, image: Image.Image) -> Input:
    """Return the whole image at the size of a prediction, rounded to multiples of 32."""
    preprocess: SegmentPreprocess = checkpoint.preprocess
    if has_fixed_size(checkpoint.config["model_args"]["backbone"]):
        size = preprocess.size
    else:
        height, width = preprocess.seen_size(*image.size)
        size = _rounded(height), _rounded(width)
    pixels = functional.resize(functional.pil_to_tensor(image.convert("RGB")), list(size), antialias=True)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preprocess.mean, preprocess.std))
    box = (0.0, 0.0, float(image.width), float(image.height))
    return Input(preprocess.normalise(pixels), mean, std, image.convert("RGB"), box)
