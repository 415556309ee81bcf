"""What a model says about an image when it looks more than once, and in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.data.segmentation import mirrored_classes
from visualtokens.data.segmentation_transforms import SegmentPreprocess
from visualtokens.errors import UserError
from visualtokens.tasks.segment.heads import resize

STRIP = 8_000_000  # probabilities that are worked out at once


@dataclass(frozen=True, kw_only=True)
class Inference:
    """How a model looks at an image; by default once, at the whole of it."""

    scales: tuple[float, ...] = (1.0,)  # sizes to look at, relative to what the preprocessing gives
    flip: bool = False  # look at each also in the mirror
    window: int | None = None  # look through a square window of this side that moves over the image
    stride: int | None = None  # how far it moves; by default two thirds of its side

    def __post_init__(self) -> None:
        if not self.scales or min(self.scales) <= 0:
            raise UserError(f"scales={self.scales} must be one or more positive factors")
        if self.window is not None and self.window < 1:
            raise UserError(f"window={self.window} must be at least 1")
        if self.stride is not None and self.window is None:
            raise UserError(f"stride={self.stride} has no effect without a window; give both or neither")
        if self.stride is not None and not 1 <= self.stride <= (self.window or 0):
            raise UserError(f"stride={self.stride} must be from 1 to window={self.window}, or it leaves gaps")

    def __call__(self, model: nn.Module, images: Tensor, *, mirror: Sequence[int]) -> list[Tensor]:
        """Logits ``(B, classes, h, w)`` for each look at ``images (B, 3, H, W)``.

        ``mirror`` tells the class that each class is in a mirror (see ``mirrored_classes``).
        """
        looks = []
        for scale in self.scales:
            size = [max(1, round(side * scale)) for side in images.shape[2:]]
            x = resize(images, size)
            looks.append(self._look(model, x))
            if self.flip:
                looks.append(self._look(model, x.flip(3)).flip(3)[:, list(mirror)])
        return looks

    def _look(self, model: nn.Module, x: Tensor) -> Tensor:
        if self.window is None or max(x.shape[2:]) <= self.window:
            return model(x)
        stride = self.stride or max(1, self.window * 2 // 3)
        total: Tensor | None = None
        count = x.new_zeros(x.shape[2:])
        for top in _starts(x.shape[2], self.window, stride):
            for left in _starts(x.shape[3], self.window, stride):
                rows, columns = slice(top, top + self.window), slice(left, left + self.window)
                logits = model(x[:, :, rows, columns])
                if total is None:
                    total = logits.new_zeros(*logits.shape[:2], *x.shape[2:])
                total[:, :, rows, columns] += logits
                count[rows, columns] += 1
        assert total is not None  # for mypy: an image has a first window
        return total / count


def _starts(side: int, window: int, stride: int) -> list[int]:
    """Where windows begin, so that they cover ``side``; the last one ends with it."""
    last = max(side - window, 0)
    return [*range(0, last, stride), last]


def probabilities(looks: Sequence[Tensor], size: tuple[int, int]) -> Iterator[tuple[slice, Tensor]]:
    """The probability of every class at ``size`` (H, W), rows by rows: ``(rows, W, classes)``.

    The mean over ``looks (classes, h, w)`` of their softmax, each enlarged bilinearly first. The whole,
    H × W × classes, may not fit into memory, and nobody needs it at once.
    """
    for rows in _strips(looks[0], size):
        total = _enlarged(looks[0], rows, size).softmax(2)
        for look in looks[1:]:
            total += _enlarged(look, rows, size).softmax(2)
        yield rows, total.div_(len(looks))


def _strips(look: Tensor, size: tuple[int, int]) -> Iterator[slice]:
    height, width = size
    step = max(1, STRIP // (len(look) * width))
    return (slice(top, min(top + step, height)) for top in range(0, height, step))


def _enlarged(x: Tensor, rows: slice, size: tuple[int, int]) -> Tensor:
    """Some rows of ``x (C, h, w)`` enlarged to ``size`` as ``F.interpolate`` does it: ``(rows, W, C)``."""
    height, width = size
    at = (torch.arange(rows.start, rows.stop, device=x.device) + 0.5) * (x.shape[1] / height) - 0.5
    at = at.clamp(0, x.shape[1] - 1)
    above = at.floor().long()
    below = (above + 1).clamp_max(x.shape[1] - 1)
    share = (at - above)[:, None]  # (rows, 1)
    mixed = torch.lerp(x[:, above].float(), x[:, below].float(), share)  # (C, rows, w)
    # Channels-last is four times as fast here, and is what a softmax over classes wants.
    mixed = mixed[None].contiguous(memory_format=torch.channels_last)
    wide = F.interpolate(mixed, (len(at), width), mode="bilinear", align_corners=False)[0]
    return wide.permute(1, 2, 0)


def labels_of(looks: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
    """The most probable class of every pixel at ``size`` (H, W), ``(H, W)`` uint8, on the CPU."""
    labels = torch.empty(size, dtype=torch.uint8)
    if len(looks) == 1:  # then probabilities have the order of the logits
        parts = ((rows, _enlarged(looks[0], rows, size)) for rows in _strips(looks[0], size))
    else:
        parts = ((rows, share) for rows, share in probabilities(looks, size))
    for rows, share in parts:
        labels[rows] = share.max(2).indices.to("cpu", torch.uint8)
    return labels


@torch.inference_mode()
def predict(
    model: nn.Module,
    image: Image.Image,
    *,
    preprocess: SegmentPreprocess,
    classes: Sequence[str],
    inference: Inference | None = None,
) -> Tensor:
    """The class of every pixel of an RGB image, ``(H, W)`` uint8, on the CPU.

    The model should be in evaluation mode. The image may have any size, from one pixel on.
    """
    device = next(model.parameters()).device
    x = preprocess(image).to(device)
    looks = (inference or Inference())(model, x.unsqueeze(0), mirror=mirrored_classes(classes))
    return labels_of([look[0] for look in looks], (image.height, image.width))
