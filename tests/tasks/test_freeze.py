"""Frozen layers: which they are, and that a training step leaves nothing of them changed."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.tasks.detect import create as create_detector
from visualtokens.tasks.freeze import eval_frozen, freeze, freeze_norms
from visualtokens.tasks.segment import create as create_segmenter
from visualtokens.tasks.timm_models import build_model, head_prefixes

RESNET: dict[str, Any] = dict(channels=[8, 8, 8, 8])
SMALL = dict(dim=8, width=8, tokens=2, token_dim=16, attn_dim=8, groups=1, hidden=16)
# One small model per family, with its number of stages or blocks.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "resnet18": (RESNET | dict(drop_path_rate=0.5, drop_block_rate=0.1), 4),
    "test_vit": (dict(drop_path_rate=0.5, proj_drop_rate=0.5), 6),
    "test_efficientnet": (dict(drop_path_rate=0.5), 5),
    "convnext_atto": (dict(dims=[8, 8, 8, 8], depths=[1, 1, 1, 1], drop_path_rate=0.5), 4),
    "paca_vit_nano": (dict(drop_path_rate=0.5), 4),
    "stvit_iso_64": (dict(drop_path_rate=0.5), 4),
    "vt_resnet18": (dict(width=0.25), 4),
    "pvt_v2_b0_pure": (dict(drop_path_rate=0.5), 4),
    "swin_iso_64": (dict(drop_path_rate=0.5), 4),
    "reduced_vit": (dict(base="test_vit", keep=0.5, drop_path_rate=0.5), 6),
}


def heads_of(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.startswith(head_prefixes(model))}


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def built(name: str) -> nn.Module:
    return build_model(name, classes=3, model_args=MODELS[name][0])


def images(model: nn.Module) -> Tensor:
    size = model.pretrained_cfg["input_size"] if model.pretrained_cfg["fixed_input_size"] else (3, 64, 64)  # type: ignore[index, union-attr]
    return torch.randn(2, *size, generator=torch.Generator().manual_seed(0))  # type: ignore[misc]


@pytest.mark.parametrize("name", MODELS)
def test_frozen_backbone(name: str) -> None:
    """In training mode its features are those of eval mode, without a graph, and nothing of it changes."""
    model: Any = built(name)
    note = freeze(model, "backbone", heads=heads_of(model), name=name)
    assert set(trained(model)) == heads_of(model)
    total, few = (
        sum(p.numel() for p in ps) for ps in (model.parameters(), model.get_classifier().parameters())
    )
    assert note == f"{few:,} of {total:,} parameters are trained"
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    x = images(model)
    expected = model.eval()(x)
    eval_frozen(model.train())
    assert model.get_classifier().training
    assert not model.forward_features(x).requires_grad
    logits = model(x)
    assert torch.equal(logits, expected)
    logits.square().sum().backward()
    assert all((p.grad is not None) == (key in heads_of(model)) for key, p in model.named_parameters())
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_frozen_stages(name: str) -> None:
    """Each stage adds to the frozen parameters; their modules are in eval mode, the others are not."""
    count, sizes = MODELS[name][1], []
    for layers in range(count + 1):
        model = built(name)
        freeze(model, layers, heads=heads_of(model), name=name)
        sizes.append(sum(p.numel() for p in model.parameters() if not p.requires_grad))
        eval_frozen(model.train())
        for module in list(model.modules())[1:]:
            own = list(module.parameters(recurse=False))
            if own:
                assert module.training == any(p.requires_grad for p in own)
    assert sizes == sorted(set(sizes))
    assert sizes[0] > 0
    with pytest.raises(UserError) as caught:
        freeze(built(name), count + 1, heads=heads_of(model), name=name)
    assert str(caught.value) == (
        f"freeze={count + 1}: {name!r} has a stem and {count} stages or blocks; "
        f"give 0 to {count}, or backbone"
    )


@pytest.mark.parametrize(
    ("name", "layers", "frozen"),
    [
        ("resnet18", 0, {"conv1", "bn1"}),
        ("resnet18", 2, {"conv1", "bn1", "layer1", "layer2"}),
        ("test_vit", 1, {"cls_token", "pos_embed", "patch_embed", "blocks.0"}),
        ("paca_vit_nano", 1, {"stages.0"}),
        ("vt_resnet18", 3, {"conv1", "bn1", "layer1", "layer2", "layer3"}),
    ],
)
def test_names_of_frozen_stages(name: str, layers: int, frozen: set[str]) -> None:
    model = built(name)
    freeze(model, layers, heads=heads_of(model), name=name)
    for key, parameter in model.named_parameters():
        assert parameter.requires_grad != key.startswith(
            tuple(f"{f}." for f in frozen) + tuple(frozen - {"bn1"})
        ), key


@pytest.mark.parametrize("layers", [1, "backbone"])
@pytest.mark.parametrize(
    ("backbone", "args", "stem", "stage"),
    [
        ("resnet18", RESNET, ("conv1", "bn1"), "layer1"),
        ("convnext_atto", dict(dims=[8, 8, 8, 8], depths=[1, 1, 1, 1]), ("stem_",), "stages_0"),
        ("paca_vit_nano", {}, ("model.stages.0.embed",), "model.stages.0"),
        ("test_vit", {}, ("model.cls_token", "model.pos_embed", "model.patch_embed"), "model.blocks.0"),
    ],
)
def test_dense_models(
    backbone: str, args: dict[str, Any], stem: tuple[str, ...], stage: str, layers: Any
) -> None:
    segmenter = create_segmenter(
        "fpn", backbone=backbone, classes=3, backbone_args=args, head_args=dict(dim=8)
    )
    models: list[tuple[nn.Module, str]] = [(segmenter, "backbone.body.")]
    if backbone != "test_vit":  # it has one stride
        detector = create_detector(
            "mask_rcnn", backbone=backbone, classes=3, backbone_args=args, width=8, hidden=8
        )
        models.append((detector, "backbone.body.body."))
    for model, body in models:
        heads = {name for name, _ in model.named_parameters() if not name.startswith(body)}
        freeze(model, layers, heads=heads, name="it")
        first = tuple(body + name for name in (*stem, stage)) if layers == 1 else (body,)
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad != name.startswith(first), name


def test_models_that_do_not_name_their_layers() -> None:
    for name, message in (
        ("pit_ti_224", "freeze=1: 'pit_ti_224' does not name its layers .* give --freeze backbone"),
        ("rdnet_tiny", "freeze=1: 'rdnet_tiny' is not divided into stages or blocks; give backbone"),
        ("levit_128s", "freeze=1: 'levit_128s' is not divided into stages or blocks; give backbone"),
    ):
        with torch.device("meta"):
            model = timm.create_model(name)
        with pytest.raises(UserError, match=message):
            freeze(model, 1, heads=heads_of(model), name=name)
        assert len(trained(model)) == len(list(model.parameters()))
        freeze(model, "backbone", heads=heads_of(model), name=name)
        assert set(trained(model)) == heads_of(model)
    with pytest.raises(UserError, match="freeze=backbone: 'x' has no head that would be trained"):
        freeze(nn.Linear(2, 2), "backbone", heads=set(), name="x")


def test_frozen_norms_of_the_backbone_do_not_change() -> None:
    model = create_segmenter("vt_fpn", backbone="resnet18", classes=3, backbone_args=RESNET, head_args=SMALL)
    heads = {name for name, _ in model.named_parameters() if not name.startswith("backbone.body.")}
    note = freeze_norms(model, heads=heads, name="vt_fpn")
    assert note == "21 BatchNorm layers of the backbone are not trained"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    eval_frozen(model)
    model(torch.randn(2, 3, 64, 64)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert not [name for name in changed if ".bn" in name or "downsample.1" in name]
    assert "backbone.body.conv1.weight" in changed
    assert any("running_mean" in name for name in changed)  # of the head
    with pytest.raises(UserError, match="freeze_norms: the backbone of 'test_vit' has no BatchNorm"):
        freeze_norms(built("test_vit"), heads=set(), name="test_vit")
