"""The outputs of a reduced model: one feature per patch, from few tokens."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch.testing import assert_close

import visualtokens
from tests.reduce.helpers import DEPTH, DIM, build, images, patches
from visualtokens.errors import UserError
from visualtokens.reduce import METHODS, forward_tokens, reduce

KEEP = [12, 7, 3]  # of 16
DROPPING = ["power_bert", "importance", "random"]
JOINING = [m for m in METHODS if m not in DROPPING]


def keep_for(method: str) -> list[int]:
    return [16, 4, 4] if method == "conv" else KEEP


def taps(model: Any, x: Any) -> list[visualtokens.Grouping]:
    with visualtokens.record_groupings(model) as groupings, torch.no_grad():
        model(x)
    assert list(groupings) == [f"blocks.{i}.reduction.tap" for i in range(len(groupings))]
    return list(groupings.values())


@pytest.mark.parametrize("method", JOINING)
def test_joined_tokens_partition_the_patches(method: str) -> None:
    model = reduce(build("deit"), method, keep=keep_for(method))
    before = torch.arange(16).expand(2, 16)
    for grouping in taps(model, images()):
        now = grouping.hard()
        assert (grouping.dense().sum(2) == 1).all()
        assert (grouping.size.sum(1) == 16).all()
        for b in range(2):  # patches of one token are never separated again
            pairs = {(int(old), int(new)) for old, new in zip(before[b], now[b], strict=True)}
            assert len({old for old, _ in pairs}) == len(pairs)
        before = now


@pytest.mark.parametrize("method", DROPPING)
def test_kept_tokens_stay_in_order(method: str) -> None:
    model = reduce(build("deit"), method, keep=KEEP)
    for grouping, k in zip(taps(model, images()), KEEP, strict=True):
        for b in range(2):
            kept = grouping.hard()[b][grouping.hard()[b] >= 0]
            assert kept.tolist() == list(range(k))


def test_taps_name_the_patches_that_the_mlp_receives() -> None:
    """PoWER-BERT in the last block only: the MLP's input is that of the plain model at the kept patches."""
    model, x = build("deit"), images()
    with torch.no_grad():
        plain = model.blocks[:-1](model._pos_embed(model.patch_embed(x)))
    reduce(model, "power_bert", keep=[16, 16, 5])
    (*_, last) = taps(model, x)
    inputs: list[Any] = []
    model.blocks[2].mlp.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    with torch.no_grad():
        model(x)
        expected = model.blocks[2].norm2(plain + model.blocks[2].attn(model.blocks[2].norm1(plain)))[:, 1:]
    for b in range(2):
        kept = (last.hard()[b] >= 0).nonzero().flatten()
        assert_close(inputs[0][b, 1:], expected[b, kept], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_each_patch_has_the_feature_of_its_token(method: str) -> None:
    model, x = reduce(build("deit"), method, keep=keep_for(method)), images()
    torch.manual_seed(0)
    found = forward_tokens(model, x)
    torch.manual_seed(0)
    features = model.forward_features(x)
    assert torch.equal(features[:, :1], found.prefix)
    assert torch.equal(visualtokens.unmerge(found.tokens, found.grouping), features[:, 1:])
    for b in range(2):
        for n in range(16):
            token = int(found.grouping.hard()[b, n])
            expected = found.tokens[b, token] if token >= 0 else torch.zeros(DIM)
            assert torch.equal(features[b, 1 + n], expected)


def test_a_plain_model_has_no_tokens() -> None:
    with pytest.raises(UserError, match="is not reduced; call"):
        forward_tokens(build("deit"), images())


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_only_the_class_token_is_left_if_k_is_0(method: str, carry: bool) -> None:
    model, x = reduce(build("deit"), method, keep=[9, 0, 0], carry=carry), images()
    with torch.no_grad():
        assert forward_tokens(model, x).tokens.shape[1] == (1 if method == "conv" else 0)  # conv keeps one
        assert torch.isfinite(model(x)).all()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gap", "siglip", "eva"])
@pytest.mark.parametrize("method", ["kmedoids", "merge"])
def test_pooling_weighs_a_token_by_its_patches(kind: str, method: str) -> None:
    """Average and attention pooling equal those over as many copies of a token as it has patches."""
    model: Any = build(kind)
    n = patches(model)
    reduce(model, method, keep=[n, n - 4, n // 2])
    x = images(kind)
    found = forward_tokens(model, x)
    for b in range(2):
        copies = found.tokens[b].repeat_interleave(found.grouping.size[b].long(), dim=0)
        expected = type(model).forward_head(model, torch.cat((found.prefix[b], copies)).unsqueeze(0))
        assert_close(model(x)[b : b + 1], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("pool", ["avg", "max", "avgmax", "map"])
def test_pooling_ignores_dropped_patches(pool: str) -> None:
    model: Any = build("deit", global_pool=pool)
    reduce(model, "power_bert", keep=KEEP)
    x = images()
    found, got = forward_tokens(model, x), model(x)
    visualtokens.restore(model)
    few = torch.cat((found.prefix, found.tokens), dim=1)
    assert_close(got, model.forward_head(few), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["registers", "siglip", "eva"])
def test_intermediates_have_every_patch(kind: str) -> None:
    model: Any = build(kind)
    n, x, prefix = patches(model), images(kind), model.num_prefix_tokens
    reduce(model, "kmedoids", keep=[n, n // 2, n // 4])
    last, maps = model.forward_intermediates(x)
    assert torch.equal(last, model.forward_features(x))
    assert [m.shape for m in maps] == [(2, model.embed_dim, *model.patch_embed.grid_size)] * DEPTH
    flat = model.forward_intermediates(x, output_fmt="NLC", intermediates_only=True, norm=True)
    assert torch.equal(flat[-1], last[:, prefix:])
    early = model.forward_intermediates(x, indices=[0, 1], stop_early=True, intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(early, maps, strict=False))
    for m, grouping in zip(maps, taps(model, x), strict=True):  # all patches of a token have its feature
        for b in range(2):
            for token in range(grouping.tokens):
                own = m[b].flatten(1)[:, grouping.hard()[b] == token]
                assert (own == own[:, :1]).all()
    if prefix:
        pairs = model.forward_intermediates(x, return_prefix_tokens=True, intermediates_only=True)
        assert pairs[0][1].shape == (2, prefix, model.embed_dim)
    named = model.forward_intermediates(x, output_dict=True)
    assert torch.equal(named["image_features"], last)
    with pytest.raises(UserError, match="give 'NCHW' or 'NLC'"):
        model.forward_intermediates(x, output_fmt="NHWC")


@torch.no_grad()
def test_features_only_models() -> None:
    options = dict(img_size=64, embed_dim=DIM, num_heads=4, depth=4)
    backbone = timm.create_model("deit_tiny_patch16_224", features_only=True, out_indices=(1, 3), **options)
    backbone, x = backbone.eval(), images()
    plain = backbone(x)
    assert reduce(backbone, "merge", keep=[16, 12, 8, 8]) is backbone
    reduced = backbone(x)
    assert [m.shape for m in reduced] == [m.shape for m in plain]
    assert not torch.allclose(reduced[1], plain[1], atol=1e-4)
    visualtokens.restore(backbone)
    assert all(torch.equal(a, b) for a, b in zip(plain, backbone(x), strict=True))


@torch.no_grad()
def test_pruned_blocks() -> None:
    model, x = reduce(build("deit"), "merge", keep=KEEP), images()
    expected = model.forward_intermediates(x, intermediates_only=True)[1]
    model.prune_intermediate_layers([1])
    assert torch.equal(model.forward_intermediates(x, intermediates_only=True)[-1], expected)


@torch.no_grad()
def test_block_hooks_see_the_reduced_tokens() -> None:
    model = reduce(build("deit"), "merge", keep=KEEP)
    shapes: list[Any] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _block, _given, out: shapes.append(out[0].shape[1]))
    model(images())
    assert shapes == [1 + k for k in KEEP]


@torch.no_grad()
@pytest.mark.parametrize("size", [(96, 64), (50, 70)])
def test_images_of_other_sizes(size: tuple[int, int]) -> None:
    model = timm.create_model("deit_e252", depth=3, num_classes=5).eval()
    x = torch.randn(2, 3, *size)
    grid = -(-size[0] // 16), -(-size[1] // 16)
    (*_, last) = taps(reduce(model, "kmedoids", keep=0.3), x)
    assert last.grid == grid
    assert last.tokens == -(-3 * grid[0] * grid[1] // 10)
    assert reduce(model, "conv", keep=[49, 49, 16])(x).shape == (2, 5)


def test_masks_are_refused() -> None:
    model = reduce(build("deit"), "merge", keep=0.5)
    for call in (model, model.forward_features, model.forward_intermediates):
        with pytest.raises(UserError, match="restore it first"):
            call(images(), is_causal=True)


def test_reduced_models_can_be_explained() -> None:
    model = reduce(build("deit"), "kmeans", keep=KEEP)
    why = visualtokens.explain(model, images(batch=1)[0], method="cluster", layer=1)
    assert why.layer == "blocks.1.reduction.tap"
    assert why.values.shape == (7,)
