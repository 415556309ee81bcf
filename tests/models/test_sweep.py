"""Every registered model keeps timm's conventions. A new family is swept by being registered."""

from __future__ import annotations

import copy
import io
import pickle
from fnmatch import fnmatch

import pytest
import safetensors.torch
import timm
import torch
from timm.models import group_parameters
from torch import Tensor, nn

import visualtokens

SIZE = (32, 64)
# These differ from another model of their family in width and depth only, or are timm's own networks under
# another size: `make test-all` runs them, too.
LONGER = (
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


def is_longer(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in LONGER)


NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if is_longer(name) else [])
    for name in visualtokens.list_models()
]
every_model = pytest.mark.parametrize("name", NAMES)


def build(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **options)


def images(height: int = SIZE[0], width: int = SIZE[1], *, channels: int = 3, batch: int = 2) -> Tensor:
    """A batch of noise, neither square nor tall: every convention is checked away from the default size."""
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(1))


@every_model
def test_forward_is_head_of_features(name: str) -> None:
    model = build(name, num_classes=7).eval()
    x = images()
    with torch.inference_mode():
        logits = model(x)
        by_parts = model.forward_head(model.forward_features(x))
        pooled = model.forward_head(model.forward_features(x), pre_logits=True)
        assert torch.allclose(model.get_classifier()(pooled), logits, atol=1e-6)
    assert logits.shape == (2, 7)
    assert torch.isfinite(logits).all()
    assert torch.equal(logits, by_parts)
    assert pooled.shape == (2, model.num_features)


@every_model
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = build(name, num_classes=5).train()
    model(images()).square().sum().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert missing == []


@every_model
def test_features_only(name: str) -> None:
    model = build(name, features_only=True).eval()
    with torch.inference_mode():
        features = model(images(64, 96))
    info = model.feature_info
    assert len(features) == len(info.channels()) >= 3
    for feature, channels, stride in zip(features, info.channels(), info.reduction(), strict=True):
        assert feature.shape == (2, channels, 64 // stride, 96 // stride)


@every_model
def test_features_only_of_one_level_equals_that_level(name: str) -> None:
    whole = build(name, features_only=True).eval()
    level = len(whole.feature_info.channels()) - 2
    part = build(name, features_only=True, out_indices=(level,)).eval()
    part.load_state_dict(whole.state_dict(), strict=False)
    with torch.inference_mode():
        assert torch.equal(part(images())[0], whole(images())[level])


@every_model
def test_forward_intermediates(name: str) -> None:
    model = build(name).eval()
    x = images()
    with torch.inference_mode():
        last, every = model.forward_intermediates(x)
        some = model.forward_intermediates(x, indices=[0, 1], intermediates_only=True, stop_early=True)
        assert torch.equal(last, model.forward_features(x))
    assert len(some) == 2
    assert all(torch.equal(a, b) for a, b in zip(some, every, strict=False))
    assert [f.shape[1] for f in every] == [info["num_chs"] for info in model.feature_info]


@every_model
def test_reset_classifier_and_no_classes(name: str) -> None:
    model = build(name, num_classes=0).eval()
    with torch.inference_mode():
        pooled = model(images())
        assert pooled.shape == (2, model.num_features)
        model.reset_classifier(3)
        assert model(images()).shape == (2, 3)
        assert model.num_classes == 3
        model.reset_classifier(0)
        assert torch.equal(model(images()), pooled)
        model.reset_classifier(0, "")
        assert torch.equal(model(images()), model.forward_features(images()))


@every_model
@pytest.mark.parametrize("size", [(96, 160), (33, 65), (32, 32)])
def test_any_size(name: str, size: tuple[int, int]) -> None:
    model = build(name, num_classes=4).eval()
    with torch.inference_mode():
        assert torch.isfinite(model(images(*size))).all()


@every_model
def test_one_channel(name: str) -> None:
    with torch.inference_mode():
        assert build(name, in_chans=1, num_classes=4).eval()(images(channels=1)).shape == (2, 4)


@every_model
def test_an_image_does_not_depend_on_its_batch(name: str) -> None:
    model = build(name, num_classes=4).eval()
    x = images(batch=3)
    with torch.inference_mode():
        assert torch.allclose(model(x)[1:2], model(x[1:2]), atol=1e-5)


@every_model
def test_memory_layout_of_the_input_does_not_matter(name: str) -> None:
    model = build(name, num_classes=4).eval()
    x = images()
    with torch.inference_mode():
        plain = model(x)
        assert torch.allclose(plain, model(x.contiguous(memory_format=torch.channels_last)), atol=1e-5)
        assert torch.allclose(plain, model(x.flip(3).flip(3)), atol=1e-5)


@every_model
def test_bfloat16_autocast(name: str) -> None:
    model = build(name, num_classes=10).eval()
    x = images()
    with torch.inference_mode():
        exact = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            rough = model(x).float()
    assert (rough - exact).abs().max() <= 0.1 * exact.abs().max()


@every_model
def test_gradient_checkpointing_equals_plain(name: str) -> None:
    model = build(name, num_classes=4).train()
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        torch.manual_seed(1)  # for models that drop paths at random
        model(images()).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.allclose(plain, checkpointed, atol=1e-6)


def assert_compiled_equals_eager(name: str, backend: str, tolerance: float) -> None:
    torch._dynamo.reset()
    model = build(name, num_classes=4).eval()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    with torch.no_grad():
        expected = model(images())
        assert torch.allclose(compiled(images()), expected, atol=tolerance)


@every_model
def test_compiles_as_one_graph(name: str) -> None:
    assert_compiled_equals_eager(name, "aot_eager", 1e-5)


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
    assert_compiled_equals_eager(name, "inductor", 1e-4)


@every_model
def test_deepcopy_and_pickle(name: str) -> None:
    model = build(name, num_classes=4).eval()
    with torch.inference_mode():
        expected = model(images())
        assert torch.equal(copy.deepcopy(model)(images()), expected)
        assert torch.equal(pickle.loads(pickle.dumps(model))(images()), expected)


@every_model
def test_state_dict_round_trip_through_safetensors(name: str) -> None:
    model = build(name, num_classes=4).eval()
    data = safetensors.torch.save(model.state_dict())
    torch.manual_seed(99)
    other = timm.create_model(name, num_classes=4).eval()
    other.load_state_dict(safetensors.torch.load(data))
    with torch.inference_mode():
        assert torch.equal(other(images()), model(images()))


@every_model
def test_whole_model_saves_without_code_of_ours_in_the_state(name: str) -> None:
    buffer = io.BytesIO()
    torch.save(build(name).state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True).keys() == build(name).state_dict().keys()


@every_model
def test_layer_groups_hold_every_parameter_once(name: str) -> None:
    model = build(name)
    for coarse in (False, True):
        groups = group_parameters(model, model.group_matcher(coarse=coarse))
        names = [n for group in groups.values() for n in group]
        assert sorted(names) == sorted(n for n, _ in model.named_parameters())
        assert len(groups) > 2


@every_model
def test_default_configuration_is_usable(name: str) -> None:
    model = build(name)
    cfg = timm.data.resolve_model_data_config(model)
    assert cfg["input_size"][0] == 3
    modules = dict(model.named_modules())
    assert isinstance(modules[model.pretrained_cfg["first_conv"]], nn.Conv2d)
    assert modules[model.pretrained_cfg["classifier"]] is model.get_classifier()
    assert model.num_classes == model.pretrained_cfg["num_classes"]
