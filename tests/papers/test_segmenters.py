"""Tables 9 and 10 of Visual Transformers."""

from __future__ import annotations

import pytest
import torch

from visualtokens.papers import published
from visualtokens.papers.segmenters import (
    pyramid_gmacs,
    pyramid_pixel_gmacs,
    segmenter,
    total_gmacs,
    total_pixel_gmacs,
)

ROWS = [f for table in ("9", "10") for f in published("visual-transformers", table) if f.is_cost]


@pytest.mark.parametrize("figure", ROWS, ids=lambda f: f"{f.model}-{f.variant}-{f.metric}")
def test_pixel_macs_are_close_to_print(figure) -> None:
    """Within 1 %; the paper leaves out the convolutions of tokens."""
    head, _, depth = figure.model.rpartition("_r")
    with torch.device("meta"):
        model = segmenter(head, int(depth), figure.variant)
    count = {"gflops_total": total_pixel_gmacs, "gflops_fpn": pyramid_pixel_gmacs}[figure.metric]
    assert count(model, figure.size) == pytest.approx(figure.number, rel=0.01)


def test_convolutions_of_tokens_are_the_difference() -> None:
    with torch.device("meta"):
        fpn, vt_fpn = segmenter("fpn", 50, "lip"), segmenter("vt_fpn", 50, "lip")
    size = (473, 473)
    assert total_gmacs(fpn, size) == total_pixel_gmacs(fpn, size)
    of_tokens = total_gmacs(vt_fpn, size) - total_pixel_gmacs(vt_fpn, size)
    assert of_tokens == pytest.approx(pyramid_gmacs(vt_fpn, size) - pyramid_pixel_gmacs(vt_fpn, size))
    # To the tokens and out of them, keys, queries and two layers of the transformer.
    made = 8 * 1024 * (256 + 512 + 1024 + 2048) + 32 * (2 * 1024 * 256 + 2 * 1024 * 1024)
    assert of_tokens * 1e9 == pytest.approx(made + 4 * 2 * 32 * 1024 * 256)
