"""Inference of a segmentation model: several scales, mirrored images, a sliding window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.data.segmentation import SegmentPreprocess, mirrored_classes
from visualtokens.errors import UserError
from visualtokens.tasks.segment.heads import resize

STRIP = 8_000_000  # probabilities that are computed at once


@dataclass(frozen=True, kw_only=True)
class Inference:
    """Which views of an image the model sees; by default one, the whole image.

    The predictions of all views are averaged.
    """

    scales: tuple[float, ...] = (1.0,)  # sizes relative to that of the preprocessing
    flip: bool = False  # add the mirrored view of every scale
    window: int | None = None  # side of a square window that slides over a view; None sees it whole
    stride: int | None = None  # of the window; by default two thirds of its side

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
        """Return the logits ``(B, classes, h, w)`` of each view of ``images (B, 3, H, W)``.

        ``mirror[c]`` is the class of a mirrored object of class c (see ``mirrored_classes``).
        """
        views = []
        for scale in self.scales:
            size = [max(1, round(side * scale)) for side in images.shape[2:]]
            x = resize(images, size)
            views.append(self._logits(model, x))
            if self.flip:
                views.append(self._logits(model, x.flip(3)).flip(3)[:, list(mirror)])
        return views

    def _logits(self, model: nn.Module, x: Tensor) -> Tensor:
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
        assert total is not None  # for mypy: every image has a first window
        return total / count


def _starts(side: int, window: int, stride: int) -> list[int]:
    """Return the starts of windows that cover ``side``; the last one ends with it."""
    last = max(side - window, 0)
    return [*range(0, last, stride), last]


def probabilities(views: Sequence[Tensor], size: tuple[int, int]) -> Iterator[tuple[slice, Tensor]]:
    """Yield strips of rows with their class probabilities ``(rows, W, classes)`` at ``size`` (H, W).

    They are the mean over ``views (classes, h, w)`` of the softmax of the bilinearly resized logits. All
    H × W × classes at once may not fit into memory.
    """
    for rows in _strips(views[0], size):
        total = _resized_rows(views[0], rows, size).softmax(2)
        for view in views[1:]:
            total += _resized_rows(view, rows, size).softmax(2)
        yield rows, total.div_(len(views))


def _strips(view: Tensor, size: tuple[int, int]) -> Iterator[slice]:
    height, width = size
    step = max(1, STRIP // (len(view) * width))
    return (slice(top, min(top + step, height)) for top in range(0, height, step))


def _resized_rows(x: Tensor, rows: slice, size: tuple[int, int]) -> Tensor:
    """Return some rows ``(rows, W, C)`` of ``x (C, h, w)`` resized to ``size`` as by ``F.interpolate``."""
    height, width = size
    at = (torch.arange(rows.start, rows.stop, device=x.device) + 0.5) * (x.shape[1] / height) - 0.5
    at = at.clamp(0, x.shape[1] - 1)
    above = at.floor().long()
    below = (above + 1).clamp_max(x.shape[1] - 1)
    share = (at - above)[:, None]  # (rows, 1)
    mixed = torch.lerp(x[:, above].float(), x[:, below].float(), share)  # (C, rows, w)
    # Channels-last is four times as fast here, and the layout that a softmax over classes reads.
    mixed = mixed[None].contiguous(memory_format=torch.channels_last)
    wide = F.interpolate(mixed, (len(at), width), mode="bilinear", align_corners=False)[0]
    return wide.permute(1, 2, 0)


def labels_of(views: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
    """Return the most probable class of every pixel at ``size``: ``(H, W)`` uint8 on the CPU."""
    labels = torch.empty(size, dtype=torch.uint8)
    if len(views) == 1:  # the softmax does not change the order
        parts = ((rows, _resized_rows(views[0], rows, size)) for rows in _strips(views[0], size))
    else:
        parts = ((rows, p) for rows, p in probabilities(views, size))
    for rows, scores in parts:
        labels[rows] = scores.max(2).indices.to("cpu", torch.uint8)
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
    """Return the class of every pixel of an RGB image of any size: ``(H, W)`` uint8 on the CPU.

    The model must be in eval mode.
    """
    device = next(model.parameters()).device
    x = preprocess(image).to(device)  # (3, H, W)
    views = (inference or Inference())(model, x[None], mirror=mirrored_classes(classes))
    return labels_of([view[0] for view in views], (image.height, image.width))
