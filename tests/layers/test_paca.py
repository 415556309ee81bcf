"""PaCa's clusterings and attention against plain loops; precision and memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from visualtokens import record_groupings
from visualtokens.errors import UserError
from visualtokens.layers import PaCaAttention, make_clustering
from visualtokens.models.pyramid import init_weights
from visualtokens.ops import gather

from ..ops.helpers import LargestTensor

KINDS = ["squeeze", "conv", "mlp", "linear"]


def gelu(u: Tensor) -> Tensor:
    return 0.5 * u * (1 + torch.erf(u / math.sqrt(2)))


def slow_convolution(conv: nn.Conv2d, x: Tensor, grid: tuple[int, int]) -> Tensor:
    """A convolution, depth-wise or not, of ``x (N, C)``, position by position."""
    reach = conv.kernel_size[0] // 2
    pixels = nn.functional.pad(x.T.reshape(1, -1, *grid), (reach,) * 4)[0]  # (C, H + 2·reach, W + 2·reach)
    out = []
    for i in range(len(x)):
        row, column = divmod(i, grid[1])
        window = pixels[:, row : row + 2 * reach + 1, column : column + 2 * reach + 1]
        if conv.groups > 1:
            window = window.unsqueeze(1)
        out.append((conv.weight * window).sum((1, 2, 3)) + conv.bias)
    return torch.stack(out)


def slow_clustering(layer: nn.Module, x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Eq. 6, 7: the assignment ``(N, K)`` of one image ``x (N, C)``."""
    if hasattr(layer, "conv"):
        x = gelu(slow_convolution(layer.conv, x, grid))
    for name in ("mix", "fc"):
        if hasattr(layer, name):
            linear = getattr(layer, name)
            x = gelu(x @ linear.weight.T + linear.bias)
    scores = x @ layer.assign.weight.T
    if layer.assign.bias is not None:
        scores = scores + layer.assign.bias
    return scores.exp() / scores.exp().sum(0)


def slow_attention(layer: PaCaAttention, x: Tensor, weights: Tensor | None) -> Tensor:
    """Eq. 5, 8 for one image ``x (N, C)`` and its assignment, cluster by cluster and head by head."""
    n, c = x.shape
    z = x
    if weights is not None:
        z = torch.stack([sum(weights[i, j] * x[i] for i in range(n)) for j in range(weights.shape[1])])
        z = (z - z.mean(1, keepdim=True)) / (z.var(1, keepdim=True, unbiased=False) + 1e-6).sqrt()
        z = z * layer.norm.weight + layer.norm.bias
    q = x @ layer.q.weight.T + layer.q.bias
    key, value = (z @ layer.kv.weight.T + layer.kv.bias).split(c, dim=1)
    width = c // layer.heads
    out = torch.zeros(n, c, dtype=x.dtype)
    for head in range(layer.heads):
        part = slice(head * width, (head + 1) * width)
        for i in range(n):
            scores = (key[:, part] @ q[i, part] / math.sqrt(width)).exp()
            out[i, part] = (scores / scores.sum()) @ value[:, part]
    return out @ layer.proj.weight.T + layer.proj.bias


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grid", [(3, 7), (1, 1)])
def test_clustering_and_attention_equal_the_equations(kind: str, grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = PaCaAttention(8, heads=2, clusters=5, clustering=kind).double()
    layer.clustering.init_clusters()
    x = torch.randn(2, grid[0] * grid[1], 8, dtype=torch.float64)
    weights = [slow_clustering(layer.clustering, image, grid) for image in x]
    expected = torch.stack([slow_attention(layer, *pair) for pair in zip(x, weights, strict=True)])
    assert torch.allclose(layer.assign(x, grid), torch.stack(weights), atol=1e-12)
    assert torch.allclose(layer(x, grid), expected, atol=1e-10)
    assert torch.allclose(layer.float()(x.float(), grid), expected.float(), atol=1e-5)


def test_zero_clusters_is_self_attention() -> None:
    torch.manual_seed(0)
    layer = PaCaAttention(8, heads=2, clusters=0).double()
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    assert torch.allclose(layer(x, (2, 3))[0], slow_attention(layer, x[0], None), atol=1e-10)
    assert layer.assign(x, (2, 3)) is None
    assert not any("norm" in name for name, _ in layer.named_parameters())


@pytest.mark.parametrize("clusters", [1, 200])
def test_assignment_is_recorded(clusters: int) -> None:
    layer = PaCaAttention(12, heads=3, clusters=clusters)
    x = torch.randn(2, 35, 12)
    with record_groupings(layer) as groupings:
        assert layer(x, (5, 7)).shape == x.shape
    (grouping,) = groupings.values()
    assert grouping.maps().shape == (2, clusters, 5, 7)
    assert torch.equal(grouping.weights, layer.assign(x, (5, 7)))


def test_given_assignment_replaces_the_layers_own() -> None:
    torch.manual_seed(0)
    first = PaCaAttention(8, heads=2, clusters=4, clustering="mlp").double()
    second = PaCaAttention(8, heads=2, clusters=4, clustering=None).double()
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    weights = first.assign(x, (2, 3))
    expected = slow_attention(second, x[0], weights[0])
    assert torch.allclose(second(x, (2, 3), weights)[0], expected, atol=1e-10)


def test_bfloat16_assignment_sums_to_one_over_160000_patches() -> None:
    """A running sum of so many weights in bfloat16 would stop far below one."""
    torch.manual_seed(0)
    grid = (400, 400)
    layer = make_clustering("squeeze", 8, clusters=3)
    layer.init_clusters()
    layer = layer.bfloat16()
    x = torch.randn(1, 160_000, 8).bfloat16()
    with torch.inference_mode():
        weights = layer(x, grid)
        logits = layer.assign(layer.features(x, grid)).double()
        tokens = gather(x, weights).double()
    exact = torch.softmax(logits, 1)
    assert weights.dtype == torch.float32
    assert torch.allclose(weights.double().sum(1), torch.ones(1, 3, dtype=torch.float64), atol=1e-4)
    assert torch.allclose(weights.double(), exact, rtol=1e-3, atol=0)
    assert torch.allclose(tokens, exact.mT @ x.double(), atol=4e-3)  # the result itself is bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_initial_clusters_differ(kind: str) -> None:
    """Uniform assignments would get the same gradient and stay alike."""
    torch.manual_seed(0)
    layer = make_clustering(kind, 64, clusters=20)
    init_weights(layer)  # as in a model: linear layers start near zero
    layer.init_clusters()
    x = nn.functional.layer_norm(torch.randn(1, 144, 64), (64,))
    with torch.no_grad():
        logits = layer(x, (12, 12))[0].log()  # (N, K), up to a constant per cluster
    assert 0.3 < logits.std(0).mean() < 3
    correlation = torch.corrcoef(logits.T)  # (K, K)
    assert correlation[~torch.eye(20, dtype=torch.bool)].mean().abs() < 0.2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("train", [False, True])
def test_memory_is_linear_in_the_patches(kind: str, train: bool) -> None:
    """Not even the attention weights of patches to clusters, heads · K per patch, are stored."""
    layer = PaCaAttention(32, heads=8, clusters=40, clustering=kind)
    largest = []
    for side in (12, 24):
        x = torch.randn(1, side * side, 32, requires_grad=train)
        with torch.set_grad_enabled(train), LargestTensor() as recorder:
            out = layer(x, (side, side))
            if train:
                out.sum().backward()
        assert recorder.numel < 8 * 40 * side * side
        largest.append(recorder.numel)
    assert largest[1] == 4 * largest[0]


def test_invalid_options() -> None:
    with pytest.raises(UserError, match="dim=10 cannot be split over heads=4"):
        PaCaAttention(10, heads=4)
    with pytest.raises(UserError, match="unknown clustering 'convs'; did you mean 'conv'"):
        PaCaAttention(8, heads=2, clustering="convs")
    with pytest.raises(UserError, match="clusters=-1; give at least 1"):
        PaCaAttention(8, heads=2, clusters=-1)
    with pytest.raises(UserError, match="x has 6 patches, not 2×2"):
        PaCaAttention(8, heads=2)(torch.randn(1, 6, 8), (2, 2))
    with pytest.raises(UserError, match="no clustering of its own; give it weights"):
        PaCaAttention(8, heads=2, clustering=None)(torch.randn(1, 6, 8), (2, 3))
