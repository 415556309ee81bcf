"""The loss against a loop over pixels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from visualtokens.errors import UserError
from visualtokens.tasks.segment import SegmentLoss, loss_of

CLASSES = 4


def example(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, CLASSES, 3, 5, generator=generator)
    masks = torch.randint(CLASSES, (2, 3, 5), generator=generator).to(torch.uint8)
    masks[0, 0] = 255
    masks[1, 2, 3] = 255
    return logits, masks


def slow(logits: Tensor, masks: Tensor, weights: list[float], smoothing: float) -> float:
    total, share = 0.0, 0.0
    for b, i, j in torch.cartesian_prod(*(torch.arange(n) for n in masks.shape)).tolist():
        label = int(masks[b, i, j])
        if label == 255:
            continue
        values = [math.exp(v) for v in logits[b, :, i, j].tolist()]
        logs = [math.log(v / sum(values)) for v in values]
        total -= (1 - smoothing) * weights[label] * logs[label]
        total -= smoothing / CLASSES * sum(w * log for w, log in zip(weights, logs, strict=True))
        share += weights[label]
    return total / share


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 0.0, 1.0]])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mean_over_labelled_pixels(weights: list[float] | None, smoothing: float) -> None:
    logits, masks = example()
    given = None if weights is None else torch.tensor(weights)
    expected = slow(logits, masks, weights or [1.0] * CLASSES, smoothing)
    assert loss_of(logits, masks, weights=given, smoothing=smoothing).item() == pytest.approx(
        expected, rel=1e-5
    )


def test_ignored_pixels_get_no_gradient() -> None:
    logits, masks = example()
    logits.requires_grad_()
    loss_of(logits, masks).backward()
    assert logits.grad is not None
    touched = logits.grad.abs().sum(1) > 0  # (B, H, W)
    assert torch.equal(touched, masks != 255)


@pytest.mark.parametrize("weights", [None, torch.tensor([0.0, 0.0, 1.0, 1.0])])
def test_loss_without_labels_is_zero(weights: Tensor | None) -> None:
    """All pixels are ignored, or all are of classes without weight."""
    logits, masks = example()
    logits.requires_grad_()
    masks[:] = 255 if weights is None else masks.clamp_max(1)
    masks[masks == 1] = 0
    loss = loss_of(logits, masks, weights=weights)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_low_precision_is_computed_in_float32() -> None:
    logits, masks = example()
    loss = loss_of(logits.bfloat16(), masks)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(loss_of(logits, masks).item(), rel=0.02)


def test_weights_by_name() -> None:
    loss = SegmentLoss(class_weights={"b": 3.0})
    weights = loss.weights(["a", "b", "c"])
    assert weights is not None
    assert weights.tolist() == [1.0, 3.0, 1.0]
    assert SegmentLoss().weights(["a"]) is None
    with pytest.raises(UserError, match="unknown class in class_weights 'b'"):
        loss.weights(["a", "c"])


@pytest.mark.parametrize(
    "options", [dict(smoothing=1.0), dict(auxiliary=-1.0), dict(class_weights={"a": -1.0})]
)
def test_wrong_options(options: dict) -> None:
    with pytest.raises(UserError, match="must be at least 0"):
        SegmentLoss(**options)
