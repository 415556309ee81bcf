"""Every registered model follows timm's conventions; registering a family is enough to have it swept.

A module-scoped fixture builds each model once; tests that change it work on a copy. Where depth does not
matter the model is built with few blocks.
"""

from __future__ import annotations

import copy
import io
import pickle
from fnmatch import fnmatch
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from timm.models import group_parameters
from torch import Tensor, nn

import visualtokens
from visualtokens.errors import UserError

# These differ from another model of their family only in width or depth, or are timm's networks in another
# size; `make test-all` sweeps them, too.
SLOW = (
    "deit_*",
    "paca_vit_b[12]*",
    "paca_vit_base",
    "paca_vit_tiny",
    "pvt_v2_*",
    "stvit_base",
    "stvit_large",
    "stvit_iso_96",
    "swin_iso_96",
    "vt_resnet34",
    "vt_resnet101",
)
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if any(fnmatch(name, slow) for slow in SLOW) else [])
    for name in visualtokens.list_models()
]
every_name = pytest.mark.parametrize("name", NAMES)


def build(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **({"num_classes": 4} | options))


def shallow(name: str, **options: Any) -> nn.Module:
    """Two blocks where they differ: shared assignments, shifted windows, recurrent tokenizers."""
    depth = dict(depth=2) if name.startswith("deit") else dict(depths=(2, 1, 1, 2))
    return build(name, **depth, **options)


def on_meta(name: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **options)


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return build(request.param).eval()


def images(height: int = 32, width: int = 64, *, channels: int = 3, batch: int = 2) -> Tensor:
    """Noise, neither square nor of the default size."""
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(1))


def test_forward_is_head_of_features(model: nn.Module) -> None:
    x = images()
    with torch.inference_mode():
        logits, features = model(x), model.forward_features(x)
        pooled = model.forward_head(features, pre_logits=True)
        assert torch.allclose(model.get_classifier()(pooled), logits, atol=1e-6)
        assert torch.allclose(model.forward_head(features), logits, atol=1e-6)
    assert logits.shape == (2, 4)
    assert torch.isfinite(logits).all()
    assert pooled.shape == (2, model.num_features)


def test_forward_intermediates(model: nn.Module) -> None:
    x = images()
    with torch.inference_mode():
        last, maps = model.forward_intermediates(x)
        some = model.forward_intermediates(x, indices=[0, 1], intermediates_only=True, stop_early=True)
        assert torch.allclose(last, model.forward_features(x), atol=1e-6)
    assert len(some) == 2
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(some, maps, strict=False))
    assert [f.shape[1] for f in maps] == [info["num_chs"] for info in model.feature_info]


def test_reset_classifier(model: nn.Module) -> None:
    model, x = copy.deepcopy(model), images()
    with torch.inference_mode():
        features = model.forward_features(x)
        pooled = model.forward_head(features, pre_logits=True)
        model.reset_classifier(3)
        assert model.num_classes == 3
        assert model.forward_head(features).shape == (2, 3)
        model.reset_classifier(0)
        assert torch.allclose(model.forward_head(features), pooled, atol=1e-6)
        model.reset_classifier(0, "")
        assert torch.equal(model.forward_head(features), features)


def test_any_image_size(model: nn.Module) -> None:
    with torch.inference_mode():
        for size in [(96, 160), (33, 65), (32, 32)]:
            assert torch.isfinite(model(images(*size, batch=1))).all()


def test_batch_and_memory_layout_do_not_matter(model: nn.Module) -> None:
    x = images(batch=3)
    with torch.inference_mode():
        expected = model(x)
        assert torch.allclose(model(x[1:2]), expected[1:2], atol=1e-5)
        assert torch.allclose(model(x.contiguous(memory_format=torch.channels_last)), expected, atol=1e-5)
        assert torch.allclose(model(x.mT.contiguous().mT), expected, atol=1e-5)


def test_bfloat16_autocast(model: nn.Module) -> None:
    x = images()
    with torch.inference_mode():
        exact = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(x).float()
    assert (rounded - exact).abs().max() <= 0.1 * exact.abs().max()


def test_every_parameter_gets_a_gradient_with_and_without_checkpointing(model: nn.Module) -> None:
    model = copy.deepcopy(model).train()
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        torch.manual_seed(1)  # for stochastic depth
        model(images()).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    plain, checkpointed = gradients
    assert [name for name, g in plain.items() if g is None or not g.isfinite().all()] == []
    assert [n for n, g in plain.items() if not torch.allclose(g, checkpointed[n], atol=1e-6)] == []


@every_name
def test_features_only(name: str) -> None:
    whole = build(name, features_only=True).eval()
    info = whole.feature_info
    level = len(info.channels()) - 2
    part = build(name, features_only=True, out_indices=(level,)).eval()
    part.load_state_dict(whole.state_dict(), strict=False)
    with torch.inference_mode():
        maps = whole(images(64, 96))
        assert torch.allclose(part(images(64, 96))[0], maps[level], atol=1e-6)
    assert len(maps) == len(info.channels()) >= 3
    for feature_map, channels, stride in zip(maps, info.channels(), info.reduction(), strict=True):
        assert feature_map.shape == (2, channels, 64 // stride, 96 // stride)


@every_name
def test_one_input_channel(name: str) -> None:
    with torch.inference_mode():
        assert shallow(name, in_chans=1).eval()(images(channels=1)).shape == (2, 4)


@every_name
def test_saving_and_copying(name: str) -> None:
    """Through safetensors, ``torch.save`` without code, pickle and deepcopy."""
    model = shallow(name).eval()
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other.load_state_dict(safetensors.torch.load(safetensors.torch.save(model.state_dict())))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())
    with torch.inference_mode():
        expected = model(images())
        for same in (other, pickle.loads(pickle.dumps(model))):
            assert torch.allclose(same(images()), expected, atol=1e-6)


def assert_compiled_equals_eager(model: nn.Module, backend: str, tolerance: float) -> None:
    torch._dynamo.reset()
    model.eval()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    with torch.no_grad():
        assert torch.allclose(compiled(images()), model(images()), atol=tolerance)


@every_name
def test_compiles_as_one_graph(name: str) -> None:
    assert_compiled_equals_eager(shallow(name), "aot_eager", 1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "paca_vit_nano",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("pvt_v2_b0_pure", "stvit_iso_64", "stvit_small", "swin_iso_64", "vt_resnet18")
        ),
    ],
)
def test_compiles_with_inductor(name: str) -> None:
    assert_compiled_equals_eager(build(name), "inductor", 1e-4)


@every_name
def test_forward_on_the_meta_device(name: str) -> None:
    model = on_meta(name).eval()
    size = timm.data.resolve_model_data_config(model)["input_size"]
    out = model(torch.empty(2, *size, device="meta"))
    assert out.is_meta
    assert out.shape == (2, model.num_classes)


@every_name
def test_layer_groups_hold_every_parameter_once(name: str) -> None:
    model = on_meta(name)
    for coarse in (False, True):
        groups = group_parameters(model, model.group_matcher(coarse=coarse))
        names = [n for group in groups.values() for n in group]
        assert sorted(names) == sorted(n for n, _ in model.named_parameters())
        assert len(groups) > 2


@every_name
def test_default_configuration(name: str) -> None:
    model = on_meta(name)
    cfg = timm.data.resolve_model_data_config(model)
    assert cfg["input_size"][0] == 3
    modules = dict(model.named_modules())
    assert isinstance(modules[model.pretrained_cfg["first_conv"]], nn.Conv2d)
    assert modules[model.pretrained_cfg["classifier"]] is model.get_classifier()
    assert model.num_classes == model.pretrained_cfg["num_classes"]


# img_size and set_input_size, as timm's vision transformers have them.


@every_name
def test_img_size_becomes_the_input_size(name: str) -> None:
    model = on_meta(name, img_size=(64, 96)).eval()
    assert timm.data.resolve_model_data_config(model)["input_size"] == (3, 64, 96)
    assert model.default_cfg is model.pretrained_cfg
    assert model(torch.empty(1, 3, 64, 96, device="meta")).shape == (1, model.num_classes)
    features = on_meta(name, features_only=True, img_size=64)
    assert features.pretrained_cfg["input_size"] == (3, 64, 64)
    assert timm.get_pretrained_cfg(name).input_size not in [(3, 64, 96), (3, 64, 64)]


@every_name
def test_set_input_size(name: str) -> None:
    """The weights of the resized model are those of a model built for the new size."""
    model = shallow(name).eval()
    swin = name.startswith("swin")  # its windows change with the size
    with torch.inference_mode():
        before = model(images(32, 64))
        model.set_input_size(img_size=(32, 64), **(dict(window_size=7) if swin else {}))
        after = model(images(32, 64))
        assert swin or torch.allclose(after, before, atol=1e-5)
        built = shallow(name, img_size=(32, 64)).eval()
        built.load_state_dict(model.state_dict())
        assert torch.allclose(built(images(32, 64)), after, atol=1e-6)
        if (pool := model.pretrained_cfg["pool_size"]) and not swin:
            assert pool == model.forward_features(images(32, 64)).shape[2:]
    assert model.pretrained_cfg["input_size"] == (3, 32, 64)
    model.set_input_size(img_size=48)
    model.set_input_size(patch_size=None)
    assert model.pretrained_cfg["input_size"] == (3, 48, 48)
    assert torch.isfinite(model(images(48, 48, batch=1))).all()
    assert all(parameter.requires_grad for parameter in model.parameters())
    safetensors.torch.save(model.state_dict())  # needs contiguous weights


@pytest.mark.parametrize("size", [0, (64, -1), (64,), (64, 64, 3), "64", 64.5, True])
@pytest.mark.parametrize("name", ["paca_vit_nano", "deit_e318", "stvit_iso_64", "swin_iso_64", "vt_resnet18"])
def test_sizes_that_do_not_work(name: str, size: object) -> None:
    least = {"deit_e318": 16, "swin_iso_64": 32}.get(name, 1)
    with pytest.raises(UserError, match=r"img_size=.*; give the side of a square image in pixels.*at least"):
        on_meta(name, img_size=size)
    model = on_meta(name)
    with pytest.raises(UserError, match=f"img_size=.*or \\(height, width\\), at least {least} each"):
        model.set_input_size(img_size=size)


def test_smallest_sizes() -> None:
    for name, least in {"deit_e318": 16, "swin_iso_64": 32, "stvit_iso_64": 1, "paca_vit_nano": 1}.items():
        model = shallow(name, img_size=least).eval()
        assert torch.isfinite(model(images(least, least))).all()
        model.set_input_size(img_size=(least, 64))
        assert torch.isfinite(model(images(least, 64))).all()
        if least > 1:
            with pytest.raises(UserError, match=f"img_size={least - 1}; .*at least {least} each"):
                shallow(name, img_size=least - 1)


@pytest.mark.parametrize("name", ["paca_vit_nano", "pvt_v2_b0_32", "stvit_iso_64", "vt_resnet18"])
def test_models_without_patches_refuse_a_patch_size(name: str) -> None:
    with pytest.raises(UserError, match=r"patch_size=8: the stem of .* leave patch_size out"):
        on_meta(name).set_input_size(img_size=64, patch_size=8)


@pytest.mark.parametrize(("name", "before"), [("deit_e318", 16), ("swin_iso_64", 4)])
def test_patch_size_follows(name: str, before: int) -> None:
    model = shallow(name).eval()
    model.set_input_size(img_size=64, patch_size=before // 2)
    assert model.patch_embed.patch_size == (before // 2, before // 2)
    maps = model.forward_intermediates(images(64, 64), indices=[0], intermediates_only=True)
    assert maps[0].shape[2:] == (128 // before, 128 // before)
