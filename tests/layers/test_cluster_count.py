"""Another number of clusters for a trained model."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

from visualtokens import record_groupings
from visualtokens.errors import UserError
from visualtokens.layers import PaCaAttention
from visualtokens.surgery import set_clusters

KINDS = ["squeeze", "conv", "mlp", "linear"]
GRID = (5, 6)


def attention(kind: str = "squeeze", clusters: int = 6) -> PaCaAttention:
    torch.manual_seed(0)
    layer = PaCaAttention(16, heads=4, clusters=clusters, clustering=kind)
    layer.clustering.init_clusters()
    return layer.eval()


def patches() -> Tensor:
    return torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_number_changes_nothing(kind: str) -> None:
    layer = attention(kind)
    before = {name: p.clone() for name, p in layer.named_parameters()}
    assert set_clusters(layer, 6) == "6 clusters stay: nothing changed"
    assert all(torch.equal(p, before[name]) for name, p in layer.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_equal_copies_of_all_compute_the_same(kind: str) -> None:
    """Every cluster counts alike, so that the attention spreads over the copies and sums up again."""
    layer = attention(kind)
    expected = layer(patches(), GRID)
    said = set_clusters(layer, 18, split=0)
    assert said == "6 clusters become 18: each 3 times; the outputs stay the same"
    assert layer.grouping(patches(), GRID).tokens == 18
    assert torch.allclose(layer(patches(), GRID), expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_copies_of_some_leave_the_maps_as_they_are(kind: str) -> None:
    layer = attention(kind)
    before = layer.assign(patches(), GRID)
    assert "2 count once more than the others" in set_clusters(layer, 8, split=0)
    after = layer.assign(patches(), GRID)
    assert torch.allclose(after, before[:, :, [0, 1, 2, 3, 4, 5, 0, 1]], atol=1e-7)


def test_copies_are_moved_apart_and_originals_stay() -> None:
    layer = attention()
    weight = layer.clustering.assign.weight.clone()
    assert "copies moved apart" in set_clusters(layer, 12, split=0.1)
    after = layer.clustering.assign.weight
    assert torch.equal(after[:6], weight)
    moved = (after[6:] - weight).square().mean().sqrt() / weight.square().mean().sqrt()
    assert 0.05 < moved < 0.2
    again = attention()
    set_clusters(again, 12, split=0.1)
    assert torch.equal(again.clustering.assign.weight, after)  # the seed decides


def test_fewer_clusters_keep_some_of_the_maps() -> None:
    layer = attention()
    with torch.no_grad():
        layer.clustering.assign.weight[3:] = layer.clustering.assign.weight[:3] + 0.01
    before = layer.assign(patches(), GRID)
    assert "become 3, those that stand best for the rest" in set_clusters(layer, 3)
    after = layer.assign(patches(), GRID)
    distances = (after.unsqueeze(3) - before.unsqueeze(2)).abs().amax((0, 1))  # (3, 6)
    kept = distances.argmin(1)
    assert distances.amin(1).max() < 1e-7
    assert sorted((kept % 3).tolist()) == [0, 1, 2]  # one of each pair of near twins


def test_a_whole_model_on_larger_images() -> None:
    torch.manual_seed(0)
    model = timm.create_model("paca_vit_nano").eval()
    small, large = torch.randn(1, 3, 32, 32), torch.randn(1, 3, 96, 64)
    with torch.no_grad():
        expected = model(small)
        set_clusters(model, 32, split=0)
        assert torch.allclose(model(small), expected, atol=1e-5)
        with record_groupings(model) as groupings:
            model(large)
    assert [g.tokens for g in groupings.values()] == [32, 32]
    twin = timm.create_model("paca_vit_nano", clusters=(32, 32, 0, 0)).eval()
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.allclose(twin(small), expected, atol=1e-5)


def test_one_stage_only_and_what_is_frozen_stays_frozen() -> None:
    model = timm.create_model("paca_vit_nano").requires_grad_(False)
    set_clusters(model.stages[0], 20)
    layers = [stage.blocks[0].attn.clustering for stage in model.stages[:2]]
    assert [layer.clusters for layer in layers] == [20, 16]
    assert not any(p.requires_grad for p in model.parameters())


def test_wrong_use_is_named() -> None:
    with pytest.raises(UserError, match="clusters=0; give at least 1"):
        set_clusters(attention(), 0)
    with pytest.raises(UserError, match=r"split=-1; give 0"):
        set_clusters(attention(), 7, split=-1)
    with pytest.raises(UserError, match="Linear learns no clusters"):
        set_clusters(nn.Linear(2, 2), 7)
