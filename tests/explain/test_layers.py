from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from torch import nn

import visualtokens
from visualtokens.errors import UserError
from visualtokens.explain import compose, explain
from visualtokens.explain.layers import form_of, on_patches
from visualtokens.grouping import Grouping, record_groupings
from visualtokens.reduce import METHODS, forward_tokens

from .stubs import Learned, Merging, SuperTokens, preprocess


def hard(assignment: list[int], tokens: int, grid: tuple[int, int]) -> Grouping:
    return Grouping.hard_from(torch.tensor([assignment]), tokens, grid)


def test_compose_against_a_loop() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        first, then = rng.integers(-1, 4, 12).tolist(), rng.integers(-1, 3, 4).tolist()
        got = compose(hard(first, 4, (3, 4)), hard(then, 3, (1, 4)))
        want = [-1 if token < 0 else then[token] for token in first]
        assert got.hard()[0].tolist() == want
        assert got.grid == (3, 4)
        assert got.size[0].tolist() == [want.count(k) for k in range(3)]


def test_compose_with_nothing_left() -> None:
    nothing = compose(hard([0, 1], 2, (1, 2)), hard([-1, -1], 0, (1, 2)))
    assert nothing.hard()[0].tolist() == [-1, -1]
    assert compose(hard([-1, -1], 0, (1, 2)), hard([], 0, (1, 0))).hard()[0].tolist() == [-1, -1]


def test_only_hard_groupings_that_fit_are_composed() -> None:
    soft = Grouping.soft(torch.rand(1, 4, 2), (2, 2))
    with pytest.raises(UserError, match="soft and hard"):
        compose(soft, hard([0, 1], 2, (1, 2)))
    with pytest.raises(UserError, match="makes 2 tokens, the second groups 3"):
        compose(hard([0, 1, 0, 1], 2, (2, 2)), hard([0, 1, 1], 2, (1, 3)))


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("layer", [0, 2])
def test_merged_tokens_stand_for_their_patches_however_they_are_told(rows: bool, layer: int) -> None:
    got = explain(Merging(rows=rows), torch.rand(3, 16, 16), preprocess=preprocess(16, 16), layer=layer)
    assert got.form == "hard"
    assert got.assignment.tolist() == Merging.slow(layer)
    assert got.maps.shape == (Merging.TOKENS[layer], 4, 4)
    for k, one in enumerate(got.maps):
        assert np.array_equal(one, got.assignment == k)
    # The second layer changes nothing and is not shown again.
    assert [(one.name, one.tokens) for one in got.layers] == [("taps.0", 5), ("taps.2", 2)]
    assert [one.assignment.tolist() for one in got.layers] == [Merging.slow(0), Merging.slow(2)]
    assert got.layers[1].dropped == 1


def test_a_row_of_patches_is_not_taken_for_a_row_of_tokens() -> None:
    """On a strip of an image, as many patches in a row as the layer before has tokens."""
    groupings = {"a": hard([0, 0, 1, 1, 2, 2, 3, 3], 4, (1, 8)), "b": hard([0, 0, 1, 1], 2, (1, 4))}
    assert on_patches(groupings, (32, 128))["b"].grid == (1, 4)
    assert on_patches(groupings, (128, 128))["b"].grid == (1, 8)


def test_super_tokens_tessellate() -> None:
    torch.manual_seed(0)
    model = SuperTokens()
    x = torch.rand(3, 24, 16)
    got = explain(model, x, preprocess=preprocess(24, 16))
    with record_groupings(model) as groupings:
        model(x[None])
    grouping = groupings["tap"]
    assert form_of(grouping) == got.form == "tessellation"
    assert got.maps.shape == (6, 6, 4)
    for n in range(24):
        candidates = {
            int(i): float(w) for i, w in zip(grouping.index[0, n], grouping.weights[0, n], strict=True)
        }
        assert got.assignment[divmod(n, 4)] == max(candidates, key=lambda k: candidates[k])
    assert [one.name for one in got.layers] == ["tap"]
    assert got.layers[0].assignment.tolist() == got.assignment.tolist()


def test_soft_maps_are_no_division_of_the_patches() -> None:
    got = explain(Learned(), torch.rand(3, 16, 16), preprocess=preprocess(16, 16))
    assert got.form == "soft"
    assert got.layers == ()
    with pytest.raises(UserError, match=r"plot\(\) shows its maps"):
        got.plot_layers()


FAMILIES = [
    name for name in ("vt_resnet18", "paca_vit_nano", "stvit_small") if name in visualtokens.list_models()
]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_explained(name: str) -> None:
    torch.manual_seed(0)
    model = visualtokens.create_model(name, num_classes=3).eval()
    x = torch.randn(3, 64, 96)
    with torch.no_grad(), record_groupings(model) as groupings:
        probabilities = model(x[None]).softmax(1)[0]
    got = explain(model, x, batch=32)
    last = list(groupings)[-1]
    assert got.layer == last
    assert got.maps.shape == (groupings[last].tokens, *groupings[last].grid)
    assert np.allclose(got.probabilities, probabilities, atol=1e-5)
    assert np.isfinite(got.importance).all()
    assert got.form == ("tessellation" if name.startswith("stvit") else "soft")


def test_no_tokens_left() -> None:
    class Nothing(Merging):
        ASSIGNMENTS = ([-1] * 16,)
        TOKENS = (0,)

    with pytest.raises(UserError, match="Nothing has no tokens left on this image"):
        explain(Nothing(), torch.rand(3, 16, 16), preprocess=preprocess(16, 16))


def reduced_vit(method: str, keep: list[int]) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(
        "deit_tiny_patch16_224", img_size=(64, 96), depth=len(keep), embed_dim=24, num_heads=3, num_classes=3
    ).eval()
    visualtokens.reduce(model, method, keep=keep)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_a_reduced_vit_layer_by_layer(method: str) -> None:
    """Against the tokens that a model reduced in the same way, but cut off behind each block, gives out."""
    keep = [24, 6, 6, 2] if method == "conv" else [24, 15, 15, 4]
    torch.manual_seed(1)
    x = torch.randn(3, 64, 96)
    model = reduced_vit(method, keep)
    torch.manual_seed(2)  # one of the methods draws by lot
    got = explain(model, x)
    assert got.form == "hard"
    assert got.layer == "blocks.3.reduction.tap"
    assert got.maps.shape == (keep[-1], 4, 6)
    assert [one.tokens for one in got.layers] == [keep[0], keep[1], keep[3]]  # the third changes nothing
    for one in got.layers:
        torch.manual_seed(2)
        cut = reduced_vit(method, keep)
        blocks = cut.blocks
        cut.blocks = blocks[: int(one.name.split(".")[1]) + 1]
        torch.manual_seed(2)
        with torch.no_grad():
            found = forward_tokens(cut, x[None]).grouping
        assert np.array_equal(one.assignment, found.hard()[0].view(4, 6))
        held = one.assignment[one.assignment >= 0]
        assert sorted(np.unique(held)) == list(range(one.tokens))


def test_layers_without_tokens_are_not_counted() -> None:
    """Published schedules end with the class token alone; the last layer is then the one before."""
    model = reduced_vit("kmedoids", [24, 9, 5, 0])
    x = torch.randn(3, 64, 96)
    got = explain(model, x)
    assert got.layer == "blocks.2.reduction.tap"
    assert len(got.maps) == 5
    assert got.layers[-1].dropped == 24
    assert explain(model, x, layer=-3).layer == explain(model, x, layer=0).layer == "blocks.0.reduction.tap"
    with pytest.raises(UserError, match=r"made 3 groupings; give -3 to 2"):
        explain(model, x, layer=3)


def test_a_vit_that_is_restored_has_nothing_to_explain() -> None:
    model = visualtokens.restore(reduced_vit("merge", [24, 9]))
    with pytest.raises(UserError, match=r"visualtokens\.reduce"):
        explain(model, torch.randn(3, 64, 96))
