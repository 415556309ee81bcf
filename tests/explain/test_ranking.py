"""Clusters ranked by a metric over a dataset."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from visualtokens.errors import UserError
from visualtokens.explain.importance import mask, normalise
from visualtokens.explain.ranking import rank_clusters
from visualtokens.grouping import record_groupings

from .stubs import MEAN, STD, SoftClusters

BLACK = (-torch.tensor(MEAN) / torch.tensor(STD)).view(3, 1, 1)


def test_drops_against_masking_image_by_image() -> None:
    """The clusters of each image are its own; the metric is the mean probability of class 1."""
    torch.manual_seed(0)
    model = SoftClusters(clusters=3).eval()
    images = torch.randn(4, 3, 16, 24)

    @torch.no_grad()
    def evaluate() -> float:
        parts = [model(part).softmax(1)[:, 1] for part in images.split(3)]
        return float(torch.cat(parts).mean())

    got = rank_clusters(model, BLACK, evaluate, layer=0)
    assert got.layer == "taps.0"
    assert got.full == pytest.approx(evaluate())  # no hook is left
    want = torch.zeros(3)
    with torch.no_grad():
        for image in images:
            with record_groupings(model) as groupings:
                model(image[None])
            heat = normalise(groupings["taps.0"].maps()[0])  # (3, h, w)
            want += model(mask(image, BLACK, heat)).softmax(1)[:, 1] / 4
    torch.testing.assert_close(torch.tensor(got.masked), want)
    assert [got.drops[k] for k in got.order] == sorted(got.drops, reverse=True)


def test_a_model_without_clusters() -> None:
    with pytest.raises(UserError, match="Conv2d has no clusters to rank"):
        rank_clusters(nn.Conv2d(3, 4, 3), BLACK, lambda: 0.0)
