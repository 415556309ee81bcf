"""The pyramids and heads against slow references and published costs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens import record_groupings
from visualtokens.bench import count_macs, count_parameters, macs_by_module
from visualtokens.layers import TokenConv
from visualtokens.tasks import segment
from visualtokens.tasks.segment.heads import FPN, VTFPN, BatchNorm, PyramidPooling, SemanticHead, UperNet

from ...layers.helpers import assert_near, pixels, randomised, slow_pixel_conv, slow_token_conv, softmax

CHANNELS = (8, 16, 24)
GRIDS = ((9, 7), (5, 4), (3, 2))  # odd sizes, as strided convolutions leave them


def maps(batch: int = 2, *, requires_grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, c, *grid, generator=generator).requires_grad_(requires_grad)
        for c, grid in zip(CHANNELS, GRIDS, strict=True)
    ]


def published(head: str, depth: int, classes: int) -> segment.Segmenter:
    with torch.device("meta"):
        return segment.create(head, backbone=f"resnet{depth}", classes=classes, stride_first=True)


# Input, classes, head: GMACs of the FPN part in full and without convolutions of tokens, of R50, of R101.
COSTS = {
    ("fpn", (800, 1216), 91): (55.10, 55.10, 159.4, 231.4),
    ("vt_fpn", (800, 1216), 91): (8.65, 8.47, 113.0, 184.9),
    ("fpn", (473, 473), 20): (12.89, 12.89, 37.3, 54.4),
    ("vt_fpn", (473, 473), 20): (2.18, 1.99, 26.6, 43.7),
}


@pytest.mark.parametrize(("head", "size", "classes"), COSTS)
@pytest.mark.parametrize("depth", [50, 101])
def test_multiply_adds_of_tables_9_and_10(head: str, size: tuple[int, int], classes: int, depth: int) -> None:
    """Within half a percent, or half of the last digit where that is more."""
    part, pixels_only, *totals = COSTS[head, size, classes]
    model = published(head, depth, classes)
    counts = macs_by_module(model, size, depth=None)
    of_tokens = sum(counts.get(n, 0) for n, m in model.named_modules() if isinstance(m, TokenConv))
    computed = counts["decoder.pyramid"] / 1e9
    assert computed == pytest.approx(part, rel=0.005)
    assert computed - of_tokens / 1e9 == pytest.approx(pixels_only, rel=0.005)
    assert counts[""] / 1e9 == pytest.approx(totals[depth == 101], rel=0.005)


def test_fpn_multiply_adds_are_the_closed_form() -> None:
    with torch.device("meta"):
        model = segment.create("fpn", backbone="resnet50", classes=7)
    places = [(-(-64 // s)) * (-(-96 // s)) for s in (4, 8, 16, 32)]
    lateral = sum(c * 256 * p for c, p in zip((256, 512, 1024, 2048), places, strict=True))
    expected = lateral + sum(9 * 256 * 256 * p for p in places)
    assert macs_by_module(model, (64, 96), depth=2)["decoder.pyramid"] == expected


def test_upernet_costs_what_is_published_for_swin() -> None:
    """60 M parameters and 945 GMACs at 512×2048, as Swin Transformer states for its tiny model."""
    with torch.device("meta"):
        model = segment.create(
            "upernet",
            backbone="swin_tiny_patch4_window7_224",
            classes=150,
            backbone_args=dict(img_size=(512, 2048)),
        )
    assert count_parameters(model) / 1e6 == pytest.approx(60, rel=0.005)
    assert count_macs(model, (512, 2048)) / 1e9 == pytest.approx(945, rel=0.005)


def test_fpn_equals_the_sum_of_upsampled_levels() -> None:
    torch.manual_seed(0)
    fpn = FPN(CHANNELS, dim=6).double()
    inputs = [x.double() for x in maps()]
    laterals = [
        torch.einsum("oc,bchw->bohw", conv.weight[:, :, 0, 0], x) + conv.bias[:, None, None]
        for conv, x in zip(fpn.laterals, inputs, strict=True)
    ]
    for number, output in enumerate(fpn(inputs)):
        height, width = GRIDS[number]
        total = laterals[number].clone()
        for i in range(height):
            for j in range(width):
                # Each coarser level counts by the place that this one falls on, level by level.
                y, x = i, j
                for k in range(number + 1, len(GRIDS)):
                    y, x = y * GRIDS[k][0] // GRIDS[k - 1][0], x * GRIDS[k][1] // GRIDS[k - 1][1]
                    total[:, :, i, j] += laterals[k][:, :, y, x]
        padded = F.pad(total, (1, 1, 1, 1))
        conv = fpn.outputs[number]
        expected = conv.bias[:, None, None] + sum(
            torch.einsum(
                "oc,bchw->bohw", conv.weight[:, :, dy, dx], padded[:, :, dy:, dx:][..., :height, :width]
            )
            for dy in range(3)
            for dx in range(3)
        )
        assert_near(output, expected, 1e-10)


def slow_vt_fpn(layer: VTFPN, inputs: list[Tensor]) -> list[Tensor]:
    """One image, ``inputs (C, H, W)``: the levels ``(N, dim)``, pixel by pixel (VT Eq. 1, 3, 4, 5)."""
    found = []
    for tokenizer, x in zip(layer.tokenizers, inputs, strict=True):
        seen = pixels(x)
        logits = slow_pixel_conv(tokenizer.filter, seen) / math.sqrt(seen.shape[1])
        value = slow_pixel_conv(tokenizer.value, seen)
        means = [sum(w * v for w, v in zip(softmax(l), value, strict=True)) for l in logits.T]  # noqa: E741
        found.append(slow_token_conv(tokenizer.embed, torch.stack(means)))
    tokens = torch.cat(found)  # (levels·L, CT)
    mixer = layer.mixer
    key, query = slow_token_conv(mixer.key, tokens), slow_token_conv(mixer.query, tokens)
    seen = torch.stack([softmax(k @ query.T / math.sqrt(len(k))) @ tokens for k in key])
    norm = mixer.norm
    seen = (seen - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
    tokens = (tokens + seen).detach()
    tokens = tokens + slow_token_conv(mixer.ffn2, slow_token_conv(mixer.ffn1, tokens).relu())
    out = []
    for projector, x in zip(layer.projectors, inputs, strict=True):
        wide = slow_pixel_conv(projector.widen, pixels(x))
        query, key = slow_pixel_conv(projector.query, wide), slow_token_conv(projector.key, tokens)
        value = slow_token_conv(projector.value, tokens)
        answer = torch.stack([softmax(q @ key.T / math.sqrt(len(q))) @ value for q in query])
        norm = projector.norm
        answer = (answer - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
        out.append((wide + answer).detach())
    return out


def test_vt_fpn_equals_the_equations() -> None:
    torch.manual_seed(0)
    layer = randomised(VTFPN(CHANNELS, dim=16, tokens=3, token_dim=10, attn_dim=8, hidden=12)).double()
    inputs = [x.double() for x in maps()]
    with record_groupings(layer) as groupings:
        outputs = layer(inputs)
    for i in range(2):
        expected = slow_vt_fpn(layer, [x[i] for x in inputs])
        for output, level, grid in zip(outputs, expected, GRIDS, strict=True):
            assert_near(output[i], level.T.unflatten(1, grid))
    # Each level is grouped into its own tokens and reads those of all levels.
    assert [g.weights.shape[1:] for g in groupings.values()] == [
        *((h * w, 3) for h, w in GRIDS),
        *((h * w, 9) for h, w in GRIDS),
    ]


def reach(layer: nn.Module) -> list[list[bool]]:
    """Whether output i depends on input j."""
    rows = []
    for i in range(len(CHANNELS)):
        inputs = maps(requires_grad=True)
        layer(inputs)[i].square().sum().backward()
        rows.append([x.grad is not None and bool(x.grad.abs().max() > 1e-9) for x in inputs])
    return rows


def test_reach_of_the_levels() -> None:
    """FPN hands down from coarse to fine; the tokens of VT-FPN reach every level, once it has learned."""
    torch.manual_seed(0)
    assert reach(FPN(CHANNELS, dim=8)) == [[True, True, True], [False, True, True], [False, False, True]]
    untrained = VTFPN(CHANNELS, dim=16, tokens=2, token_dim=8, attn_dim=8, hidden=8)
    assert reach(untrained) == [[i == j for j in range(3)] for i in range(3)]
    assert reach(randomised(untrained)) == [[True] * 3] * 3


def test_vt_fpn_works_on_a_single_pixel_and_a_long_strip() -> None:
    layer = randomised(VTFPN(CHANNELS, dim=16, tokens=8, token_dim=8, attn_dim=8, hidden=8))
    for grids in ([(1, 1)] * 3, [(1, 500), (1, 250), (1, 125)]):
        outputs = layer([torch.randn(1, c, *g) for c, g in zip(CHANNELS, grids, strict=True)])
        assert [o.shape for o in outputs] == [(1, 16, *g) for g in grids]
        assert all(o.isfinite().all() for o in outputs)


@pytest.mark.parametrize("strides", [(4, 8, 16, 32), (4, 8, 16, 16), (16, 16, 16), (14, 14), (4, 32), (8,)])
def test_semantic_head_ends_at_the_finest_map(strides: tuple[int, ...]) -> None:
    head = SemanticHead(8, strides, 5, width=12)
    levels = [torch.randn(2, 8, -(-473 // s), -(-211 // s)) for s in strides]
    assert head(levels).shape == (2, 5, *levels[0].shape[2:])
    doublings = [max(1, round(math.log2(s / strides[0]))) for s in strides]
    assert [len(branch.steps) for branch in head.branches] == doublings


def test_semantic_head_adds_up_its_levels() -> None:
    """One level at a time, the others silenced: the logits without the bias add up."""
    torch.manual_seed(0)
    head = SemanticHead(8, (4, 8, 16), 5, width=8).eval()
    nn.init.normal_(head.classify.weight)
    levels = [torch.randn(1, 8, 12 // 2**i, 20 // 2**i) for i in range(3)]
    whole = head(levels)
    alone = []
    for kept in range(3):
        other = [torch.zeros_like(x) if i != kept else x for i, x in enumerate(levels)]
        alone.append(head(other) - head.classify.bias.view(1, -1, 1, 1))
    torch.testing.assert_close(whole, sum(alone) + head.classify.bias.view(1, -1, 1, 1))


def test_pyramid_pooling_averages_cells() -> None:
    """On a map that is constant, every mean is the map itself, whatever the cells."""
    pooling = PyramidPooling(4, 3)
    seen: list[Tensor] = []
    pooling.merge.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    pooling.eval()(torch.full((1, 4, 5, 7), 2.0))
    x = seen[0]  # (1, 4 + 4·3, 5, 7)
    assert x.shape == (1, 16, 5, 7)
    assert torch.allclose(x, x[:, :, :1, :1].expand_as(x), atol=1e-6)
    for number, conv in enumerate(pooling.pools):
        expected = conv(torch.full((1, 4, 1, 1), 2.0))
        torch.testing.assert_close(x[:, 4 + 3 * number : 7 + 3 * number, :1, :1], expected)


def test_upernet_trains_on_a_single_image() -> None:
    """Pooling leaves one value per channel, which plain BatchNorm refuses."""
    upernet = UperNet(CHANNELS, 5, dim=8).train()
    inputs = maps(1)
    assert upernet(inputs).shape == (1, 5, *GRIDS[0])
    upernet(inputs).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in upernet.parameters())


def test_batch_norm_of_one_value_uses_running_statistics() -> None:
    norm = BatchNorm(2)
    norm.running_mean.copy_(torch.tensor([1.0, 2.0]))
    norm.running_var.copy_(torch.tensor([4.0, 9.0]))
    x = torch.tensor([5.0, 5.0]).view(1, 2, 1, 1)
    torch.testing.assert_close(norm.train()(x).flatten(), torch.tensor([2.0, 1.0]), atol=1e-4, rtol=1e-4)
    assert norm.running_mean.tolist() == [1.0, 2.0]  # one value teaches nothing about the spread
    many = torch.randn(3, 2, 4, 4)
    torch.testing.assert_close(norm(many), nn.BatchNorm2d(2)(many))
