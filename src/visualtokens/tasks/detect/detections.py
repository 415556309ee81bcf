"""Objects and detections, between this library and torchvision's detectors, whose labels count from 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visualtokens.data.detection import Objects
from visualtokens.tasks.detect.images import Detection


@dataclass(frozen=True, eq=False)
class Detections:
    """The n objects that a detector sees on an image, the surest first."""

    boxes: Tensor  # (n, 4) float32: left, top, right, bottom in pixels
    labels: Tensor  # (n,) int64: which of the classes, from 0
    scores: Tensor  # (n,) float32: 0 to 1
    masks: Tensor | None  # (n, H, W) bool; None of a detector of boxes

    def __len__(self) -> int:
        return len(self.labels)

    def above(self, score: float) -> Detections:
        """Those whose score is at least this."""
        keep = self.scores >= score
        masks = None if self.masks is None else self.masks[keep]
        return Detections(self.boxes[keep], self.labels[keep], self.scores[keep], masks)

    def to_dicts(self, classes: Sequence[str]) -> list[dict[str, Any]]:
        """Ready for JSON: class, score, box, and the pixels of the mask if there is one."""
        dicts: list[dict[str, Any]] = []
        for i, (box, label, score) in enumerate(
            zip(self.boxes.tolist(), self.labels.tolist(), self.scores.tolist(), strict=True)
        ):
            area = {} if self.masks is None else {"mask_pixels": int(self.masks[i].sum())}
            dicts.append({"class": classes[label], "score": score, "box": [round(x, 1) for x in box]} | area)
        return dicts


def from_detector(found: Detection) -> Detections:
    """What a detector gave for one image, on the CPU."""
    order = found["scores"].argsort(descending=True, stable=True)
    found = {name: value[order].cpu() for name, value in found.items()}
    return Detections(
        found["boxes"].float(), found["labels"] - 1, found["scores"].float(), found.get("masks")
    )


def to_target(objects: Objects) -> Detection:
    """What a detector is to learn from one image."""
    target = {"boxes": objects.boxes, "labels": objects.labels + 1}
    if objects.masks is not None:
        target["masks"] = objects.masks.to(torch.uint8)
    return target
