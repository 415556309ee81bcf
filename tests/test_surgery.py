"""Fused models compute the same and can be restored; PaCa-ViTs get another number of clusters."""

from __future__ import annotations

import copy
import pickle

import pytest
import timm
import torch
from torch import Tensor, nn

import visualtokens
from visualtokens import record_groupings
from visualtokens.errors import UserError
from visualtokens.layers import PaCaAttention
from visualtokens.surgery import set_clusters

SHALLOW = (2, 1, 1, 2)  # depths; the rules for folding are the same in every block
NAMES = ["stvit_small", "stvit_base", "stvit_iso_64", "vt_resnet18", "vt_resnet50"]


def trained(name: str) -> nn.Module:
    """A model with random BatchNorm statistics and layer scales, as after training."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, depths=SHALLOW).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.normal_(module.weight, 1, 0.1)
            nn.init.normal_(module.bias, std=0.1)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("gamma"):
            nn.init.uniform_(parameter, 0.1, 0.5)
    return model


def images() -> Tensor:
    return torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NAMES)
def test_fused_outputs_are_equal_and_unfuse_is_exact(name: str) -> None:
    model = trained(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        plain = model(images())
        assert visualtokens.fuse(model) is model
        fused = model(images())
        assert torch.allclose(fused, plain, atol=1e-5 * plain.abs().max().item())
        after = model.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], before[key]) for key in before)
        assert visualtokens.unfuse(model) is model
        assert torch.equal(model(images()), plain)
    model.train()(images()).sum().backward()


def test_all_batch_norms_of_stvit_are_folded_except_in_the_stem() -> None:
    model = visualtokens.fuse(trained("stvit_small"))
    remaining = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    # A GELU separates the BatchNorms of the stem from the convolutions before them.
    assert all(name.startswith("stages.0.embed") for name in remaining)


def test_fused_models_can_be_copied_and_compiled() -> None:
    model = visualtokens.fuse(trained("stvit_small"))
    with torch.no_grad():
        expected = model(images())
        for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.allclose(same(images()), expected, atol=1e-6)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
        assert torch.allclose(compiled(images()), expected, atol=1e-5)


def test_invalid_uses_of_fused_models() -> None:
    model = trained("stvit_small")
    weights = model.state_dict()
    with pytest.raises(UserError, match="evaluation mode"):
        visualtokens.fuse(copy.deepcopy(model).train())
    visualtokens.fuse(model)
    with pytest.raises(UserError, match="already fused"):
        visualtokens.fuse(model)
    with pytest.raises(UserError, match="cannot train"):
        model.train()
    with pytest.raises(UserError, match="cannot load weights"):
        model.load_state_dict(weights)
    visualtokens.unfuse(model).load_state_dict(weights)
    with pytest.raises(UserError, match="not fused"):
        visualtokens.unfuse(model)
    with pytest.raises(UserError, match="Linear has no layers that can be fused"):
        visualtokens.fuse(nn.Linear(2, 2).eval())
    with pytest.raises(UserError, match="has no layers that can be fused"):
        visualtokens.fuse(trained("paca_vit_tiny"))


GRID = (5, 6)


def attention(kind: str = "squeeze") -> PaCaAttention:
    """PaCa attention with six clusters."""
    torch.manual_seed(0)
    layer = PaCaAttention(16, heads=4, clusters=6, clustering=kind)
    layer.clustering.init_clusters()
    return layer.eval()


def patches() -> Tensor:
    return torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(1))


def test_same_number_of_clusters_changes_nothing() -> None:
    layer = attention()
    before = {name: p.clone() for name, p in layer.named_parameters()}
    assert set_clusters(layer, 6) == "6 clusters: unchanged"
    assert all(torch.equal(p, before[name]) for name, p in layer.named_parameters())


@pytest.mark.parametrize("kind", ["squeeze", "conv", "mlp", "linear"])
def test_equal_copies_of_all_clusters_do_not_change_the_outputs(kind: str) -> None:
    layer = attention(kind)
    expected = layer(patches(), GRID)
    summary = set_clusters(layer, 18, split=0)
    assert summary == "6 clusters become 18: each 3 times; the outputs do not change"
    assert layer.assign(patches(), GRID).shape == (2, 30, 18)
    assert torch.allclose(layer(patches(), GRID), expected, atol=1e-5)


def test_equal_copies_of_some_clusters_repeat_their_maps() -> None:
    layer = attention()
    before = layer.assign(patches(), GRID)
    assert "2 are repeated once more than the rest" in set_clusters(layer, 8, split=0)
    after = layer.assign(patches(), GRID)
    assert torch.allclose(after, before[:, :, [0, 1, 2, 3, 4, 5, 0, 1]], atol=1e-7)


def test_noise_is_added_to_the_copies_only() -> None:
    layer = attention()
    weight = layer.clustering.assign.weight.clone()
    assert "noise on the copies" in set_clusters(layer, 12, split=0.1)
    after = layer.clustering.assign.weight
    assert torch.equal(after[:6], weight)
    noise = (after[6:] - weight).square().mean().sqrt() / weight.square().mean().sqrt()
    assert 0.05 < noise < 0.2
    again = attention()
    set_clusters(again, 12, split=0.1)
    assert torch.equal(again.clustering.assign.weight, after)  # reproducible


def test_fewer_clusters_keep_one_of_each_pair_of_near_duplicates() -> None:
    layer = attention()
    with torch.no_grad():
        layer.clustering.assign.weight[3:] = layer.clustering.assign.weight[:3] + 0.01
    before = layer.assign(patches(), GRID)
    assert "become 3, the most representative ones" in set_clusters(layer, 3)
    after = layer.assign(patches(), GRID)
    distances = (after.unsqueeze(3) - before.unsqueeze(2)).abs().amax((0, 1))  # (3, 6)
    kept = distances.argmin(1)
    assert distances.amin(1).max() < 1e-7
    assert sorted((kept % 3).tolist()) == [0, 1, 2]


def test_clusters_of_a_whole_model() -> None:
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
    other = timm.create_model("paca_vit_nano", clusters=(32, 32, 0, 0)).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.allclose(other(small), expected, atol=1e-5)


def test_clusters_of_one_stage_that_is_frozen() -> None:
    model = timm.create_model("paca_vit_nano").requires_grad_(False)
    set_clusters(model.stages[0], 20)
    layers = [stage.blocks[0].attn.clustering for stage in model.stages[:2]]
    assert [layer.clusters for layer in layers] == [20, 16]
    assert not any(p.requires_grad for p in model.parameters())


def test_invalid_numbers_of_clusters() -> None:
    with pytest.raises(UserError, match="clusters=0; give at least 1"):
        set_clusters(attention(), 0)
    with pytest.raises(UserError, match=r"split=-1; give 0"):
        set_clusters(attention(), 7, split=-1)
    with pytest.raises(UserError, match="Linear has no learned clusters"):
        set_clusters(nn.Linear(2, 2), 7)
