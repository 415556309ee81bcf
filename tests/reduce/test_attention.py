"""Attention with significance and keys, against timm's modules and against the equation."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from timm.layers import Attention, AttentionRope, LayerNorm
from timm.models.eva import EvaAttention
from torch import Tensor, nn
from torch.testing import assert_close

from tests.reduce.helpers import randn
from visualtokens.reduce.attention import Positions, attention
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
ADDED_LATER = {  # to timm: gates in 1.0.28, grouped heads in 1.0.30
    "gate": (Attention, "gated"),
    "grouped": (AttentionRope, "num_kv_heads"),
    "eva projections": (EvaAttention, "gated"),
}
for _kind, (_module, _option) in ADDED_LATER.items():
    if _option not in inspect.signature(_module).parameters:
        del MODULES[_kind]
X = randn(2, N, DIM)
# Logits and outputs here are below 100 in magnitude; two orders of summation of some 25 float32 products
# differ by at most 25 · 100 · 2⁻²⁴ ≈ 1.5e-4, in practice by a tenth of that.
CLOSE = dict(rtol=1e-4, atol=2e-5)


def make(name: str) -> Any:
    torch.manual_seed(3)
    module = MODULES[name]()
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
    return module.eval()


def rope_for(module: nn.Module) -> Tensor | None:
    if isinstance(module, Attention):
        return None
    angle = randn(N - PREFIX, DIM // HEADS, seed=5)
    return torch.cat((angle.sin(), angle.cos()), dim=1)


@torch.no_grad()
@pytest.mark.parametrize("needs", [SIGNIFICANCE | KEYS, KEYS, NOTHING])
@pytest.mark.parametrize("name", MODULES)
def test_output_equals_timm(name: str, needs: Any) -> None:
    module = make(name)
    rope = rope_for(module)
    options: dict[str, Any] = {} if rope is None else {"rope": rope}
    for bias in (None, randn(2, N, seed=9)):
        if bias is not None:
            options["attn_mask"] = bias[:, None, None, :]
        out, significance, keys = attention(module, X, bias=bias, positions=Positions(rope), needs=needs)
        assert_close(out, module(X, **options), **CLOSE)
        assert (significance is not None) == ("significance" in needs)
        assert (keys is not None) == ("keys" in needs)


def test_significance_is_the_attention_received() -> None:
    module = make("plain")
    with torch.no_grad():
        _, got, _ = attention(module, X, needs=SIGNIFICANCE)
        q, k, _ = module.qkv(X).reshape(2, N, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        received = torch.zeros(2, N)
        for b in range(2):
            for head in range(HEADS):
                for i in range(N):  # all queries, including the class token
                    received[b] += (q[b, head, i] @ k[b, head].T / (DIM // HEADS) ** 0.5).softmax(0)
    assert_close(got, received, **CLOSE)


def test_keys_are_averaged_over_the_heads() -> None:
    module = make("plain")
    with torch.no_grad():
        _, _, got = attention(module, X, needs=KEYS)
        k = module.qkv(X).reshape(2, N, 3, HEADS, -1)[:, :, 1]
    assert_close(got, k.mean(2), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("needs", [SIGNIFICANCE, NOTHING])
def test_log_size_bias_equals_copies_of_a_token(needs: Any) -> None:
    """Appendix E: a bias of log s for one token gives the same output as s copies of it."""
    module, x = make("plain"), X[:, :4]
    size = torch.tensor([[1.0, 3.0, 1.0, 2.0], [2.0, 1.0, 1.0, 3.0]])
    for b in range(2):
        copies = x[b].repeat_interleave(size[b].long(), dim=0).unsqueeze(0)
        first = torch.cat((torch.zeros(1), size[b].cumsum(0)[:-1])).long()
        out, _, _ = attention(module, x[b : b + 1], bias=size[b : b + 1].log(), needs=needs)
        assert_close(out, module(copies)[:, first], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("needs", [SIGNIFICANCE, NOTHING])
@pytest.mark.parametrize("alpha", [4.0, torch.tensor(2.5)])
def test_unit_queries_and_keys(alpha: Any, needs: Any) -> None:
    """Appendix F: the logits are cosines times α."""
    module = make("plain")
    q, k, v = module.qkv(X).reshape(2, N, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    q, k = q / q.norm(dim=3, keepdim=True), k / k.norm(dim=3, keepdim=True)
    expected = module.proj(((q @ k.mT * alpha).softmax(3) @ v).transpose(1, 2).flatten(2))
    assert_close(attention(module, X, alpha=alpha, needs=needs)[0], expected, **CLOSE)


@pytest.mark.parametrize("needs", [SIGNIFICANCE, KEYS])
def test_attention_dropout_in_training(needs: Any) -> None:
    module = Attention(DIM, HEADS, attn_drop=0.9).train()
    torch.manual_seed(0)
    first, second = (attention(module, X, needs=needs)[0] for _ in range(2))
    assert not torch.allclose(first, second)
