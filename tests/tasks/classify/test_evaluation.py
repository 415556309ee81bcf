"""Loss, evaluation and prediction against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from visualtokens.data import BadImage, Batch, Preprocess
from visualtokens.errors import UserError
from visualtokens.tasks.classify import evaluate, loss_of, predict

CLASSES = 4


class Echo(nn.Module):
    """Reads its logits from the first pixels of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.BatchNorm1d(CLASSES).eval()

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        return self.scale * x.flatten(1)[:, :CLASSES]


def make_batches(sizes: list[int], *, bad: dict[int, int] | None = None) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    batches = []
    for i, size in enumerate(sizes):
        images = torch.randn(size, 3, 2, 2, generator=generator)
        labels = torch.randint(CLASSES, (size,), generator=generator)
        missing = tuple(BadImage(f"{i}-{j}.png", "damaged") for j in range((bad or {}).get(i, 0)))
        batches.append(Batch(images, labels, torch.arange(size), missing))
    return batches


def test_metrics_equal_counting_by_hand() -> None:
    batches = make_batches([5, 1, 0, 7], bad={0: 2, 2: 3})
    evaluation = evaluate(Echo(), batches, classes=CLASSES, progress=False)

    counts = torch.zeros(CLASSES, CLASSES, dtype=torch.long)
    losses = []
    for batch in batches:
        for image, label in zip(batch.images, batch.labels, strict=True):
            logits = image.flatten()[:CLASSES]
            counts[label, logits.argmax()] += 1
            losses.append(-(logits[label] - logits.exp().sum().log()))
    assert evaluation.images == 13
    assert torch.equal(evaluation.confusion, counts)
    assert not torch.equal(counts, counts.T), "rows and columns must differ"
    assert evaluation.accuracy == pytest.approx(counts.diagonal().sum().item() / 13)
    assert evaluation.loss == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert [bad.path for bad in evaluation.unreadable] == [
        "0-0.png",
        "0-1.png",
        "2-0.png",
        "2-1.png",
        "2-2.png",
    ]


def test_training_flags_are_restored() -> None:
    model = Echo().train()
    model.frozen.eval()
    evaluate(model, make_batches([2]), classes=CLASSES)
    assert model.training
    assert not model.frozen.training


def test_no_gradient_is_recorded() -> None:
    model = Echo()
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.requires_grad))
    evaluate(model, make_batches([2]), classes=CLASSES)
    assert seen == [False]


def test_no_readable_image_is_an_error() -> None:
    with pytest.raises(UserError, match="nothing to evaluate: 3 images could not be read"):
        evaluate(Echo(), make_batches([0], bad={0: 3}), classes=CLASSES)


def test_progress_bar_is_optional(capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(Echo(), make_batches([2]), classes=CLASSES)
    assert capsys.readouterr().err == ""
    evaluate(Echo(), make_batches([2]), classes=CLASSES, progress=True)
    captured = capsys.readouterr()
    assert "evaluate" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_cross_entropy_with_the_smoothed_label(smoothing: float) -> None:
    logits, labels = (
        torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(0)),
        torch.arange(6) % CLASSES,
    )
    wanted = torch.full((6, CLASSES), smoothing / CLASSES)
    wanted[torch.arange(6), labels] += 1 - smoothing
    reference = -(wanted * (logits - logits.exp().sum(1, keepdim=True).log())).sum(1).mean()
    assert loss_of(logits, labels, smoothing=smoothing).item() == pytest.approx(reference.item(), rel=1e-5)


def test_loss_of_half_precision_is_computed_in_float32() -> None:
    assert loss_of(torch.zeros(2, CLASSES, dtype=torch.bfloat16), torch.tensor([0, 1])).dtype == torch.float32


def test_nan_loss_is_not_dropped() -> None:
    batches = make_batches([3, 2])
    batches[0].images[1] = torch.nan
    assert math.isnan(evaluate(Echo(), batches, classes=CLASSES).loss)


def test_predict_ranks_the_classes() -> None:
    model, image = Echo().train(), Image.new("RGB", (2, 2), (255, 0, 0))
    preprocess = Preprocess((2, 2), (0.0, 0.0, 0.0), (0.5, 1.0, 1.0))
    found = predict(model, image, preprocess=preprocess, classes=list("abcd"), top=2)
    logits = torch.tensor([2.0, 2.0, 2.0, 2.0])  # the first pixels of the red channel
    torch.testing.assert_close(found.probabilities, logits.softmax(0))
    assert [entry["probability"] for entry in found.to_dict()["classes"]] == pytest.approx([0.25, 0.25])
    assert found.text().splitlines()[0].startswith("   25.0%  ")
    assert model.training
    with pytest.raises(UserError, match="top=0 must be at least 1"):
        predict(model, image, preprocess=preprocess, classes=list("abcd"), top=0)
