"""A VT stage in place of the last stage of a timm CNN."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
from torch import nn

from visualtokens import record_groupings
from visualtokens.bench import count_macs, count_parameters
from visualtokens.errors import UserError
from visualtokens.models import add_vt_stage

# One family per way in which timm names stages and final layers.
NETWORKS = ["resnet26d", "regnety_002", "convnext_atto", "mobilenetv3_small_050", "ghostnet_100"]
NARROW = dict(token_dim=64, attn_dim=32, hidden=64)


def build(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=7, **options)


@pytest.mark.parametrize("name", NETWORKS)
def test_stage_reads_the_map_before_the_last_stage(name: str) -> None:
    source = build(name).eval()
    model = add_vt_stage(source, **NARROW)
    x = torch.randn(2, 3, 64, 96)
    with torch.no_grad(), record_groupings(model) as groupings:
        theirs = source.forward_intermediates(x, intermediates_only=True)
        tokens, ours = model.forward_intermediates(x)
        assert torch.allclose(tokens, model.forward_features(x), atol=1e-6)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours[:-1], theirs[:-1], strict=True))
        some = model.forward_intermediates(x, indices=[0, 1], intermediates_only=True)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(some, ours, strict=False))
        assert model(x).shape == (2, 7)
    assert [tuple(m.shape[1:]) for m in ours] == [
        (info["num_chs"], 64 // info["reduction"], 96 // info["reduction"]) for info in model.feature_info
    ]
    assert tokens.shape == (2, 16, 64)
    assert len(groupings) == 5
    assert all(g.grid == (4, 6) for g in groupings.values())


@pytest.mark.parametrize("name", NETWORKS)
def test_no_unused_parameter_remains(name: str) -> None:
    model = add_vt_stage(build(name), modules=2, **NARROW).train()
    model(torch.randn(2, 3, 64, 64)).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_vt_stage_on_a_resnet_equals_vt_resnet() -> None:
    """The 256 channels before layer4 become 512, as in VT-ResNet-18."""
    source, ours = timm.create_model("resnet18"), timm.create_model("vt_resnet18")
    model = add_vt_stage(source, modules=2, channels=512)
    assert count_parameters(model) == count_parameters(ours)
    assert count_macs(model, (224, 224)) == count_macs(ours, (224, 224))
    model.vt.load_state_dict(ours.vt.state_dict())
    model.head.load_state_dict(ours.head.state_dict())
    ours.load_state_dict(model.backbone.state_dict(), strict=False)
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(model.eval()(x), ours.eval()(x), atol=1e-6)


def test_original_model_is_not_changed() -> None:
    source = build("resnet26d", drop_rate=0.3).eval()
    before, x = copy.deepcopy(source.state_dict()), torch.randn(1, 3, 64, 64)
    expected = source(x)
    model = add_vt_stage(source)
    nn.init.zeros_(model.backbone.get_submodule("layer1.0.conv1").weight)
    assert all(torch.equal(v, before[k]) for k, v in source.state_dict().items())
    assert torch.equal(source(x), expected)
    assert not model.training
    assert model.head_drop.p == 0.3


def test_classifier_conventions() -> None:
    model = add_vt_stage(build("regnety_002"), **NARROW).eval()
    x = torch.randn(2, 3, 64, 64)
    assert model.num_classes == 7
    assert model.num_features == 64
    pooled = model.forward_head(model.forward_features(x), pre_logits=True)
    assert torch.allclose(model.get_classifier()(pooled), model(x), atol=1e-6)
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)
    model.reset_classifier(0, "")
    assert torch.equal(model(x), model.forward_features(x))
    config = timm.data.resolve_model_data_config(model)
    assert config["input_size"] == (3, 224, 224)
    assert isinstance(model.get_submodule(model.pretrained_cfg["first_conv"][0]), nn.Conv2d)
    assert model.pretrained_cfg["classifier"] == "head"


def test_gradient_checkpointing_equals_plain() -> None:
    model = add_vt_stage(build("resnet26d"), **NARROW).train()
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        torch.manual_seed(1)
        model(torch.randn(2, 3, 64, 64)).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))


def test_dtype_and_options() -> None:
    source = build("resnet26d").double()
    model = add_vt_stage(source, modules=1, tokenizer="cluster", mixer="graphconv", tokens=5)
    assert model.eval()(torch.randn(1, 3, 64, 64, dtype=torch.float64)).dtype == torch.float64
    assert model.forward_features(torch.randn(1, 3, 64, 64, dtype=torch.float64)).shape == (1, 5, 1024)


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: nn.Conv2d(3, 8, 3), "Conv2d does not describe its stages"),
        (torchvision.models.resnet18, "ResNet does not describe its stages"),
        (lambda: timm.create_model("resnet18", features_only=True), "without features_only"),
        (
            lambda: timm.create_model("vit_tiny_patch16_224"),
            "no last stage to replace: its last two maps have the same stride 16 and the same 192 channels",
        ),
    ],
)
def test_unsupported_models(create: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(UserError, match=message):
        add_vt_stage(create())


def test_invalid_options() -> None:
    with pytest.raises(UserError, match="a stage of 0 VT modules; give at least 1"):
        add_vt_stage(build("resnet26d"), modules=0)
    with pytest.raises(UserError, match="unknown tokenizer 'filters'; did you mean 'filter'"):
        add_vt_stage(build("resnet26d"), tokenizer="filters")
    with pytest.raises(TypeError, match="unexpected keyword argument 'token'"):
        add_vt_stage(build("resnet26d"), token=8)
