"""The teacher and the distillation loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.data import Preprocess
from visualtokens.tasks.classify import Teacher, distillation


class Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.seen = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.drop(x)
        return x.mean(dim=(2, 3))


OURS = Preprocess((4, 4), (0.1, 0.2, 0.3), (0.5, 0.4, 0.2))
THEIRS = Preprocess((4, 4), (0.5, 0.5, 0.4), (0.2, 0.3, 0.9))


def test_teacher_gets_its_own_normalisation() -> None:
    pixels = torch.randint(0, 256, (2, 4, 4, 3), dtype=torch.uint8)
    teacher = Teacher(model := Recorder(), own=THEIRS, given=OURS)
    teacher.train()
    teacher(OURS.normalise(pixels))
    torch.testing.assert_close(model.seen, THEIRS.normalise(pixels))  # without dropout: it stays in eval mode


def test_teacher_gets_its_own_input_size() -> None:
    larger = Preprocess((8, 6), THEIRS.mean, THEIRS.std)
    teacher = Teacher(model := Recorder(), own=larger, given=OURS)
    teacher(torch.randn(2, 3, 4, 4))
    assert model.seen.shape == (2, 3, 8, 6)


def test_teacher_keeps_no_graph() -> None:
    assert not Teacher(Recorder(), own=THEIRS, given=OURS)(
        torch.randn(1, 3, 4, 4, requires_grad=True)
    ).requires_grad


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_distillation_is_the_kl_divergence(temperature: float) -> None:
    ours, theirs = torch.randn(5, 7), torch.randn(5, 7)
    p, q = F.softmax(theirs / temperature, 1), F.softmax(ours / temperature, 1)
    expected = sum((p[i] * (p[i] / q[i]).log()).sum() for i in range(5)) / 5 * temperature**2
    torch.testing.assert_close(distillation(ours, theirs, temperature=temperature), torch.as_tensor(expected))
    assert distillation(theirs, theirs, temperature=temperature).abs() < 1e-6


def test_distillation_of_half_precision_is_computed_in_float32() -> None:
    ours, theirs = torch.randn(5, 7).bfloat16(), torch.randn(5, 7).bfloat16()
    expected = distillation(ours.float(), theirs.float(), temperature=2.0)
    assert distillation(ours, theirs, temperature=2.0) == expected
