"""Segmentation models of every head on many backbones."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

import visualtokens
from visualtokens import record_groupings
from visualtokens.errors import UserError
from visualtokens.tasks import segment
from visualtokens.tasks.timm_models import Backbone

SMALL = {
    "fpn": dict(dim=16, width=8),
    "vt_fpn": dict(dim=16, width=8, tokens=2, token_dim=16, attn_dim=8, hidden=16),
    "upernet": dict(dim=16),
}
TINY = dict(channels=(8, 16, 16, 32))  # of a ResNet
# Maps of four strides; of one stride; channels last; 14 pixels per patch.
THEIRS = {
    "resnet10t": {},
    "mobilenetv3_small_050": {},
    "convnext_atto": {},
    "swin_tiny_patch4_window7_224": dict(img_size=96, embed_dim=24),
    "vit_tiny_patch16_224": dict(img_size=96, embed_dim=24, depth=4),
    "eva02_tiny_patch14_224": dict(img_size=98, embed_dim=48, depth=3, num_heads=3),
}


def tiny(head: str = "fpn", *, classes: int = 5, auxiliary: bool | None = None) -> segment.Segmenter:
    torch.manual_seed(0)
    return segment.create(
        head,
        backbone="resnet18",
        classes=classes,
        auxiliary=auxiliary,
        backbone_args=TINY,
        head_args=SMALL[head],
    )


@pytest.mark.parametrize("head", SMALL)
@pytest.mark.parametrize("backbone", [*visualtokens.list_models("*_b0"), "vt_resnet18"])
def test_every_head_on_our_backbones(head: str, backbone: str) -> None:
    model = segment.create(head, backbone=backbone, classes=7, head_args=SMALL[head])
    assert model.eval()(torch.randn(1, 3, 96, 64)).shape == (1, 7, 96, 64)


@pytest.mark.parametrize("backbone", THEIRS)
def test_timm_backbones(backbone: str) -> None:
    args = THEIRS[backbone]
    model = segment.create(
        "vt_fpn", backbone=backbone, classes=3, backbone_args=args, head_args=SMALL["vt_fpn"]
    )
    side = args.get("img_size", 96)
    out = model(torch.randn(2, 3, side, side))
    assert out.shape == (2, 3, side, side)
    out.sum().backward()
    assert next(model.backbone.parameters()).grad is not None


FAMILIES = ("vt_resnet18", "paca_vit_b0", "paca_vit_nano", "stvit_small", "deit_e252", "pvt_v2_b0_32")


@pytest.mark.parametrize(
    "name",
    [n if n in FAMILIES else pytest.param(n, marks=pytest.mark.slow) for n in visualtokens.list_models()],
)
def test_our_backbones_return_the_maps_they_announce(name: str) -> None:
    backbone = Backbone(name).eval()
    with torch.inference_mode():
        maps = backbone(torch.randn(1, 3, 64, 32))
    assert len(maps) == len(backbone.channels) == len(backbone.strides)
    for x, channels, stride in zip(maps, backbone.channels, backbone.strides, strict=True):
        assert x.shape == (1, channels, 64 // stride, 32 // stride)


def test_public_name() -> None:
    assert visualtokens.segment is segment
    with pytest.raises(AttributeError, match="has no attribute 'segmen'"):
        visualtokens.segmen  # noqa: B018


def test_levels_are_the_last_four_of_stride_4_or_more() -> None:
    assert Backbone("resnet18", options=TINY).strides == (4, 8, 16, 32)
    assert Backbone("vt_resnet18", options=dict(width=0.25)).strides == (4, 8, 16, 16)
    plain = Backbone("vit_tiny_patch16_224", out_indices=(0, 2), options=dict(depth=3))
    assert (plain.strides, plain.channels) == ((16, 16), (192, 192))


@pytest.mark.parametrize("head", SMALL)
@pytest.mark.parametrize("size", [(1, 1), (1, 300), (97, 211)])
def test_any_image_size(head: str, size: tuple[int, int]) -> None:
    model = tiny(head).eval()
    with torch.inference_mode():
        out = model(torch.randn(1, 3, *size))
    assert out.shape == (1, 5, *size)
    assert out.isfinite().all()


def test_small_images_are_padded_by_replication() -> None:
    model = tiny().eval()
    x = torch.randn(1, 3, 10, 40)
    padded = torch.cat([x, x[:, :, -1:].expand(-1, -1, 22, -1)], dim=2)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), model(padded)[:, :, :10])


def test_no_pixels_is_an_error() -> None:
    with pytest.raises(UserError, match="0×5 have no pixels"):
        tiny()(torch.randn(1, 3, 0, 5))


@pytest.mark.parametrize("head", SMALL)
def test_auxiliary_head_is_used_in_training_only(head: str) -> None:
    model = tiny(head, auxiliary=True)
    x = torch.randn(2, 3, 64, 64)
    first, second = model.train()(x)
    assert first.shape == second.shape == (2, 5, 64, 64)
    second.sum().backward()
    assert not any(p.grad is not None for p in model.decoder.parameters())
    assert isinstance(model.eval()(x), torch.Tensor)
    assert isinstance(tiny(head, auxiliary=False).train()(x), torch.Tensor)


def test_only_upernet_has_an_auxiliary_head_by_default() -> None:
    assert [tiny(head).auxiliary is not None for head in SMALL] == [False, False, True]


def test_every_parameter_of_vt_fpn_gets_a_gradient() -> None:
    model = tiny("vt_fpn").train()
    for module in model.modules():  # zero-initialized branches pass no gradient
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.ones_(module.weight)
    model(torch.randn(2, 3, 64, 64)).square().mean().backward()
    still = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().any()]
    # BatchNorm removes the mean, and a softmax ignores a constant added to all logits.
    assert all(name.endswith(("bias",)) for name in still), still


def test_groupings_of_every_level_are_recorded() -> None:
    model = tiny("vt_fpn").eval()
    with record_groupings(model) as groupings:
        model(torch.randn(1, 3, 64, 96))
    names = [f"decoder.pyramid.tokenizers.{i}.tap" for i in range(4)]
    assert [groupings[name].grid for name in names] == [(16, 24), (8, 12), (4, 6), (2, 3)]


@pytest.mark.parametrize("head", SMALL)
def test_bfloat16_is_close(head: str) -> None:
    model = tiny(head).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        exact = model(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = model(x)
    assert (rough.float() - exact).abs().max() < 0.05 * exact.abs().max() + 0.05


def test_stride_first_only_moves_the_stride() -> None:
    with torch.device("meta"):
        usual, first = Backbone("resnet50"), Backbone("resnet50", stride_first=True)
    convs = [
        (a, b) for a, b in zip(usual.modules(), first.modules(), strict=True) if isinstance(a, nn.Conv2d)
    ]
    moved = [(a.kernel_size, a.stride, b.stride) for a, b in convs if a.stride != b.stride]
    assert sorted(moved) == [((1, 1), (1, 1), (2, 2))] * 3 + [((3, 3), (2, 2), (1, 1))] * 3
    shapes = [tuple(x.shape) for x in first(torch.empty(1, 3, 97, 64, device="meta"))]
    assert shapes == [tuple(x.shape) for x in usual(torch.empty(1, 3, 97, 64, device="meta"))]


def test_timm_weights_fit_the_backbone() -> None:
    """The names below ``backbone.body`` are timm's."""
    torch.manual_seed(0)
    source = timm.create_model("resnet18", **TINY)
    model = tiny()
    wanted = model.backbone.body.state_dict()
    left = set(source.state_dict()) - set(wanted)
    assert left == {"fc.weight", "fc.bias"}
    model.backbone.body.load_state_dict({n: w for n, w in source.state_dict().items() if n in wanted})


def test_no_weight_decay_names() -> None:
    model = segment.create(
        "fpn", backbone="vit_tiny_patch16_224", classes=3, backbone_args=dict(depth=3), head_args=SMALL["fpn"]
    )
    names = {name for name, _ in model.named_parameters()}
    assert model.no_weight_decay() & names == {
        "backbone.body.model.pos_embed",
        "backbone.body.model.cls_token",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(head="fpm"), "unknown head 'fpm'; did you mean 'fpn'"),
        (dict(backbone="resnet5"), "unknown backbone 'resnet5'; did you mean"),
        (dict(classes=0), "classes=0 must be from 1 to 255"),
        (dict(classes=256), "classes=256 must be from 1 to 255"),
        (dict(head_args=dict(token=3)), "unknown head_args of fpn 'token'; choose from dim, width"),
        (dict(backbone_args=dict(pretrained=True)), "backbone_args may not hold 'pretrained'"),
        (dict(backbone_args=dict(widht=2)), "backbone 'resnet18' with {'widht': 2} gives no feature maps"),
        (dict(backbone="convnext_atto", stride_first=True), "has no ResNet bottlenecks"),
        (dict(out_indices=(9,)), "gives no feature maps"),
    ],
)
def test_wrong_options_are_refused(change: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        segment.create(**(dict(head="fpn", backbone="resnet18", classes=3) | change))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
