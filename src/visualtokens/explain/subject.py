"""What is explained: one score of a model for one image, whatever the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from visualtokens.data import Preprocess
from visualtokens.explain.importance import Floats
from visualtokens.explain.inputs import (
    Input,
    Score,
    Unit,
    as_batch,
    check_class,
    class_probabilities,
    class_score,
    prepare,
)
from visualtokens.modes import eval_mode

# What the score is about: the class of the image, that of an area of its pixels, or one object.
Kind = Literal["image", "area", "object"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """The score that an explanation divides among the regions of an image.

    ``model`` takes ``inputs.x`` as a batch and has the layers from which the regions come; ``score`` runs it,
    with whatever follows it, on such batches. In the unit "probability" and ``against`` no class, the score
    of the image is ``probabilities[target]``.
    """

    model: nn.Module
    inputs: Input
    score: Score  # images (B, 3, H, W), normalised → (B,)
    probabilities: Floats  # (classes,): of the image, the area or the object
    target: int  # the explained class
    against: int | None = None  # the score is the difference from this class
    unit: Unit = "probability"
    kind: Kind = "image"
    focus: NDArray[np.bool_] | None = None  # (H, W) of x: the pixels that the score is about, if not all


def class_subject(
    model: nn.Module,
    image: Image.Image | Tensor,
    *,
    preprocess: Preprocess | None = None,
    target: int | None = None,
    against: int | None = None,
    unit: Unit = "probability",
    classes: Sequence[str] | None = None,
) -> Subject:
    """The probability of a class, by default the predicted one, that a classifier gives an image."""
    inputs = prepare(model, image, preprocess)
    with eval_mode(model), torch.no_grad():
        probabilities = class_probabilities(model, as_batch(model, inputs.x))[0]  # (classes,)
    check_class(len(probabilities), classes, target=target, against=against)
    target = int(probabilities.argmax()) if target is None else target
    return Subject(
        model=model,
        inputs=inputs,
        score=class_score(model, target, against=against, unit=unit),
        probabilities=probabilities.cpu().numpy(),
        target=target,
        against=against,
        unit=unit,
    )
