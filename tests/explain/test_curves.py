from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from visualtokens.explain.faithfulness import area, blurred, deletion, foreground_auroc, insertion, pointing


def brightness(images: Tensor) -> Tensor:
    return images.mean((1, 2, 3)).sigmoid()


def slow_curve(start: np.ndarray, end: np.ndarray, heat: np.ndarray, steps: int) -> list[float]:
    """One pixel at a time, for heat without equal values."""
    order = sorted(np.ndindex(heat.shape), key=lambda place: -heat[place])
    now, out = start.copy(), []
    changed = 0
    for step in range(steps + 1):
        while changed < math.ceil(step * len(order) / steps):
            y, x = order[changed]
            now[:, y, x] = end[:, y, x]
            changed += 1
        out.append(1 / (1 + math.exp(-now.mean())))
    return out


@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (5, 2), (12, 100), (7, 3)])
def test_curves_against_the_slow_reference(steps: int, batch: int) -> None:
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(3, 6, 8)), dtype=torch.float32)
    heat = rng.permutation(48).reshape(6, 8).astype(np.float32)
    sizes = []

    def probability(images: Tensor) -> Tensor:
        sizes.append(len(images))
        return brightness(images)

    got = deletion(probability, x, heat, steps=steps, batch=batch)
    assert got.tolist() == pytest.approx(slow_curve(x.numpy(), np.zeros((3, 6, 8)), heat, steps), abs=1e-5)
    assert sum(sizes) == steps + 1
    assert max(sizes) <= batch
    got = insertion(probability, x, heat, steps=steps, batch=batch)
    assert got.tolist() == pytest.approx(slow_curve(blurred(x).numpy(), x.numpy(), heat, steps), abs=1e-5)


def test_curves_end_where_nothing_of_the_image_or_all_of_it_is_left() -> None:
    x = torch.randn(3, 10, 10)
    heat = np.random.default_rng(1).random((10, 10))
    for curve, first, last in (
        (deletion, x, torch.zeros_like(x)),
        (insertion, blurred(x), x),
    ):
        got = curve(brightness, x, heat, steps=4, batch=5)
        assert got[0] == pytest.approx(float(brightness(first[None])), abs=1e-6)
        assert got[-1] == pytest.approx(float(brightness(last[None])), abs=1e-6)


def test_equal_pixels_change_without_a_direction() -> None:
    """Half of a flat map: neither the upper nor the left half of the image."""
    x = torch.ones(3, 20, 20)
    seen: list[Tensor] = []

    def probability(images: Tensor) -> Tensor:
        seen.append(images)
        return brightness(images)

    deletion(probability, x, np.zeros((20, 20)), steps=2, batch=3)
    half = seen[0][1, 0]
    assert half.sum() == 200
    for part in (half[:10], half[10:], half[:, :10], half[:, 10:]):
        assert 70 < part.sum() < 130


def test_area_of_straight_lines() -> None:
    assert area(np.linspace(1, 0, 11)) == pytest.approx(0.5)
    assert area(np.full(5, 0.3)) == pytest.approx(0.3)
    assert area(np.array([1.0, 0.0, 0.0])) == pytest.approx(0.25)


def test_blur_keeps_the_mean_and_takes_the_detail() -> None:
    x = torch.randn(3, 64, 48)
    soft = blurred(x)
    assert soft.shape == x.shape
    assert soft.std() < 0.4 * x.std()
    assert blurred(torch.full((3, 64, 48), 0.7)).sub(0.7).abs().max() < 1e-5
    assert blurred(torch.randn(3, 2, 100)).shape == (3, 2, 100)  # no taller than the blur is wide


def test_pointing_game() -> None:
    mask = np.array([[1, 0], [-1, 0]])
    assert pointing(np.array([[3.0, 1.0], [0.0, 2.0]]), mask) == 1
    assert pointing(np.array([[1.0, 3.0], [0.0, 2.0]]), mask) == 0
    assert pointing(np.array([[3.0, 1.0], [9.0, 2.0]]), mask) == 1  # the undecided place is not asked
    assert pointing(np.array([[3.0, 3.0], [0.0, 2.0]]), mask) == 0.5
    assert math.isnan(pointing(np.zeros((1, 1)), np.full((1, 1), -1)))


@settings(deadline=None)  # the first call imports torchmetrics
@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.sampled_from([-1, 0, 1])), min_size=1, max_size=25)
)
def test_auroc_against_counting_pairs(places: list[tuple[float, int]]) -> None:
    heat = np.array([[p[0] for p in places]], dtype=np.float32)
    mask = np.array([[p[1] for p in places]])
    front, back = heat[mask == 1], heat[mask == 0]
    got = foreground_auroc(heat, mask)
    if not len(front) or not len(back):
        assert math.isnan(got)
        return
    won = sum(float(f > b) + 0.5 * float(f == b) for f in front for b in back)
    assert got == pytest.approx(won / (len(front) * len(back)), abs=1e-5)
