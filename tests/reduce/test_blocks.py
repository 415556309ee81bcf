"""Reduced blocks of every kind, and the models that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import visualtokens
from tests.reduce.helpers import DEPTH, KINDS, ROTARY, build, images, patches, quarters, run
from visualtokens.bench import count_macs
from visualtokens.errors import UserError
from visualtokens.reduce import Place, Pool, Pooled, Seen, macs
from visualtokens.reduce.attention import Evidence
from visualtokens.reduce.methods import KEYS, SIGNIFICANCE

every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_keeping_all_tokens_changes_nothing(kind: str) -> None:
    model, x = build(kind), images(kind)
    with torch.no_grad():
        expected, features = model(x), model.forward_features(x)
        for method in ("random", "merge", "weighted_kmedoids"):  # needs nothing, keys, significance
            visualtokens.reduce(model, method, keep=1.0)
            assert_close(model(x), expected)
            assert_close(model.forward_features(x), features)


class Inspect(Pool):
    """Keeps all tokens, but needs evidence from the attention, and records its shapes."""

    def __init__(self, needs: frozenset[Evidence], shapes: list[Any]) -> None:
        super().__init__()
        self.needs, self.shapes = needs, shapes

    def acts(self, n: int, k: int) -> bool:
        return True

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        evidence = (seen.significance, seen.keys)
        self.shapes.append([None if e is None else tuple(e.shape[:2]) for e in evidence])
        return Pooled(tokens=x, assignment=torch.arange(x.shape[1]).expand(x.shape[:2]))


@every_kind
@pytest.mark.parametrize("needs", [KEYS, SIGNIFICANCE])
def test_evidence_does_not_change_the_output(kind: str, needs: frozenset[Evidence]) -> None:
    model, x = build(kind), images(kind)
    n, expected, shapes = patches(model), run(model, x), []

    def inspect(place: Place) -> Pool:
        return Inspect(needs, shapes)

    visualtokens.reduce(model, inspect, keep=1.0, carry=False)
    got = run(model, x)
    # three blocks of float32 sums in another order: some 1e-6 of the largest value each
    assert_close(got, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    shape = (2, n)
    assert shapes == [[shape if needs == SIGNIFICANCE else None, shape if needs == KEYS else None]] * DEPTH


@every_kind
def test_reduced_model_of_every_kind(kind: str) -> None:
    """Shapes, cost, the head of the features and an exact restore."""
    model, x = build(kind), images(kind)
    plain = run(model, x)
    visualtokens.reduce(model, "merge", keep=quarters(patches(model)))
    reduced = run(model, x)
    assert reduced.shape == plain.shape
    assert torch.isfinite(reduced).all()
    assert not torch.allclose(reduced, plain, atol=1e-3)
    with torch.no_grad():
        features = model.forward_features(x)
        assert features.shape == (2, model.num_prefix_tokens + patches(model), model.embed_dim)
        assert_close(model.forward_head(features), reduced)
    assert macs(model).total == count_macs(model, tuple(x.shape[2:]))
    visualtokens.restore(model)
    assert torch.equal(run(model, x), plain)


@every_kind
def test_only_prefix_tokens_attend_where_no_patch_is_kept(kind: str) -> None:
    """The same class token as with all queries: a last block that keeps one patch computes them."""
    model, x = build(kind), images(kind)
    n = patches(model)
    if model.global_pool != "token" or not model.num_prefix_tokens:
        return
    visualtokens.reduce(model, "merge", keep=[n, n, 1])
    expected = run(model, x)
    visualtokens.reduce(model, "merge", keep=[n, n, 0])
    assert_close(run(model, x), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    assert macs(model).total == count_macs(model, tuple(x.shape[2:]))


@every_kind
def test_gradients_with_and_without_checkpointing(kind: str) -> None:
    model = build(kind).train()
    visualtokens.reduce(model, "weighted_kmeans", keep=quarters(patches(model)))
    gradients = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        model(images(kind)).square().sum().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    visualtokens.restore(model)
    model.set_grad_checkpointing(False)
    model.zero_grad()
    model(images(kind)).square().sum().backward()
    assert set(gradients[0]) == {n for n, p in model.named_parameters() if p.grad is not None}
    for name, gradient in gradients[0].items():
        assert gradient.isfinite().all()
        assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())


@pytest.mark.parametrize(
    ("kind", "method"), [("deit", "weighted_kmedoids"), ("rope_mixed", "merge"), ("parallel", "power_bert")]
)
def test_compiles_as_one_graph(kind: str, method: str) -> None:
    torch._dynamo.reset()
    model, x = build(kind, depth=2), images(kind)
    n = patches(model)
    visualtokens.reduce(model, method, keep=[n // 2, n // 4])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ROTARY)
def test_chosen_tokens_keep_their_rotary_positions(kind: str) -> None:
    """The second block equals timm's on the kept tokens with the positions of their patches."""
    model: Any = build(kind)
    x, k, prefix = images(kind), patches(model) - 5, model.num_prefix_tokens
    visualtokens.reduce(model, "power_bert", keep=[k, k, k])
    with visualtokens.record_groupings(model) as groupings, torch.no_grad():
        first, second = model.forward_intermediates(
            x, indices=[0, 1], output_fmt="NLC", intermediates_only=True, return_prefix_tokens=True
        )
    source = groupings["blocks.0.reduction.tap"].hard()  # (B, N)
    visualtokens.restore(model)
    rope = model._pos_embed(model.patch_embed(x))[1]
    rope = rope[1] if model.rope_mixed else rope
    for b in range(len(x)):
        kept = (source[b] >= 0).nonzero().flatten()
        tokens = torch.cat((first[1][b], first[0][b, kept])).unsqueeze(0)
        with torch.no_grad():
            expected = model.blocks[1](tokens, rope=rope[..., kept, :])[0, prefix:]
        assert_close(second[0][b, kept], expected, rtol=1e-4, atol=1e-4)


class Overriding(timm.models.VisionTransformer):
    def forward_features(self, x: Tensor, **options: Any) -> Tensor:
        return super().forward_features(x, **options) * 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: timm.create_model("resnet18"), "ResNet: it is not a vision transformer of a supported kind"),
        (lambda: nn.Sequential(build("deit")), "reduce the model inside"),
        (lambda: build("deit", patch_drop_rate=0.1), "patch_drop_rate=0"),
        (lambda: build("deit", attn_layer="diff"), "DiffAttention of block 0 subtracts"),
        (
            lambda: timm.models.VisionTransformer(
                depth=1, block_fn=timm.models.vision_transformer.ParallelScalingBlock
            ),
            "ParallelScalingBlock of block 0 runs attention and MLP in parallel",
        ),
        (lambda: Overriding(depth=1), "overrides VisionTransformer.forward_features"),
    ],
)
def test_unsupported_models_are_refused_with_the_reason(model: Any, message: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=message):
        visualtokens.reduce(model(), "merge", keep=0.5)
