"""Every kind of vision transformer, with every method."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import visualtokens
from visualtokens.bench import count_macs
from visualtokens.reduce import METHODS, macs

from .helpers import DEPTH, KINDS, ROTARY, build, images, patches, run, size_of

every_kind = pytest.mark.parametrize("kind", KINDS)
every_method = pytest.mark.parametrize("method", METHODS)


def halving(n: int) -> list[int]:
    """A schedule that every method, the convolution included, can keep."""
    return [n, n // 4, n // 16]


@every_kind
def test_keeping_everything_changes_nothing(kind: str) -> None:
    model, x = build(kind), images(kind)
    with torch.no_grad():
        expected, features = model(x), model.forward_features(x)
        for method in METHODS:
            for keep in (1.0, [10_000] * DEPTH):
                visualtokens.reduce(model, method, keep=keep)
                assert torch.allclose(model(x), expected, atol=1e-6, rtol=0)
                assert torch.allclose(model.forward_features(x), features, atol=1e-6, rtol=0)
            visualtokens.restore(model)


@every_kind
def test_looking_inside_changes_nothing(kind: str) -> None:
    """One token goes in the last block: what comes before is the same, though the attention is opened."""
    model, x = build(kind), images(kind)
    n = patches(model)
    with torch.no_grad():
        plain = model.forward_intermediates(x, intermediates_only=True)
        for method in ("weighted_kmedoids", "merge"):
            visualtokens.reduce(model, method, keep=[n, n, n - 1])
            reduced = model.forward_intermediates(x, intermediates_only=True)
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain[:2], reduced[:2], strict=True))
            assert not torch.equal(plain[2], reduced[2])
            visualtokens.restore(model)


@every_kind
@every_method
def test_shapes_names_and_copies(kind: str, method: Any) -> None:
    model, x = build(kind), images(kind)
    n, names = patches(model), list(model.state_dict())
    with torch.no_grad():
        plain, features = model(x), model.forward_features(x)
    kinds = [type(module) for module in model.modules()]
    visualtokens.reduce(model, method, keep=halving(n))
    reduced = run(model, x)
    assert reduced.shape == plain.shape
    assert torch.isfinite(reduced).all()
    assert not torch.allclose(reduced, plain, atol=1e-6)
    torch.manual_seed(0)
    with torch.no_grad():
        assert model.forward_features(x).shape == features.shape
    added = [name for name in model.state_dict() if name not in names]
    assert all(name.endswith("reduction.pool.weight") for name in added)
    assert bool(added) == (method == "conv")
    assert [type(m) for m in model.modules() if not type(m).__module__.startswith("visualtokens")] == kinds
    twin = copy.deepcopy(model)
    assert torch.equal(run(pickle.loads(pickle.dumps(model)), x), reduced)
    assert torch.equal(run(twin, x), reduced)
    visualtokens.restore(model)
    assert torch.equal(run(model, x), plain)
    assert list(model.state_dict()) == names
    assert torch.equal(run(twin, x), reduced)  # the copy stands on its own


@every_kind
@every_method
def test_the_head_of_the_features_is_the_output(kind: str, method: Any) -> None:
    model, x = build(kind), images(kind)
    visualtokens.reduce(model, method, keep=halving(patches(model)))
    with torch.no_grad():
        torch.manual_seed(0)
        by_parts = model.forward_head(model.forward_features(x))
    assert torch.allclose(run(model, x), by_parts, atol=1e-6)


@every_kind
@every_method
def test_the_cost_is_what_running_it_counts(kind: str, method: Any) -> None:
    model = build(kind)
    visualtokens.reduce(model, method, keep=halving(patches(model)))
    assert macs(model).total == count_macs(model, (size_of(kind),) * 2)


@every_kind
def test_gradients_reach_every_parameter(kind: str) -> None:
    model = build(kind).train()
    visualtokens.reduce(model, "weighted_kmeans", keep=halving(patches(model)))
    model(images(kind)).square().sum().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    visualtokens.restore(model)
    model.zero_grad()
    model(images(kind)).square().sum().backward()
    assert missing == [n for n, p in model.named_parameters() if p.grad is None]


@every_kind
def test_gradient_checkpointing_equals_plain(kind: str) -> None:
    model = build(kind).train()
    visualtokens.reduce(model, "weighted_kmedoids", keep=halving(patches(model)))
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        torch.manual_seed(0)
        model(images(kind)).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.allclose(plain, checkpointed, atol=1e-6 * plain.abs().max().item() + 1e-6)


@every_kind
def test_compiles_as_one_graph(kind: str) -> None:
    torch._dynamo.reset()
    model, x = build(kind), images(kind)
    visualtokens.reduce(model, "weighted_kmedoids", keep=halving(patches(model)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-4)


@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize("method", ["weighted_kmedoids", "power_bert"])
def test_a_chosen_token_keeps_its_rotary_position(kind: str, method: Any) -> None:
    """The same tokens with the same positions, once reduced and once by hand: the next block agrees."""
    model: Any = build(kind)
    x, n = images(kind), patches(model)
    prefix = model.num_prefix_tokens
    visualtokens.reduce(model, method, keep=[n - 5, n - 5, n - 5], carry=False)
    with visualtokens.record_groupings(model) as groupings, torch.no_grad():
        model.forward_features(x)
        first, _, _ = model.forward_intermediates(
            x, output_fmt="NLC", intermediates_only=True, return_prefix_tokens=True
        )
        second = model.forward_intermediates(x, indices=[1], output_fmt="NLC", intermediates_only=True)[0]
    source = groupings["blocks.0.reduction.tap"].hard()  # (B, N)
    visualtokens.restore(model)
    rope = model._pos_embed(model.patch_embed(x))[1]
    rope = rope[1] if model.rope_mixed else rope
    for b in range(len(x)):
        # In which order tokens come does not matter; each has the position of one of its own patches.
        found = []
        for j in range(n - 5):
            own = (source[b] == j).nonzero().flatten()
            found.append(own)
        tokens = torch.stack([first[0][b, own[0]] for own in found])
        full = torch.cat((first[1][b], tokens)).unsqueeze(0)
        if method == "power_bert":  # every token is its own patch
            place = rope[..., torch.cat(found), :]
            with torch.no_grad():
                expected = model.blocks[1](full, rope=place)[0, prefix:]
            assert torch.allclose(second[b, torch.cat(found)], expected, atol=1e-4)
