from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visualtokens
from visualtokens.errors import UserError
from visualtokens.explain import METHODS, Setting
from visualtokens.explain.attention_maps import nearest_grid, rollout
from visualtokens.explain.baselines import make_method
from visualtokens.explain.layers import record_attention
from visualtokens.explain.render import upsample
from visualtokens.grouping import Tap, record_groupings

from .stubs import MEAN, STD, OneRegion, explain_clusters, one_hot_maps, preprocess, slow_upsample

SETTING = Setting(preprocess(32, 32), batch=8)


def paca_nano() -> nn.Module:
    torch.manual_seed(0)
    return visualtokens.create_model("paca_vit_nano", num_classes=3)


def small_vit(**options: object) -> nn.Module:
    """A ViT of 2×3 patches with weights large enough that the attention is far from uniform."""
    torch.manual_seed(0)
    shape = dict(img_size=(32, 48), depth=3, embed_dim=24, num_heads=3, num_classes=3)
    model = timm.create_model("vit_tiny_patch16_224", **(shape | options)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("name", METHODS)
def test_every_method_returns_a_map_and_leaves_the_model_unchanged(name: str) -> None:
    model = paca_nano().train()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.randn(3, 32, 48)
    with torch.no_grad():
        heat = make_method(name, model, SETTING)(x, 1)
    assert heat.shape == (32, 48)
    assert np.isfinite(heat).all()
    assert heat.std() > 0
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is not None and p.grad.eq(1).all() and p.requires_grad for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("name", "module"), [("grad-cam", "pytorch_grad_cam"), ("integrated gradients", "captum")]
)
def test_a_missing_library_names_the_extra(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in [m for m in sys.modules if m.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"visualtokens\[explain\]"):
        make_method(name, nn.Identity(), SETTING)


def test_unknown_method() -> None:
    with pytest.raises(UserError, match="unknown method 'gradcam'; did you mean 'grad-cam'"):
        make_method("gradcam", nn.Identity(), SETTING)


# Clusters and random maps.


@pytest.mark.parametrize("of", ["groups", "attention"])
def test_clusters_are_weighted_by_importance(of: str) -> None:
    model, x = paca_nano(), torch.randn(3, 32, 48)
    every = (
        explain_clusters(model, x, preprocess=SETTING.preprocess, target=target, of=of) for target in range(3)
    )
    got = next(one for one in every if one.values.max() > 0)  # masking cannot raise all probabilities
    heat = make_method("clusters", model, replace(SETTING, of=of))(x, got.target)
    total = sum(max(float(value), 0) * one for value, one in zip(got.values, got.maps, strict=True))
    want = (total - total.min()) / (total.max() - total.min())
    assert np.allclose(heat, slow_upsample(want, 32, 48), atol=1e-5)


def test_clusters_point_at_the_decisive_region() -> None:
    model = OneRegion(one_hot_maps(4, 4), slice(8, 16), slice(16, 24))
    heat = make_method("clusters", model, SETTING)(torch.ones(3, 32, 32), 1)
    y, x = np.unravel_index(heat.argmax(), heat.shape)
    assert 8 <= y < 16
    assert 16 <= x < 24


def test_random_maps_depend_on_seed_and_image_only() -> None:
    x, other = torch.randn(2, 3, 32, 32)
    method = make_method("random", nn.Identity(), SETTING)
    before = method(x, 0)
    assert not np.array_equal(before, method(other, 0))
    assert np.array_equal(before, method(x, 0))
    reseeded = make_method("random", nn.Identity(), replace(SETTING, seed=1))
    assert not np.array_equal(before, reseeded(x, 0))


# Gradients.


class Convolutions(nn.Module):
    """The smallest classifier with timm's ``feature_info``."""

    def __init__(self) -> None:
        super().__init__()
        self.feature_info = [dict(module="features")]
        self.features = nn.Sequential(nn.Conv2d(3, 6, 4, stride=4), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))

    def classify(self, features: Tensor) -> Tensor:
        return self.head((features.sigmoid() ** 2).mean((2, 3)))


def test_integrated_gradients_are_complete() -> None:
    """Their sum is the probability on the image minus that on a black one."""
    model, x = Convolutions(), torch.randn(3, 16, 16)
    heat = make_method("integrated gradients", model, SETTING)(x, 2)
    black = (-torch.tensor(MEAN) / torch.tensor(STD)).view(1, 3, 1, 1).expand(1, 3, 16, 16)
    with torch.no_grad():
        p = model(torch.cat((x[None], black))).softmax(1)[:, 2]
    assert heat.sum() == pytest.approx(float(p[0] - p[1]), abs=2e-4)


def test_grad_cam_against_its_equations() -> None:
    torch.manual_seed(0)
    model, x = Convolutions(), torch.randn(3, 16, 24)
    heat = make_method("grad-cam", model, SETTING)(x, 0)
    features = model.features(x[None]).detach().requires_grad_()
    model.classify(features)[0, 0].backward()
    weights = features.grad.mean((2, 3))[0]  # (6,)
    cam = torch.einsum("c,chw->hw", weights, features[0]).clamp_min(0).detach().numpy()
    cam = slow_upsample((cam - cam.min()) / (cam.max() - cam.min()), 16, 24)
    assert cam.std() > 0.05
    assert np.corrcoef(cam.ravel(), heat.ravel())[0, 1] > 0.999


def test_grad_cam_of_a_vit_reads_the_input_of_the_last_attention() -> None:
    heat = make_method("grad-cam", small_vit(), SETTING)(torch.randn(3, 32, 48), 1)
    assert heat.shape == (32, 48)
    assert heat.std() > 0  # after the last attention no patch reaches the class token: all zeros


@pytest.mark.parametrize("method", ["weighted_kmedoids", "random"])
@pytest.mark.parametrize("keep", [[5, 3], [5, 0], [0, 0]], ids=str)
def test_grad_cam_of_a_reduced_vit_against_its_equations(method: str, keep: list[int]) -> None:
    """The input tokens of the last block that has any, each spread over its patches."""
    model = small_vit(depth=2)
    visualtokens.reduce(model, method, keep=keep)
    block = 1 if keep[0] else 0
    x = torch.randn(3, 32, 48)
    torch.manual_seed(1)
    heat = make_method("grad-cam", model, SETTING)(x, 1)

    features: list[Tensor] = []
    hook = model.blocks[block].norm1.register_forward_hook(lambda _, args, out: features.append(out))
    torch.manual_seed(1)
    with torch.no_grad():  # the method also runs twice: the random tokens are those of the second pass
        model(x[None])
    with visualtokens.record_groupings(model) as groupings:
        logit = model(x[None])[0, 1]
    hook.remove()
    (gradient,) = torch.autograd.grad(logit, features[-1])
    cam = (features[-1] * gradient[:, 1:].mean(1, keepdim=True)).sum(2)[0, 1:].clamp_min(0).detach()  # (K,)
    if block:
        token = groupings["blocks.0.reduction.tap"].hard()[0]  # (N,)
        cam = torch.where(token < 0, 0, cam[token.clamp_min(0)])
    want = cam.reshape(2, 3).numpy()
    assert want.std() > 0
    assert np.allclose(heat, upsample(want, 32, 48), rtol=1e-4, atol=1e-5 * want.max())


def test_grad_cam_skips_modules_that_return_no_map() -> None:
    """The last stage of a VT-ResNet returns a map and tokens."""
    model = visualtokens.create_model("vt_resnet18", num_classes=3)
    assert make_method("grad-cam", model, SETTING)(torch.randn(3, 64, 64), 1).shape == (64, 64)


def test_grad_cam_refuses_models_without_a_known_feature_map() -> None:
    vit = timm.create_model(
        "vit_small_patch16_18x2_224", img_size=32, depth=2, embed_dim=24, num_heads=3, num_classes=3
    )
    method = make_method("grad-cam", visualtokens.reduce(vit, "merge", keep=[3, 2]), SETTING)
    with pytest.raises(UserError, match="ParallelThingsBlock has none; leave grad-cam out"):
        method(torch.randn(3, 32, 32), 0)
    method = make_method("grad-cam", nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2)), SETTING)
    with pytest.raises(UserError, match="feature_info"):
        method(torch.randn(3, 32, 32), 0)


# Attention rollout, against the product of whole matrices.


def mixing(weights: Tensor) -> Tensor:
    return (torch.eye(len(weights)) + weights) / 2


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_rollout_of_a_vit(pool: str) -> None:
    model, x = small_vit(global_pool=pool), torch.randn(3, 32, 48)
    with torch.no_grad(), record_attention({}) as recorded:
        model(x[None])
    product = torch.eye(7)
    for attention in recorded:
        product = mixing(attention.weights[0]) @ product
    want = product[0, 1:] if pool == "token" else product[1:, 1:].mean(0)
    got = rollout(model, x)
    assert got.shape == (2, 3)
    assert torch.allclose(got.flatten(), want, atol=1e-6)
    assert want.std() > 1e-3
    for block in model.blocks:
        block.attn.fused_attn = False
    assert torch.allclose(rollout(model, x), got, atol=1e-6)


def test_rollout_of_paca() -> None:
    """Patches attend to clusters in the first two stages and to each other in the last two."""
    model, x = paca_nano().eval(), torch.randn(3, 32, 64)
    with torch.no_grad(), record_groupings(model) as groupings, record_attention(groupings) as recorded:
        model(x[None])
    clusters = [grouping.weights[0] for grouping in groupings.values()]  # (N, K), columns sum to 1
    product = torch.eye(16 * 32)
    grid = (16, 32)
    for stage, attention in enumerate(recorded):
        weights = attention.weights[0] if stage > 1 else attention.weights[0] @ clusters[stage].T  # (N, N)
        if len(weights) != len(product):
            product = F.avg_pool2d(product.T.unflatten(1, grid)[:, None], 2).flatten(1).T
            grid = (grid[0] // 2, grid[1] // 2)
        product = mixing(weights) @ product
    got = rollout(model, x)
    assert got.shape == (16, 32)
    assert float(got.sum()) == pytest.approx(1, abs=1e-4)
    assert torch.allclose(got.flatten(), product.mean(0), atol=1e-6)


class FixedAttention(nn.Module):
    """One attention with the given weights (N, N)."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.register_buffer("logits", weights.log())

    def forward(self) -> None:
        logits: Tensor = self.get_buffer("logits")
        eye = torch.eye(len(logits))[None, None]
        F.scaled_dot_product_attention(logits[None, None], eye, eye, scale=1.0)


def random_attention(n: int, seed: int) -> Tensor:
    return torch.rand(n, n, generator=torch.Generator().manual_seed(seed)).mul(3).softmax(1)


class SuperTokenAttention(nn.Module):
    """Two super tokens of 4 patches attend to each other; in a later stage, 2 patches do."""

    WEIGHTS = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7], [0.2, 0.8]])

    def __init__(self) -> None:
        super().__init__()
        self.supers, self.late = (
            FixedAttention(random_attention(2, 2)),
            FixedAttention(random_attention(2, 3)),
        )
        self.tap = Tap()

    def forward(self, x: Tensor) -> Tensor:
        self.tap(self.WEIGHTS[None], (4, 1), torch.ones(1, 2), torch.tensor([0, 1]).expand(1, 4, 2))
        self.supers()
        self.late()
        return x.mean((2, 3))[:, :2]


def test_rollout_through_super_tokens() -> None:
    tokens_of_patches = SuperTokenAttention.WEIGHTS
    patches_of_tokens = (tokens_of_patches / tokens_of_patches.sum(0)).T
    supers = mixing(tokens_of_patches @ random_attention(2, 2) @ patches_of_tokens)
    late = mixing(random_attention(2, 3))
    down = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])
    got = rollout(SuperTokenAttention(), torch.rand(3, 16, 4))
    assert got.shape == (4, 1)
    assert torch.allclose(got.flatten(), (late @ down @ supers).mean(0), atol=1e-6)


@pytest.mark.parametrize("method", ["kmedoids", "weighted_kmedoids"])
def test_rollout_of_a_reduced_vit(method: str) -> None:
    """With fused attention, and with the unfused attention of methods that need its weights."""
    model, x = small_vit(), torch.randn(3, 32, 48)
    visualtokens.reduce(model, method, keep=[4, 2, 2])
    with torch.no_grad(), record_groupings(model) as groupings, record_attention(groupings) as recorded:
        model(x[None])
    assert [attention.weights.shape[1] for attention in recorded] == [7, 5, 3]
    product = mixing(recorded[0].weights[0])
    for attention, grouping in zip(recorded[1:], groupings.values(), strict=False):
        tokens_of_patches = torch.block_diag(torch.eye(1), grouping.dense()[0])  # (7, 1 + K)
        patches_of_tokens = (tokens_of_patches / tokens_of_patches.sum(0)).T
        product = mixing(tokens_of_patches @ attention.weights[0] @ patches_of_tokens) @ product
    assert torch.allclose(rollout(model, x).flatten(), product[0, 1:], atol=1e-6)


def test_rollout_of_an_attention_pooling_head() -> None:
    model, x = small_vit(global_pool="map", class_token=False), torch.randn(3, 32, 48)
    with torch.no_grad(), record_attention({}) as recorded:
        model(x[None])
    product = torch.eye(6)
    for attention in recorded[:-1]:
        product = mixing(attention.weights[0]) @ product
    want = recorded[-1].weights[0] @ product
    assert want.shape == (1, 6)
    assert torch.allclose(rollout(model, x).flatten(), want[0], atol=1e-6)


def test_rollout_with_pooled_keys() -> None:
    """PVTv2 attends to means of patches in all but its last stage."""
    torch.manual_seed(0)
    got = rollout(timm.create_model("pvt_v2_b0", num_classes=3), torch.randn(3, 64, 128))
    assert got.shape == (16, 32)
    assert float(got.sum()) == pytest.approx(1, abs=1e-4)


def test_rollout_does_not_follow_attention_among_visual_tokens() -> None:
    model = visualtokens.create_model("vt_resnet18", num_classes=3)
    with pytest.raises(UserError, match="no attention over patches"):
        rollout(model, torch.randn(3, 64, 64))


@pytest.mark.parametrize(
    ("patches", "aspect", "grid"), [(196, 1, (14, 14)), (70, 100 / 150, (7, 10)), (7, 1 / 2, (1, 7))]
)
def test_nearest_grid(patches: int, aspect: float, grid: tuple[int, int]) -> None:
    assert nearest_grid(patches, aspect) == grid
