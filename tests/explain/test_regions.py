from __future__ import annotations

import numpy as np
from PIL import Image

from visualtokens.explain.importance import OUTSIDE, cells, mosaic, outlined


def test_cells_against_a_loop() -> None:
    labels = np.arange(6).reshape(2, 3)
    left, top, right, bottom = box = (2.3, 1.0, 11.9, 8.6)
    got = cells(labels, box, (15, 10))
    for y in range(10):
        for x in range(15):
            cx, cy = x + 0.5, y + 0.5
            want = -2
            if left <= cx <= right and top <= cy <= bottom:
                want = labels[int((cy - top) / (bottom - top) * 2), int((cx - left) / (right - left) * 3)]
            assert got[y, x] == want


def test_borders_lie_between_tokens_and_nowhere_else() -> None:
    photo = Image.new("RGB", (40, 20), (100, 120, 140))
    drawn = np.asarray(outlined(photo, np.array([[0, 1], [0, 1]]), box=(0, 0, 40, 20)))
    white = (drawn == 255).all(2)
    assert white[:, 19].all()  # the last column of the left token
    assert white.sum() == 20
    assert (drawn[:, [18, 20]] < 40).all()  # dark to either side
    assert (drawn[:, :18] == (100, 120, 140)).all()
    assert (drawn[:, 21:] == (100, 120, 140)).all()


def test_a_border_shows_on_white_and_on_black() -> None:
    for grey in (0, 255):
        photo = Image.new("RGB", (40, 20), (grey,) * 3)
        drawn = np.asarray(outlined(photo, np.array([[0, 1]]), box=(0, 0, 40, 20)))[10, :, 0].astype(int)
        assert np.abs(np.diff(drawn)).max() > 150


def test_the_outline_of_one_token_leaves_the_others_alone() -> None:
    photo = Image.new("RGB", (40, 40), "grey")
    assignment = np.arange(16).reshape(4, 4)
    drawn = np.asarray(outlined(photo, assignment, box=(0, 0, 40, 40), token=5))
    rows, columns = np.nonzero((drawn == 255).all(2))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (9, 19, 9, 19)


def test_the_crop_has_no_border_of_its_own() -> None:
    photo = Image.new("RGB", (40, 20), (100, 120, 140))
    drawn = np.asarray(outlined(photo, np.zeros((2, 2), dtype=int), box=(10, 0, 30, 20)))
    assert (drawn == (100, 120, 140)).all()


def test_mosaic_against_a_loop() -> None:
    """Two tokens, one of them in two places, and a patch that was dropped."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
    assignment = np.array([[0, 1, 0], [1, 1, -1]])
    drawn = np.asarray(mosaic(Image.fromarray(pixels), assignment, box=(0, 0, 30, 20)))
    for token in (0, 1):
        mine = [pixels[y, x] for y in range(20) for x in range(30) if assignment[y // 10, x // 10] == token]
        middle = next(zip(*np.nonzero(assignment == token), strict=True))
        centre = drawn[middle[0] * 10 + 5, middle[1] * 10 + 5]
        assert np.abs(centre - np.mean(mine, axis=0)).max() <= 0.5
    assert (drawn[5, 5] == drawn[5, 25]).all()  # the two places of token 0
    assert np.abs(drawn[15, 25] - OUTSIDE * pixels[15, 25].mean()).max() <= 1
