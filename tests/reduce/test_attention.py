"""timm's attentions, opened up, against themselves and against the equation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.layers import Attention, AttentionRope, LayerNorm
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from visualtokens.reduce.attention import Inputs, attention
from visualtokens.reduce.methods import KEYS, NOTHING, SIGNIFICANCE

DIM, HEADS, N, PREFIX = 24, 4, 9, 1
MODULES: dict[str, Any] = {
    "plain": lambda: Attention(DIM, HEADS, qkv_bias=True),
    "qk norm": lambda: Attention(DIM, HEADS, qk_norm=True, norm_layer=LayerNorm),
    "inner norm": lambda: Attention(DIM, HEADS, scale_norm=True, norm_layer=LayerNorm),
    "gate": lambda: Attention(DIM, HEADS, gated=True),
    "head size": lambda: Attention(DIM, HEADS, attn_head_dim=10),
    "rope": lambda: AttentionRope(DIM, HEADS, rotate_half=True),
    "grouped": lambda: AttentionRope(DIM, HEADS, qkv_fused=False, num_kv_heads=2),
    "eva": lambda: EvaAttention(DIM, HEADS, norm_layer=LayerNorm),
    "eva separate bias": lambda: EvaAttention(DIM, HEADS, qkv_bias_separate=True, scale_norm=False),
    "eva projections": lambda: EvaAttention(DIM, HEADS, qkv_fused=False, scale_norm=False, gated=True),
}


def module(name: str) -> nn.Module:
    torch.manual_seed(3)
    made = MODULES[name]()
    for p in made.parameters():
        nn.init.normal_(p, std=0.5)
    return made.eval()


def x(n: int = N) -> Tensor:
    return torch.randn(2, n, DIM, generator=torch.Generator().manual_seed(0))


def rope_for(made: nn.Module) -> Tensor | None:
    if isinstance(made, Attention):
        return None
    angle = torch.randn(N - PREFIX, DIM // HEADS, generator=torch.Generator().manual_seed(5))
    return torch.cat((angle.sin(), angle.cos()), dim=1)


@pytest.mark.parametrize("needs", [SIGNIFICANCE, KEYS, SIGNIFICANCE | KEYS, NOTHING])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_equals_timm(name: str, biased: bool, needs: Any) -> None:
    made, tokens = module(name), x()
    rope = rope_for(made)
    bias = torch.randn(2, N, generator=torch.Generator().manual_seed(9)) if biased else None
    options: dict[str, Any] = {} if rope is None else {"rope": rope}
    if bias is not None:
        options["attn_mask"] = bias[:, None, None, :]
    with torch.no_grad():
        expected = made(tokens, **options)
        got = attention(made, tokens, Inputs(bias, rope), needs)
    assert torch.allclose(got.out, expected, atol=1e-5)
    assert (got.significance is not None) == ("significance" in needs)
    assert (got.keys is not None) == ("keys" in needs)


@pytest.mark.parametrize("biased", [False, True])
def test_a_few_images_at_a_time_are_as_all_at_once(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made, tokens = module("plain"), torch.randn(5, N, DIM, generator=torch.Generator().manual_seed(1))
    bias = torch.randn(5, N, generator=torch.Generator().manual_seed(9)) if biased else None
    with torch.no_grad():
        for at_once in (1, 2, 5):
            monkeypatch.setitem(attention.__globals__, "CACHED_WEIGHTS", at_once * HEADS * N**2)
            got = attention(made, tokens, Inputs(bias), SIGNIFICANCE)
            one_by_one = [
                attention(
                    made, tokens[i : i + 1], Inputs(None if bias is None else bias[i : i + 1]), SIGNIFICANCE
                )
                for i in range(5)
            ]
            assert torch.allclose(got.out, torch.cat([each.out for each in one_by_one]), atol=1e-6)
            assert got.significance is not None
            expected = torch.cat([each.significance for each in one_by_one if each.significance is not None])
            assert torch.allclose(got.significance, expected, atol=1e-6)


def test_significance_is_the_attention_received() -> None:
    made: Any = module("plain")
    tokens = x()
    with torch.no_grad():
        got = attention(made, tokens, Inputs(), SIGNIFICANCE).significance
        q, k, _ = made.qkv(tokens).reshape(2, N, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        received = torch.zeros(2, N)
        for b in range(2):
            for head in range(HEADS):
                for i in range(N):  # every query, the class token among them
                    received[b] += (q[b, head, i] @ k[b, head].T / (DIM // HEADS) ** 0.5).softmax(0)
    assert torch.allclose(got, received, atol=1e-5)
    assert torch.allclose(got.sum(1), torch.full((2,), float(HEADS * N)))


@pytest.mark.parametrize("needs", [SIGNIFICANCE, NOTHING])
def test_a_token_that_stands_for_s_counts_s_times(needs: Any) -> None:
    """Appendix E: log s on one token is the same as s copies of it."""
    made, tokens = module("plain"), x(4)
    size = torch.tensor([[1.0, 3.0, 1.0, 2.0], [2.0, 1.0, 1.0, 3.0]])
    for b in range(2):
        copies = tokens[b].repeat_interleave(size[b].long(), dim=0).unsqueeze(0)
        first = torch.cat((torch.zeros(1), size[b].cumsum(0)[:-1])).long()
        with torch.no_grad():
            expected = made(copies)[:, first]
            got = attention(made, tokens[b : b + 1], Inputs(size[b : b + 1].log()), needs).out
        assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("needs", [SIGNIFICANCE, NOTHING])
@pytest.mark.parametrize("alpha", [1.0, 4.0, torch.tensor(2.5)])
def test_unit_queries_and_keys(alpha: Any, needs: Any) -> None:
    """Appendix F: cosines times α."""
    made: Any = module("plain")
    tokens = x()
    with torch.no_grad():
        q, k, v = made.qkv(tokens).reshape(2, N, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = q / q.norm(dim=3, keepdim=True), k / k.norm(dim=3, keepdim=True)
        expected = made.proj(((q @ k.mT * alpha).softmax(3) @ v).transpose(1, 2).flatten(2))
        got = attention(made, tokens, Inputs(alpha=alpha), needs).out
    assert torch.allclose(got, expected, atol=1e-5)


def test_keys_are_the_mean_of_the_heads() -> None:
    made: Any = module("plain")
    with torch.no_grad():
        got = attention(made, x(), Inputs(), KEYS).keys
        k = made.qkv(x()).reshape(2, N, 3, HEADS, -1)[:, :, 1]
    assert torch.allclose(got, k.mean(2), atol=1e-6)


@pytest.mark.parametrize("needs", [SIGNIFICANCE, KEYS])
def test_dropout_of_the_attention_stays(needs: Any) -> None:
    made: Any = Attention(DIM, HEADS, attn_drop=0.9).train()
    torch.manual_seed(0)
    a = attention(made, x(), Inputs(), needs).out
    b = attention(made, x(), Inputs(), needs).out
    assert not torch.allclose(a, b)
