"""Which patches tokens stand for, and the way back to the grid."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch

import visualtokens
from visualtokens.errors import UserError
from visualtokens.reduce import METHODS, Pooled, forward_tokens
from visualtokens.reduce.state import State, advance

from .helpers import DEPTH, build, images, patches

reduce = visualtokens.reduce
KEEP = [12, 7, 3]  # of 16
JOINING = [m for m in METHODS if m not in ("power_bert", "importance", "random")]
DROPPING = ["power_bert", "importance", "random"]


def taps(model: Any, x: Any) -> list[visualtokens.Grouping]:
    with visualtokens.record_groupings(model) as groupings, torch.no_grad():
        model(x)
    assert list(groupings) == [f"blocks.{i}.reduction.tap" for i in range(len(groupings))]
    return list(groupings.values())


@pytest.mark.parametrize("method", JOINING)
def test_joined_tokens_share_out_all_patches(method: Any) -> None:
    model = build("deit")
    reduce(model, method, keep=[16, 4, 4] if method == "conv" else KEEP)
    before = torch.arange(16).expand(2, 16)
    for grouping in taps(model, images()):
        now = grouping.hard()
        assert grouping.maps().shape == (2, grouping.tokens, 4, 4)
        assert (grouping.dense().sum(2) == 1).all()
        assert (grouping.size.sum(1) == 16).all()
        for b in range(2):  # patches that were together stay together
            pairs = {(int(old), int(new)) for old, new in zip(before[b], now[b], strict=True)}
            assert len({old for old, _ in pairs}) == len(pairs)
        before = now


@pytest.mark.parametrize("method", DROPPING)
def test_kept_tokens_are_their_patches_in_their_order(method: Any) -> None:
    model = build("deit")
    reduce(model, method, keep=KEEP)
    for grouping, k in zip(taps(model, images()), KEEP, strict=True):
        for b in range(2):
            kept = (grouping.hard()[b] >= 0).nonzero().flatten()
            assert len(kept) == k
            assert grouping.hard()[b, kept].tolist() == list(range(k))


def test_the_source_map_is_that_of_the_tokens() -> None:
    """Power-BERT in the last block only: the features say which patches are left."""
    model, x = build("deit"), images()
    with torch.no_grad():
        plain = model.blocks[:-1](model._pos_embed(model.patch_embed(x)))
    reduce(model, "power_bert", keep=[16, 16, 5])
    (*_, last) = taps(model, x)
    seen: list[Any] = []
    handle = model.blocks[2].mlp.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model(x)
        expected = model.blocks[2].norm2(plain + model.blocks[2].attn(model.blocks[2].norm1(plain)))[:, 1:]
    handle.remove()
    for b in range(2):
        kept = (last.hard()[b] >= 0).nonzero().flatten()
        assert torch.allclose(seen[0][b, 1:], expected[b, kept], atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_features_have_every_patch(method: Any) -> None:
    model, x = build("deit"), images()
    reduce(model, method, keep=[16, 4, 4] if method == "conv" else KEEP)
    torch.manual_seed(0)
    tokens = forward_tokens(model, x)
    torch.manual_seed(0)
    features = model.forward_features(x)
    assert torch.equal(features[:, :1], tokens.prefix)
    assert torch.equal(visualtokens.unmerge(tokens.tokens, tokens.grouping), features[:, 1:])
    both = torch.cat((tokens.prefix, tokens.tokens), dim=1)
    assert torch.equal(visualtokens.unmerge(both, tokens.grouping), features[:, 1:])
    for b in range(2):
        for n in range(16):
            token = int(tokens.grouping.hard()[b, n])
            expected = tokens.tokens[b, token] if token >= 0 else torch.zeros(192)
            assert torch.equal(features[b, 1 + n], expected)
    with pytest.raises(UserError, match="give those of this grouping"):
        visualtokens.unmerge(tokens.tokens[:, 1:], tokens.grouping)


@pytest.mark.parametrize("kind", ["gap", "siglip", "eva"])
@pytest.mark.parametrize("method", ["kmedoids", "merge"])
def test_pooling_weighs_a_token_by_its_patches(kind: str, method: Any) -> None:
    """Average and attention pooling see as many copies of a token as it stands for patches."""
    model: Any = build(kind)
    n = patches(model)
    reduce(model, method, keep=[n, n - 4, n // 2])
    x = images(kind)
    with torch.no_grad():
        tokens = forward_tokens(model, x)
        for b in range(2):
            size = tokens.grouping.size[b].long()
            copies = tokens.tokens[b].repeat_interleave(size, dim=0)
            whole = torch.cat((tokens.prefix[b], copies)).unsqueeze(0)
            expected = type(model).forward_head(model, whole)
            assert torch.allclose(model(x)[b : b + 1], expected, atol=1e-5)


@pytest.mark.parametrize("pool", ["avg", "max", "avgmax", "map"])
@pytest.mark.parametrize("method", DROPPING)
def test_pooling_leaves_dropped_patches_out(pool: str, method: Any) -> None:
    model: Any = build("deit", global_pool=pool)
    reduce(model, method, keep=KEEP)
    x = images()
    with torch.no_grad():
        torch.manual_seed(0)
        tokens = forward_tokens(model, x)
        torch.manual_seed(0)
        got = model(x)
        few = torch.cat((tokens.prefix, tokens.tokens), dim=1)
        visualtokens.restore(model)
        assert torch.allclose(got, model.forward_head(few), atol=1e-5)


@pytest.mark.parametrize("kind", ["deit", "registers", "siglip", "eva"])
def test_intermediates_have_every_patch(kind: str) -> None:
    model: Any = build(kind)
    n, x, prefix = patches(model), images(kind), model.num_prefix_tokens
    reduce(model, "kmedoids", keep=[n, n // 2, n // 4])
    with torch.no_grad():
        last, maps = model.forward_intermediates(x)
        assert torch.equal(last, model.forward_features(x))
        assert [m.shape for m in maps] == [(2, model.embed_dim, *model.patch_embed.grid_size)] * DEPTH
        flat = model.forward_intermediates(x, output_fmt="NLC", intermediates_only=True, norm=True)
        assert torch.equal(flat[-1], last[:, prefix:])
        early = model.forward_intermediates(x, indices=[0, 1], stop_early=True, intermediates_only=True)
        assert all(torch.equal(a, b) for a, b in zip(early, maps, strict=False))
        groupings = taps(model, x)
        for m, grouping in zip(maps, groupings, strict=True):  # all patches of a token have its feature
            for b in range(2):
                for token in range(grouping.tokens):
                    own = m[b].flatten(1)[:, grouping.hard()[b] == token]
                    assert (own == own[:, :1]).all()
        if prefix:
            pairs = model.forward_intermediates(x, return_prefix_tokens=True, intermediates_only=True)
            assert pairs[0][1].shape == (2, prefix, model.embed_dim)
        named = model.forward_intermediates(x, output_dict=True)
        assert torch.equal(named["image_features"], last)


def test_features_only_and_fewer_blocks() -> None:
    backbone = timm.create_model(
        "deit_tiny_patch16_224", img_size=64, features_only=True, out_indices=(1, 3)
    ).eval()
    x = images()
    with torch.no_grad():
        plain = backbone(x)
        assert reduce(backbone, "merge", keep=[16, 12, 8, 8]) is backbone
        reduced = backbone(x)
        assert [m.shape for m in reduced] == [m.shape for m in plain]
        assert not torch.allclose(reduced[1], plain[1], atol=1e-4)
        visualtokens.restore(backbone)
        assert all(torch.equal(a, b) for a, b in zip(plain, backbone(x), strict=True))


def test_blocks_cut_off_behind_a_reduction() -> None:
    model, x = build("deit"), images()
    reduce(model, "merge", keep=KEEP)
    with torch.no_grad():
        expected = model.forward_intermediates(x, intermediates_only=True)[1]
        model.prune_intermediate_layers([1])
        assert torch.equal(model.forward_intermediates(x, intermediates_only=True)[-1], expected)


def test_hooks_of_blocks_still_fire() -> None:
    model = build("deit")
    reduce(model, "merge", keep=KEEP)
    shapes: list[Any] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _block, _given, out: shapes.append(out[0].shape[1]))
    with torch.no_grad():
        model(images())
    assert shapes == [1 + k for k in KEEP]


def test_positions_of_new_tokens() -> None:
    """A token of several patches takes the position of the one nearest to their middle, the first on ties."""
    # 0 0 1 2
    # 0 0 1 -
    # 3 1 1 4
    source = torch.tensor([[0, 0, 1, 2, 0, 0, 1, -1, 3, 1, 1, 4]])
    start = State(grid=(3, 4), cells=(3, 4), track=True)
    state = advance(
        start,
        Pooled(tokens=torch.zeros(1, 5, 2), assignment=source),
        5,
        carry=True,
        joins=False,
        positions=True,
    )
    assert state.anchor.tolist() == [[0, 6, 3, 8, 11]]
    chosen = advance(
        state,
        Pooled(chosen=torch.tensor([[1, 4]]), assignment=torch.tensor([[-1, 0, -1, -1, 1]])),
        2,
        carry=True,
        joins=False,
        positions=True,
    )
    assert chosen.anchor.tolist() == [[6, 11]]
    assert chosen.source.tolist() == [[-1, -1, 0, -1, -1, -1, 0, -1, -1, 0, 0, 1]]


def test_sizes_add_up_from_block_to_block() -> None:
    start = State(grid=(2, 2), cells=(2, 2), track=False)
    first = advance(
        start,
        Pooled(tokens=torch.zeros(1, 3, 2), assignment=torch.tensor([[0, 1, 1, 2]])),
        3,
        carry=True,
        joins=True,
        positions=False,
    )
    assert first.size.tolist() == [[1, 2, 1]]
    second = advance(
        first,
        Pooled(tokens=torch.zeros(1, 2, 2), assignment=torch.tensor([[1, 0, 1]])),
        2,
        carry=True,
        joins=True,
        positions=False,
    )
    assert second.size.tolist() == [[2, 2]]
    assert second.source is None


def test_a_reduced_model_can_be_explained() -> None:
    model = build("deit")
    reduce(model, "kmeans", keep=KEEP)
    why = visualtokens.explain(model, images(batch=1)[0], layer=1)
    assert why.layer == "blocks.1.reduction.tap"
    assert why.importance.shape == (7,)
