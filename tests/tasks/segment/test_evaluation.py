"""The figures of an evaluation against counting pixel by pixel, and what they are of unusual data."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from visualtokens.data import BadImage
from visualtokens.data.segmentation import SegmentBatch
from visualtokens.errors import UserError
from visualtokens.tasks.segment import Inference, SegmentEvaluation, evaluate

NAMES = ["a", "b", "c", "d"]


class Echo(nn.Module):
    """Its logits are the first channel times a slope per class: darker pixels are of lower classes."""

    def __init__(self, classes: int = len(NAMES)) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(-1, 1, classes))
        self.norm = nn.BatchNorm2d(3).eval()
        self.calls: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        self.calls.append(tuple(x.shape))
        value = x[:, :1]
        return self.slope.view(1, -1, 1, 1) * value - value.square() * self.slope.square().view(1, -1, 1, 1)


def make_batch(
    sizes: list[tuple[int, int]], *, bad: int = 0, seed: int = 0, classes: int = 4
) -> SegmentBatch:
    """Images at the size of their masks, padded to the largest."""
    generator = torch.Generator().manual_seed(seed)
    height, width = (max(side) for side in zip(*sizes, strict=True)) if sizes else (4, 4)
    images = torch.zeros(len(sizes), 3, height, width)
    masks = torch.full((len(sizes), height, width), 255, dtype=torch.uint8)
    for i, (h, w) in enumerate(sizes):
        images[i, :, :h, :w] = 2 * torch.randn(3, h, w, generator=generator)
        masks[i, :h, :w] = torch.randint(classes, (h, w), generator=generator).to(torch.uint8)
        masks[i, 0, 0] = 255
    shapes = torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2)
    missing = tuple(BadImage(f"{i}.png", "damaged") for i in range(bad))
    return SegmentBatch(images, masks, shapes, shapes, torch.arange(len(sizes)), missing)


def by_hand(model: nn.Module, batches: list[SegmentBatch]) -> tuple[list[list[int]], float]:
    counts = [[0] * 4 for _ in range(4)]
    losses = []
    for batch in batches:
        for image, mask in batch:
            logits = model(image[None])[0].detach()  # (classes, H, W)
            for i, row in enumerate(mask.tolist()):
                for j, truth in enumerate(row):
                    if truth == 255:
                        continue
                    values = logits[:, i, j].tolist()
                    counts[truth][values.index(max(values))] += 1
                    losses.append(math.log(sum(math.exp(v - values[truth]) for v in values)))
    return counts, sum(losses) / len(losses)


def test_metrics_equal_counting_by_hand() -> None:
    batches = [
        make_batch([(5, 7), (3, 9), (5, 7)], bad=2),
        make_batch([]),
        make_batch([(1, 1), (4, 2)], seed=1),
    ]
    model = Echo().eval()
    counts, loss = by_hand(model, batches)
    found = evaluate(model.train(), batches, classes=NAMES, progress=False)
    assert found.confusion.tolist() == counts
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.images == 5
    assert [bad.path for bad in found.unreadable] == ["0.png", "1.png"]
    ious = []
    for k in range(4):
        predicted, truth = sum(row[k] for row in counts), sum(counts[k])
        ious.append(counts[k][k] / (predicted + truth - counts[k][k]))
    assert found.iou == pytest.approx(ious)
    assert found.miou == pytest.approx(sum(ious) / 4)
    assert found.pixel_accuracy == pytest.approx(sum(counts[k][k] for k in range(4)) / sum(map(sum, counts)))
    assert found.class_accuracy == pytest.approx([counts[k][k] / sum(counts[k]) for k in range(4)])
    assert found.metrics["miou"] == found.miou
    assert set(found.metrics) == {"loss", "miou", "pixel_accuracy", "class_accuracy"}


def test_miou_is_not_the_mean_over_images() -> None:
    """One image of a single pixel, all right, and a large one that is all wrong."""
    confusion = torch.tensor([[1, 0], [99, 0]])
    found = SegmentEvaluation(confusion, 0.0, 2, ())
    assert found.iou == [0.01, 0.0]
    assert found.miou == pytest.approx(0.005)


def test_absent_classes() -> None:
    """0 is correct, 1 is mistaken for 3, 2 is neither labelled nor predicted, 3 is only predicted."""
    confusion = torch.tensor([[6, 0, 0, 0], [0, 0, 0, 4], [0, 0, 0, 0], [0, 0, 0, 0]])
    found = SegmentEvaluation(confusion, 0.0, 1, ())
    assert found.iou == [1.0, 0.0, None, 0.0]
    assert found.miou == pytest.approx(1 / 3)
    assert found.class_accuracy == [1.0, 0.0, None, None]
    assert found.pixel_accuracy == 0.6
    assert all(math.isfinite(value) for value in found.metrics.values())


def test_images_of_one_size_run_together_without_padding() -> None:
    model = Echo().eval()
    evaluate(model, [make_batch([(5, 7), (3, 9), (5, 7)])], classes=NAMES, progress=False)
    assert sorted(model.calls) == [(1, 3, 3, 9), (2, 3, 5, 7)]


def test_metrics_do_not_depend_on_the_batch() -> None:
    whole = make_batch([(5, 7), (3, 9), (5, 7), (2, 2)])
    alone = whole.split(4)
    model = Echo()
    together = evaluate(model, [whole], classes=NAMES, progress=False)
    apart = evaluate(model, alone, classes=NAMES, progress=False)
    assert torch.equal(together.confusion, apart.confusion)
    assert together.loss == pytest.approx(apart.loss, rel=1e-6)


def test_training_flag_is_restored() -> None:
    model = Echo().train()
    model.norm.eval()
    evaluate(model, [make_batch([(2, 2)])], classes=NAMES, progress=False)
    assert model.training
    assert not model.norm.training


def test_nothing_to_evaluate() -> None:
    with pytest.raises(UserError, match="nothing to evaluate: 3 images could not be read"):
        evaluate(Echo(), [make_batch([], bad=3)], classes=NAMES, progress=False)
    blank = make_batch([(3, 3)])
    blank.masks[:] = 255
    with pytest.raises(UserError, match="no pixel of 1 mask has a class"):
        evaluate(Echo(), [blank], classes=NAMES, progress=False)


def test_inference_options_are_used() -> None:
    model = Echo()
    inference = Inference(scales=(1.0, 2.0), flip=True)
    evaluate(model, [make_batch([(4, 6)])], classes=NAMES, inference=inference, progress=False)
    assert sorted(model.calls) == [(1, 3, 4, 6)] * 2 + [(1, 3, 8, 12)] * 2
