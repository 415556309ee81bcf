from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import visualtokens
from visualtokens.errors import UserError
from visualtokens.explain import explain
from visualtokens.explain.importance import normalise
from visualtokens.explain.layers import record_attention
from visualtokens.grouping import record_groupings

from .stubs import Learned, Merging, SuperTokens, preprocess


def slow_attention(q: Tensor, k: Tensor, bias: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Mean over heads of softmax(q·k), one pair at a time: (B, N, M)."""
    b, heads, n, _ = q.shape
    m = k.shape[2]
    out = torch.zeros(b, n, m)
    for i in range(b):
        for h in range(heads):
            for row in range(n):
                logits = [float(q[i, h, row] @ k[i, h, column]) * scale for column in range(m)]
                if bias is not None:
                    logits = [a + float(bias[i, 0, row, c]) for c, a in enumerate(logits)]
                if causal:
                    logits = [a if c <= row else -math.inf for c, a in enumerate(logits)]
                out[i, row] += torch.tensor(logits).softmax(0) / heads
    return out


@pytest.mark.parametrize("options", ["plain", "scale", "float mask", "bool mask", "causal", "grouped"])
def test_attention_against_the_slow_reference(options: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 6, generator=generator) for n in (3, 5, 5))
    given: dict = {}
    bias, scale = None, 6**-0.5
    if options == "scale":
        given["scale"] = scale = 0.9
    if options.endswith("mask"):
        bias = torch.randn(2, 1, 3, 5, generator=generator)
        given["attn_mask"] = bias
    if options == "bool mask":
        given["attn_mask"] = bias > -1
        bias = torch.where(bias > -1, 0.0, -torch.inf)
    if options == "causal":
        given["is_causal"] = True
    if options == "grouped":
        k, v = k[:, :2], v[:, :2]
        given["enable_gqa"] = True
    with record_attention({}) as attended:
        out = F.scaled_dot_product_attention(q, k, v, **given)
    if options == "grouped":
        k = k[:, [0, 0, 1, 1]]
    want = slow_attention(q, k, bias, scale, options == "causal")
    assert torch.allclose(attended[0].weights, want, atol=1e-5)
    assert attended[0].tap is None
    assert out.equal(
        F.scaled_dot_product_attention(q, *((k, v) if options != "grouped" else (k[:, ::2], v)), **given)
    )


def test_attention_that_is_spelled_out() -> None:
    logits = torch.randn(2, 3, 4, 5)
    with record_attention({}) as attended:
        for found in (
            logits.softmax(-1),
            logits.softmax(dim=3),
            torch.softmax(input=logits, dim=-1),
            F.softmax(logits, -1),
        ):
            assert torch.equal(attended[-1].weights, found.mean(1))
        logits.softmax(1)  # over the heads: no attention
        logits[0].softmax(2)  # without heads: a grouping, perhaps
    assert len(attended) == 4


def test_nothing_is_recorded_afterwards() -> None:
    x = torch.randn(1, 1, 2, 4)
    with record_attention({}) as attended:
        F.scaled_dot_product_attention(x, x, x)
    F.scaled_dot_product_attention(x, x, x)
    assert len(attended) == 1


@pytest.mark.parametrize("layer", [0, 1])
def test_patch_to_cluster_attention_of_paca(layer: int) -> None:
    """PaCa Eq. 5, from the weights of the attention itself."""
    torch.manual_seed(0)
    model = visualtokens.create_model("paca_vit_nano", num_classes=3).eval()
    attn = model.stages[layer].blocks[0].attn
    seen: list[Tensor] = []
    handle = attn.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x = torch.randn(3, 32, 48)
    got = explain(model, x, layer=layer)
    handle.remove()
    with torch.no_grad(), record_groupings(model) as groupings:
        model(x[None])
    grouping = groupings[got.layer]
    patches = seen[0][:1]  # (1, N, C)
    z = attn.norm(grouping.weights.mT @ patches)
    q, k = attn.q(patches)[0], attn.kv(z)[0].chunk(2, dim=1)[0]
    heads, width = attn.heads, q.shape[1] // attn.heads
    want = torch.zeros(q.shape[0], k.shape[0])
    for h in range(heads):
        part = slice(h * width, (h + 1) * width)
        want += (q[:, part] @ k[:, part].T * width**-0.5).softmax(1) / heads
    want = normalise(want.T.unflatten(1, grouping.grid))
    assert got.attention is not None
    assert torch.allclose(torch.from_numpy(got.attention), want, atol=1e-4)


def test_explaining_by_attention_hides_who_reads_a_cluster() -> None:
    torch.manual_seed(0)
    model = visualtokens.create_model("paca_vit_nano", num_classes=3).eval()
    x = torch.randn(3, 32, 48)
    groups, attention = (explain(model, x, of=of) for of in ("groups", "attention"))
    assert attention.of == "attention"
    assert (attention.maps == groups.attention).all()
    assert not (attention.importance == groups.importance).all()


@pytest.mark.parametrize(
    ("model", "size"), [(Learned(), (16, 16)), (SuperTokens(), (16, 16)), (Merging(), (16, 16))]
)
def test_models_without_it_say_so(model: torch.nn.Module, size: tuple[int, int]) -> None:
    x, prepare = torch.rand(3, *size), preprocess(*size)
    assert explain(model, x, preprocess=prepare).attention is None
    with pytest.raises(UserError, match="of='groups'"):
        explain(model, x, preprocess=prepare, of="attention")
    with pytest.raises(UserError, match="unknown of 'clusters'"):
        explain(model, x, preprocess=prepare, of="clusters")  # type: ignore[arg-type]


def test_visual_tokens_that_talk_are_not_taken_for_patches_that_read() -> None:
    """16 tokens of 4×4 pixels attend to each other: the shape is that of patches attending to clusters."""
    model = visualtokens.create_model("vt_resnet18", num_classes=3).eval()
    got = explain(model, torch.randn(3, 64, 64), layer=0, batch=32)
    assert got.maps.shape == (16, 4, 4)
    assert got.attention is None
