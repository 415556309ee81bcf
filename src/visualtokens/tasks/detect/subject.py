"""What is explained about the objects of an image: the score of one of them, where it was found."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import box_iou
from torchvision.transforms.v2 import functional

from visualtokens.data.detection import fit, to_floats
from visualtokens.errors import UserError
from visualtokens.explain.inputs import Input, NotExplainable, check_class, input_like
from visualtokens.explain.subject import Subject
from visualtokens.progress import count as number_of
from visualtokens.tasks.detect.detections import Detections, from_detector
from visualtokens.tasks.detect.detectors import DIVISOR, Detection
from visualtokens.tasks.task import Checkpoint


def object_subject(
    checkpoint: Checkpoint, image: Image.Image, *, target: int | None, against: int | None, number: int
) -> Subject:
    """Return the score of an object: the best score × IoU of the boxes of its class with its box.

    It is the object with the ``number``-th highest score, of the class ``target`` if one is given. PaCa-ViT,
    Sec. 3.5, measures average precision; on one image, that changes only when the object is lost, so the
    quantities that it is made of are used. With a class ``against`` it, the difference of the two scores.
    """
    model: Any = checkpoint.model
    inputs = _fitted(model, image)
    below, right = inputs.padding
    height, width = inputs.x.shape[1] - below, inputs.x.shape[2] - right
    like = input_like(model)
    mean, std = inputs.mean.to(like.device), inputs.std.to(like.device)

    def detect(images: Tensor) -> list[Detection]:
        pixels = images.to(like.device, like.dtype)[:, :, :height, :width] * std + mean
        return model(list(pixels))

    with torch.no_grad():
        found = from_detector(detect(inputs.x[None])[0])
    check_class(len(checkpoint.classes), checkpoint.classes, target=target, against=against)
    chosen = _choose(found, checkpoint, target, number)
    box, label = found.boxes[chosen].to(like.device), int(found.labels[chosen])

    def score(images: Tensor) -> Tensor:
        scores = [class_scores(one, box, len(checkpoint.classes)) for one in detect(images)]
        each = torch.stack(scores)  # (B, classes)
        return each[:, label] if against is None else each[:, label] - each[:, against]

    with torch.no_grad():
        probabilities = class_scores(detect(inputs.x[None])[0], box, len(checkpoint.classes))
    left, top, right_edge, bottom = (round(edge) for edge in box.tolist())
    focus = torch.zeros(inputs.x.shape[1:], dtype=torch.bool)
    focus[top : max(bottom, top + 1), left : max(right_edge, left + 1)] = True
    return Subject(
        model=model.backbone,
        inputs=inputs,
        score=score,
        probabilities=probabilities.cpu().numpy(),
        target=label,
        against=against,
        kind="object",
        focus=focus.numpy(),
    )


def class_scores(found: Detection, box: Tensor, classes: int) -> Tensor:
    """Return ``(classes,)``: the best score × IoU with ``box (4,)`` among the detections of each class."""
    matched = found["scores"].float() * box_iou(found["boxes"].float(), box[None].float())[:, 0]  # (n,)
    best = matched.new_zeros(classes)
    return best.scatter_reduce(0, found["labels"] - 1, matched, "amax")


def _choose(found: Detections, checkpoint: Checkpoint, target: int | None, number: int) -> int:
    """Return the index of the object to explain."""
    if number < 1:
        raise UserError(f"object={number}; give 1 for the object with the highest score, 2 for the next")
    candidates = list(range(len(found)))
    if target is not None:
        candidates = [i for i in candidates if int(found.labels[i]) == target]
    if number > len(candidates):
        kind = "object" if target is None else f"{checkpoint.classes[target]!r}"
        names = sorted({checkpoint.classes[c] for c in found.labels.tolist()})
        finds = f"; it finds {', '.join(names)}" if names else ""
        raise NotExplainable(
            f"object={number}, but the detector finds {number_of(len(candidates), kind)} on this image{finds}"
        )
    return candidates[number - 1]


def _fitted(model: Any, image: Image.Image) -> Input:
    """Return the image as the detector resizes, normalises and pads it."""
    transform = model.transform
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (transform.image_mean, transform.image_std))
    size = fit((image.height, image.width), short=transform.min_size[0], long=transform.max_size)
    pixels = to_floats(functional.pil_to_tensor(image.convert("RGB")))
    x = (functional.resize(pixels, list(size), antialias=True) - mean) / std
    below, right = (-side % DIVISOR for side in size)
    padded = F.pad(x, (0, right, 0, below))
    box = (0.0, 0.0, image.width * padded.shape[2] / size[1], image.height * padded.shape[1] / size[0])
    return Input(padded, mean, std, image.convert("RGB"), box, (below, right))
