from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from visualtokens.explain.importance import place, scale_box

from .stubs import upsample


@pytest.mark.parametrize(
    ("grid", "size"), [((1, 1), (5, 4)), ((2, 3), (9, 8)), ((7, 7), (14, 28)), ((4, 6), (3, 5))]
)
def test_over_the_whole_canvas_it_is_the_upsampling_that_masks(
    grid: tuple[int, int], size: tuple[int, int]
) -> None:
    heat = np.random.default_rng(0).random(grid, dtype=np.float32)
    width, height = size
    canvas, inside = place(heat, (0, 0, width, height), size)
    tensor = F.interpolate(
        torch.tensor(heat)[None, None], (height, width), mode="bilinear", align_corners=False
    )
    assert inside.all()
    assert np.allclose(canvas, tensor[0, 0], atol=1e-6)
    assert np.allclose(canvas, upsample(heat, height, width), atol=1e-6)


def test_inside_a_crop_it_is_the_same_picture_moved() -> None:
    heat = np.random.default_rng(1).random((3, 4), dtype=np.float32)
    canvas, inside = place(heat, (5, 2, 17, 11), (20, 15))
    assert np.allclose(canvas[2:11, 5:17], upsample(heat, 9, 12), atol=1e-6)
    assert inside[2:11, 5:17].all()
    assert inside.sum() == 9 * 12
    assert canvas[~inside].max() == 0


def test_one_hot_cell_peaks_at_its_own_centre() -> None:
    """A 4×4 grid on a 40-pixel crop that starts at (30, 10): cell (1, 2) covers x 50-60, y 20-30."""
    heat = np.zeros((4, 4), dtype=np.float32)
    heat[1, 2] = 1
    canvas, _ = place(heat, (30, 10, 70, 50), (100, 60))
    rows, columns = np.where(canvas > 0.5)
    weights = canvas / canvas.sum()
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (20, 29, 50, 59)
    assert (weights.sum(1) * (np.arange(60) + 0.5)).sum() == pytest.approx(25, abs=1e-4)
    assert (weights.sum(0) * (np.arange(100) + 0.5)).sum() == pytest.approx(55, abs=1e-4)


def test_a_pixel_belongs_to_a_fractional_box_by_its_centre() -> None:
    _, inside = place(np.ones((1, 1), dtype=np.float32), (1.4, 0.6, 3.6, 2), (5, 3))
    assert inside.astype(int).tolist() == [[0, 0, 0, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]]


def test_scale_box_follows_the_picture() -> None:
    assert scale_box((1, 2, 3, 4), (10, 10), (20, 5)) == (2, 1, 6, 2)
