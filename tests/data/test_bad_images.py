from __future__ import annotations

import pytest
import torch

from visualtokens.data import BadImage, BadImages, Batch
from visualtokens.errors import UserError


def batch(*paths: str) -> Batch:
    nothing = torch.empty(0, dtype=torch.int64)
    bad = tuple(BadImage(path, "empty file") for path in paths)
    return Batch(torch.empty(0, 3, 4, 4), nothing, nothing, bad)


def test_each_image_counts_once_however_often_it_is_met() -> None:
    bad = BadImages(100)
    for _ in range(20):
        bad.add(batch("a.jpg", "b.jpg"))
    bad.add(batch("c.jpg"))
    assert len(bad) == 3
    assert [image.path for image in bad.images] == ["a.jpg", "b.jpg", "c.jpg"]


def test_exactly_the_allowed_share_is_allowed() -> None:
    for total in (20, 60, 100, 140, 1000):  # 0.05 · total is not always exact in floating point
        bad = BadImages(total)
        bad.add(batch(*(str(n) for n in range(total // 20))))
        with pytest.raises(UserError):
            bad.add(batch("one more"))


def test_the_error_names_the_first_few() -> None:
    bad = BadImages(10, share=0.3)
    bad.add(batch("a.jpg", "b.jpg", "c.jpg"))
    with pytest.raises(UserError) as caught:
        bad.add(batch("d.jpg"))
    message = str(caught.value)
    assert "4 of 10 images cannot be read, more than the 30.0% allowed" in message
    assert "a.jpg (empty file); b.jpg (empty file); c.jpg (empty file); …" in message
    assert "d.jpg" not in message


def test_no_bad_image_is_allowed_at_share_zero() -> None:
    bad = BadImages(1000, share=0)
    bad.add(batch())
    with pytest.raises(UserError, match="1 of 1000"):
        bad.add(batch("a.jpg"))


def test_unusable_options() -> None:
    with pytest.raises(UserError, match="total=0"):
        BadImages(0)
    with pytest.raises(UserError, match="share=5"):
        BadImages(10, share=5)
