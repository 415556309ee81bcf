from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visualtokens
from visualtokens.errors import UserError
from visualtokens.explain.importance import normalise
from visualtokens.explain.layers import form_of, layers_of, patch_attention, record_attention
from visualtokens.explain.render import drawn_layers
from visualtokens.grouping import Grouping, record_groupings
from visualtokens.reduce import forward_tokens

from .stubs import HardTokens, SoftClusters, SuperTokens, explain_clusters, explanation, preprocess

PREPROCESS = preprocess(16, 16)


def test_layers_repeat_no_division_and_count_dropped_patches() -> None:
    five = [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 4]
    two = [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, -1]
    model = HardTokens(five, five, two, tokens=[5, 5, 2])
    got = explain_clusters(model, torch.rand(3, 16, 16), preprocess=PREPROCESS)
    assert got.form == "hard"
    assert got.regions.flatten().tolist() == two
    for k, one in enumerate(got.maps):
        assert np.array_equal(one, got.regions == k)
    assert [(layer.name, layer.tokens, layer.dropped) for layer in got.layers] == [
        ("taps.0", 5, 0),
        ("taps.2", 2, 1),
    ]
    assert got.layers[0].assignment.flatten().tolist() == five


def test_super_tokens_tessellate() -> None:
    torch.manual_seed(0)
    model, x = SuperTokens(), torch.rand(3, 24, 16)
    got = explain_clusters(model, x, preprocess=preprocess(24, 16))
    with record_groupings(model) as groupings:
        model(x[None])
    grouping = groupings["tap"]
    assert form_of(grouping) == got.form == "tessellation"
    assert got.maps.shape == (6, 6, 4)
    assert grouping.index is not None
    for n in range(24):
        weights = dict(zip(grouping.index[0, n].tolist(), grouping.weights[0, n].tolist(), strict=True))
        assert got.regions[divmod(n, 4)] == max(weights, key=lambda k: weights[k])
    assert [layer.name for layer in got.layers] == ["tap"]


def test_soft_clusters_have_maps_and_are_not_drawn_as_a_division() -> None:
    """Each weight in steps of 1/255 between the smallest and the largest of its cluster."""
    weights = torch.tensor([[[0.1, 4.0], [0.3, 0.0], [0.6, 1.0], [0.6, 2.0]]])  # (1, N, K)
    soft = Grouping.soft(weights, (2, 2))
    [layer] = layers_of({"a": soft, "repeated": soft})
    assert (layer.name, layer.form, layer.tokens) == ("a", "soft", 2)
    assert layer.assignment.tolist() == [[1, 0], [1, 1]]
    assert layer.maps is not None
    assert layer.maps.tolist() == [[[0, 102], [255, 255]], [[255, 0], [64, 128]]]
    other = Grouping.soft(weights**2, (2, 2))  # the same division with other weights
    layers = layers_of({"a": soft, "b": other})
    assert [one.name for one in layers] == ["a", "b"]
    assert drawn_layers(explanation(layers=layers)) == []


def test_large_maps_are_stored_small() -> None:
    ramp = torch.arange(112.0).expand(1, 56, 112).flatten(1).unsqueeze(2)  # (1, N, 1)
    [layer] = layers_of({"tap": Grouping.soft(ramp, (56, 112))})
    assert layer.assignment.shape == (56, 112)
    assert layer.maps is not None
    assert layer.maps.shape == (1, 14, 28)
    assert np.abs(layer.maps[0] - np.linspace(0, 255, 28)).max() <= 0.5


def reduced_vit(method: str, keep: list[int]) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(
        "deit_tiny_patch16_224", img_size=(64, 96), depth=len(keep), embed_dim=24, num_heads=3, num_classes=3
    ).eval()
    visualtokens.reduce(model, method, keep=keep)
    return model


@pytest.mark.parametrize("method", ["weighted_kmedoids", "merge", "random", "conv"])
def test_a_reduced_vit_layer_by_layer(method: str) -> None:
    """Against the tokens of the same model without the blocks after each layer."""
    keep = [24, 6, 6, 2] if method == "conv" else [24, 15, 15, 4]
    x = torch.randn(3, 64, 96)
    model = reduced_vit(method, keep)
    torch.manual_seed(2)  # for the random method
    got = explain_clusters(model, x)
    assert got.form == "hard"
    assert got.layer == "blocks.3.reduction.tap"
    assert got.maps.shape == (keep[-1], 4, 6)
    assert [layer.tokens for layer in got.layers] == [keep[0], keep[1], keep[3]]  # the third repeats
    blocks = model.blocks
    for layer in got.layers:
        torch.manual_seed(2)
        with torch.no_grad():
            model.blocks = blocks
            model(x[None])  # the prediction comes first, and draws as many random numbers
            model.blocks = blocks[: int(layer.name.split(".")[1]) + 1]
            grouping = forward_tokens(model, x[None]).grouping
        assert np.array_equal(layer.assignment, grouping.hard()[0].view(4, 6))


def test_layers_without_tokens_are_not_counted() -> None:
    """Published schedules end with the class token alone; the last layer is then the one before."""
    model = reduced_vit("kmedoids", [24, 9, 5, 0])
    x = torch.randn(3, 64, 96)
    got = explain_clusters(model, x)
    assert got.layer == "blocks.2.reduction.tap"
    assert len(got.maps) == 5
    assert got.layers[-1].dropped == 24
    assert explain_clusters(model, x, layer=-3).layer == "blocks.0.reduction.tap"
    with pytest.raises(UserError, match=r"made 3 groupings; give -3 to 2"):
        explain_clusters(model, x, layer=3)


def test_no_tokens_left() -> None:
    with pytest.raises(UserError, match="HardTokens has no tokens left on this image"):
        explain_clusters(HardTokens([-1] * 16, tokens=[0]), torch.rand(3, 16, 16), preprocess=PREPROCESS)


def slow_attention(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The mean over the heads of softmax(q·k · scale + bias), one query at a time: (B, N, M)."""
    b, heads, n, _ = q.shape
    out = torch.zeros(b, n, k.shape[2])
    for i in range(b):
        for h in range(heads):
            for row in range(n):
                logits = torch.stack([q[i, h, row] @ key * scale for key in k[i, h]])
                if bias is not None:
                    logits = logits + bias[i, 0, row]
                out[i, row] += logits.softmax(0) / heads
    return out


@pytest.mark.parametrize("options", ["plain", "scale", "float mask", "bool mask"])
def test_fused_attention_against_a_loop(options: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 6, generator=generator) for n in (3, 5, 5))
    arguments: dict = {}
    bias, scale = None, 6**-0.5
    if options == "scale":
        arguments["scale"] = scale = 0.9
    if options.endswith("mask"):
        bias = arguments["attn_mask"] = torch.randn(2, 1, 3, 5, generator=generator)
    if options == "bool mask":
        arguments["attn_mask"] = bias > -1
        bias = torch.where(bias > -1, 0.0, -torch.inf)
    with record_attention({}) as recorded:
        F.scaled_dot_product_attention(q, k, v, **arguments)
    F.scaled_dot_product_attention(q, k, v, **arguments)  # outside the block
    [attention] = recorded
    assert torch.allclose(attention.weights, slow_attention(q, k, bias, scale), atol=1e-5)
    assert attention.tap is None


def test_unfused_attention_is_a_softmax_over_the_last_of_four_dimensions() -> None:
    logits = torch.randn(2, 3, 4, 5)
    with record_attention({}) as recorded:
        logits.softmax(-1)
        logits.softmax(dim=3)
        torch.softmax(input=logits, dim=-1)
        F.softmax(logits, -1)
        logits.softmax(1)  # over the heads
        logits[0].softmax(2)  # no heads
    assert len(recorded) == 4
    for attention in recorded:
        assert torch.allclose(attention.weights, logits.softmax(-1).mean(1), atol=1e-6)


def test_square_attention_is_left_out_on_request() -> None:
    x = torch.randn(1, 1, 3, 4)
    with record_attention({}, square=False) as recorded:
        F.scaled_dot_product_attention(x, x, x)
        F.scaled_dot_product_attention(x, x[:, :, :2], x[:, :, :2])
    assert [tuple(attention.weights.shape) for attention in recorded] == [(1, 3, 2)]


def test_patch_to_cluster_attention_of_paca() -> None:
    """PaCa-ViT, Eq. 5, from the weights of the attention module."""
    torch.manual_seed(0)
    model = visualtokens.create_model("paca_vit_nano", num_classes=3).eval()
    attn = model.stages[1].blocks[0].attn
    inputs: list[Tensor] = []
    handle = attn.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    x = torch.randn(3, 32, 48)
    with torch.no_grad(), record_groupings(model) as groupings:
        model(x[None])
    handle.remove()
    got, by_attention = (explain_clusters(model, x, layer=1, of=of) for of in ("groups", "attention"))
    grouping = groupings[got.layer]
    patches = inputs[0]  # (1, N, C)
    z = attn.norm(grouping.weights.mT @ patches)
    q, k = attn.q(patches)[0], attn.kv(z)[0].chunk(2, dim=1)[0]  # (N, C), (K, C)
    heads, width = attn.heads, q.shape[1] // attn.heads
    want = torch.zeros(q.shape[0], k.shape[0])
    for h in range(heads):
        part = slice(h * width, (h + 1) * width)
        want += (q[:, part] @ k[:, part].T * width**-0.5).softmax(1) / heads
    want = normalise(want.T.unflatten(1, grouping.grid))
    assert got.attention is not None
    assert torch.allclose(torch.from_numpy(got.attention), want, atol=1e-4)
    assert by_attention.of == "attention"
    assert np.allclose(by_attention.maps, got.attention, atol=1e-6)
    assert not np.allclose(by_attention.values, got.values, atol=1e-6)


@pytest.mark.parametrize("model", [SoftClusters(), SuperTokens()])
def test_clusters_that_no_patches_attend_to(model: nn.Module) -> None:
    x = torch.rand(3, 16, 16)
    assert explain_clusters(model, x, preprocess=PREPROCESS).attention is None
    with pytest.raises(UserError, match="of='groups'"):
        explain_clusters(model, x, preprocess=PREPROCESS, of="attention")


def test_attention_among_clusters_is_not_attention_of_patches() -> None:
    """16 visual tokens of 4×4 patches attend to each other: the same shape as patches to clusters."""
    grouping = Grouping.soft(torch.rand(1, 4, 4), (2, 2))
    x = torch.randn(1, 1, 4, 8)
    with record_attention({"tap": grouping}, square=False) as recorded:
        F.scaled_dot_product_attention(x, x, x)
    assert patch_attention(recorded, "tap", grouping) is None
