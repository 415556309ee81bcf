"""PaCa-ViT: published sizes, and its attention against plain loops."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from torch import Tensor, nn

from visualtokens import record_groupings
from visualtokens.layers import PaCaAttention


@pytest.mark.parametrize(
    ("name", "classes", "parameters"),
    [
        ("paca_vit_b0", 1000, 3_344_238),
        ("paca_vit_b1", 1000, 12_706_254),
        ("paca_vit_b2", 1000, 22_658_565),
        ("paca_vit_b0_32", 100, 2_989_940),
        ("paca_vit_b1_32", 100, 11_768_196),
        ("paca_vit_b2_32", 100, 20_781_396),
    ],
)
def test_parameters_are_exact(name: str, classes: int, parameters: int) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=classes)
    assert sum(p.numel() for p in model.parameters()) == parameters


def slow_attention(layer: PaCaAttention, x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Eq. 5–8 for one image ``x (N, C)``, position by position and head by head."""
    n, c = x.shape
    if layer.clustering is None:
        z = x
    else:
        conv, assign = layer.clustering.conv, layer.clustering.assign
        pixels = nn.functional.pad(x.T.reshape(1, c, *grid), (1, 1, 1, 1))[0]  # (C, H + 2, W + 2)
        logits = []
        for i in range(n):
            row, column = divmod(i, grid[1])
            window = pixels[:, row : row + 3, column : column + 3]  # (C, 3, 3)
            u = (conv.weight * window).sum((1, 2, 3)) + conv.bias
            u = 0.5 * u * (1 + torch.erf(u / math.sqrt(2)))  # GELU
            logits.append(assign.weight @ u + assign.bias)
        scores = torch.stack(logits).exp()  # (N, K)
        scores = scores / scores.sum(0)
        z = torch.stack([sum(scores[i, j] * x[i] for i in range(n)) for j in range(scores.shape[1])])
        z = (z - z.mean(1, keepdim=True)) / (z.var(1, keepdim=True, unbiased=False) + 1e-6).sqrt()
        z = z * layer.norm.weight + layer.norm.bias
    q = x @ layer.q.weight.T + layer.q.bias
    key, value = (z @ layer.kv.weight.T + layer.kv.bias).split(c, dim=1)
    width = c // layer.heads
    out = torch.zeros(n, c, dtype=x.dtype)
    for head in range(layer.heads):
        part = slice(head * width, (head + 1) * width)
        for i in range(n):
            weights = (key[:, part] @ q[i, part] / math.sqrt(width)).exp()
            out[i, part] = (weights / weights.sum()) @ value[:, part]
    return out @ layer.proj.weight.T + layer.proj.bias


@pytest.mark.parametrize("clusters", [0, 1, 5])
@pytest.mark.parametrize("grid", [(4, 4), (3, 7), (1, 1)])
def test_attention_equals_the_equations(clusters: int, grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = PaCaAttention(8, heads=2, clusters=clusters).double()
    x = torch.randn(2, grid[0] * grid[1], 8, dtype=torch.float64)
    expected = torch.stack([slow_attention(layer, image, grid) for image in x])
    assert torch.allclose(layer(x, grid), expected, atol=1e-10)
    assert torch.allclose(layer.float()(x.float(), grid), expected.float(), atol=1e-5)


def test_cluster_maps_sum_to_one() -> None:
    model = timm.create_model("paca_vit_b0").eval()
    with torch.no_grad(), record_groupings(model) as groupings:
        model(torch.randn(1, 3, 96, 64))
    assert len(groupings) == 6  # two blocks in each of the three stages with clusters
    for grouping in groupings.values():
        sums = grouping.maps().sum((2, 3))
        assert sums.shape == (1, 49)
        assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="dim=10 cannot be split over heads=4"):
        PaCaAttention(10, heads=4)
