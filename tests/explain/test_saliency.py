from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import visualtokens
from visualtokens.errors import UserError
from visualtokens.explain import METHODS, Setting, explain
from visualtokens.explain.baselines import make_method
from visualtokens.explain.importance import enlarge
from visualtokens.reduce.reduction import Method

from .stubs import MEAN, STD, OneRegion, preprocess, quarters, upsample

SETTING = Setting(preprocess(32, 32), batch=8)


class Convolutions(nn.Module):
    """The smallest classifier that says where its features are."""

    def __init__(self) -> None:
        super().__init__()
        self.feature_info = [dict(module="features")]
        self.features = nn.Sequential(nn.Conv2d(3, 6, 4, stride=4), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.features(x).sigmoid() ** 2).mean((2, 3)))


def nano() -> nn.Module:
    torch.manual_seed(0)
    return visualtokens.create_model("paca_vit_nano", num_classes=3)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_a_map_and_leaves_the_model_alone(name: str) -> None:
    model = nano().train()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.randn(3, 32, 48)
    with torch.no_grad():  # as somebody may call it
        heat = make_method(name, model, SETTING)(x, 1)
    assert heat.shape == (32, 48)
    assert np.isfinite(heat).all()
    assert heat.std() > 0
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is not None and p.grad.eq(1).all() and p.requires_grad for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_integrated_gradients_add_up_to_what_the_image_changes() -> None:
    """Completeness: the sum is the probability of the image minus that of a black one."""
    model = Convolutions()
    x = torch.randn(3, 16, 16)
    heat = make_method("integrated gradients", model, SETTING)(x, 2)
    black = (-torch.tensor(MEAN) / torch.tensor(STD)).view(1, 3, 1, 1).expand(1, 3, 16, 16)
    with torch.no_grad():
        change = model(torch.cat((x[None], black))).softmax(1)[:, 2]
    assert heat.sum() == pytest.approx(float(change[0] - change[1]), abs=2e-4)


def test_grad_cam_against_its_equations() -> None:
    model = Convolutions()
    x = torch.randn(3, 16, 24)
    heat = make_method("grad-cam", model, SETTING)(x, 0)
    features = model.features(x[None]).detach().requires_grad_()
    model.head((features.sigmoid() ** 2).mean((2, 3)))[0, 0].backward()
    weights = features.grad.mean((2, 3))[0]  # (6,)
    cam = torch.einsum("c,chw->hw", weights, features[0]).clamp_min(0).detach().numpy()
    cam = upsample((cam - cam.min()) / (cam.max() - cam.min()), 16, 24)
    assert cam.std() > 0.05
    assert np.corrcoef(cam.ravel(), heat.ravel())[0, 1] > 0.999


def test_grad_cam_of_a_vit_with_a_class_token() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=(32, 64), depth=2, num_classes=3)
    heat = make_method("grad-cam", model, SETTING)(torch.randn(3, 32, 64), 1)
    assert heat.shape == (32, 64)
    assert heat.std() > 0


@pytest.mark.parametrize("method", ["weighted_kmedoids", "merge", "random"])
@pytest.mark.parametrize("keep", [[6, 3], [6, 0], [0, 0]], ids=str)
def test_grad_cam_of_a_reduced_vit_against_its_equations(method: Method, keep: list[int]) -> None:
    """The tokens in front of the last block that has any, each spread over its patches."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=(32, 64), depth=2, num_classes=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # timm starts the head at next to nothing
            parameter.add_(0.05 * torch.randn_like(parameter))
    visualtokens.reduce(model, method, keep=keep)
    block = 1 if keep[0] else 0
    x = torch.randn(3, 32, 64)
    torch.manual_seed(1)
    heat = make_method("grad-cam", model, SETTING)(x, 1)

    features: list[Tensor] = []
    hook = model.blocks[block].norm1.register_forward_hook(lambda _, args, out: features.append(out))
    torch.manual_seed(1)
    with torch.no_grad():  # as the first look of the method, so that it draws the same tokens
        model(x[None])
    with visualtokens.record_groupings(model) as groupings:
        answer = model(x[None])[0, 1]
    hook.remove()
    (gradient,) = torch.autograd.grad(answer, features[-1])
    cam = (features[-1] * gradient[:, 1:].mean(1, keepdim=True)).sum(2)[0, 1:].clamp_min(0).detach()  # (K,)
    if block:
        source = groupings["blocks.0.reduction.tap"].hard()[0]
        cam = torch.where(source < 0, 0, cam[source.clamp_min(0)])
    cam = cam.reshape(2, 4).numpy()
    assert cam.std() > 0
    assert np.allclose(heat, enlarge(cam, 32, 64), rtol=1e-4, atol=1e-6 * cam.max())


def test_grad_cam_of_a_reduced_block_without_norm1_is_refused() -> None:
    model = timm.create_model("vit_small_patch16_18x2_224", img_size=32, depth=2, num_classes=3)
    saliency = make_method("grad-cam", visualtokens.reduce(model, "merge", keep=[3, 2]), SETTING)
    with pytest.raises(UserError, match="ParallelThingsBlock has none; leave grad-cam out"):
        saliency(torch.randn(3, 32, 32), 0)


def test_grad_cam_skips_layers_that_give_no_map() -> None:
    """The last features of a VT-ResNet are a map and tokens."""
    model = visualtokens.create_model("vt_resnet18", num_classes=3)
    assert make_method("grad-cam", model, SETTING)(torch.randn(3, 64, 64), 1).shape == (64, 64)


def test_clusters_are_the_saliency_of_the_explanation() -> None:
    model = nano()
    x = torch.randn(3, 32, 48)
    heat = make_method("clusters", model, SETTING)(x, 1)
    why = explain(model, x, preprocess=SETTING.preprocess, target=1)
    total = sum(max(float(value), 0) * one for value, one in zip(why.importance, why.maps, strict=True))
    want = (total - total.min()) / (total.max() - total.min())
    assert np.allclose(why.saliency(), want, atol=1e-6)
    assert np.allclose(heat, upsample(want, 32, 48), atol=1e-5)


def test_clusters_by_attention() -> None:
    model, x = nano(), torch.randn(3, 32, 48)
    heat = make_method("clusters", model, replace(SETTING, of="attention"))(x, 1)
    why = explain(model, x, preprocess=SETTING.preprocess, target=1, of="attention")
    assert np.allclose(heat, upsample(why.saliency(), 32, 48), atol=1e-5)


def test_clusters_point_at_the_region_that_decides() -> None:
    model = OneRegion(quarters(4, 4), slice(8, 16), slice(16, 24))
    heat = make_method("clusters", model, Setting(preprocess(32, 32)))(torch.ones(3, 32, 32), 1)
    y, x = np.unravel_index(heat.argmax(), heat.shape)
    assert 8 <= y < 16
    assert 16 <= x < 24


def test_nothing_that_speaks_for_the_class_is_an_empty_map() -> None:
    model = OneRegion(quarters(), slice(0, 8), slice(0, 8))
    why = explain(model, torch.ones(3, 16, 16), preprocess=preprocess(16, 16), target=0)
    assert why.importance.max() <= 0
    assert why.saliency().max() == 0


def test_random_maps_depend_on_seed_and_image_only() -> None:
    x, other = torch.randn(2, 3, 32, 32)
    one = make_method("random", nn.Identity(), SETTING)
    before = one(x, 0)
    assert not np.array_equal(before, one(other, 0))
    assert np.array_equal(before, one(x, 0))
    assert not np.array_equal(
        before, make_method("random", nn.Identity(), Setting(preprocess(32, 32), seed=1))(x, 0)
    )


@pytest.mark.parametrize(
    ("name", "module"), [("grad-cam", "pytorch_grad_cam"), ("integrated gradients", "captum")]
)
def test_a_missing_library_names_the_extra(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in [m for m in sys.modules if m.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"visualtokens\[explain\]"):
        make_method(name, nano(), SETTING)


def test_unknown_names_and_models_that_do_not_tell_their_features() -> None:
    with pytest.raises(UserError, match="unknown method 'gradcam'; did you mean 'grad-cam'"):
        make_method("gradcam", nano(), SETTING)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2))
    with pytest.raises(UserError, match="feature_info"):
        make_method("grad-cam", model, SETTING)(torch.randn(3, 32, 32), 0)
