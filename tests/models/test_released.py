"""Released checkpoints of other libraries, and models that convert what they are given by themselves."""

from __future__ import annotations

import argparse
import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from timm.models import VisionTransformer, pvt_v2, vision_transformer
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

from tests.test_converters import TouchesFile, golden_tensor, released_shapes
from visualtokens.converters import convert
from visualtokens.errors import UserError
from visualtokens.layers import SuperTokenAttention
from visualtokens.models import create_model
from visualtokens.models.released import find_layout, rename
from visualtokens.models.released_names import DEIT, FAMILIES, PVT_V2, SWIN, TORCHVISION


def randomise(model: nn.Module) -> nn.Module:
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(golden_tensor(name, tuple(tensor.shape)))
    return model.eval()


def same(model: nn.Module, other: nn.Module, size: int = 224) -> None:
    x = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = other(x)
        assert wanted.std() > 0.01
        torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)


# torchvision.


def test_vit_of_torchvision() -> None:
    released = randomise(torchvision.models.VisionTransformer(32, 16, 2, 2, 48, 96, num_classes=7))
    renamed, unmatched = rename(released.state_dict(), TORCHVISION[0])
    model = VisionTransformer(32, 16, num_classes=7, embed_dim=48, depth=2, num_heads=2, mlp_ratio=2)
    model.load_state_dict(renamed)
    assert unmatched == []
    same(model.eval(), released, size=32)


def test_released_vits_have_older_names_of_layers() -> None:
    state = torchvision.models.VisionTransformer(32, 16, 1, 2, 48, 96).state_dict()
    old = {
        n.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): w for n, w in state.items()
    }
    assert rename(old, TORCHVISION[0])[0].keys() == rename(state, TORCHVISION[0])[0].keys()
    assert old.keys() != state.keys()


def tiny_swin() -> nn.Module:
    return randomise(
        torchvision.models.SwinTransformer([4, 4], 16, [2, 2, 2, 2], [1, 2, 4, 8], [7, 7], num_classes=7)
    )


def timm_swin() -> nn.Module:
    return SwinTransformer(num_classes=7, embed_dim=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8)).eval()


def test_swin_of_torchvision() -> None:
    released, model = tiny_swin(), timm_swin()
    renamed, unmatched = rename(released.state_dict(), TORCHVISION[1])
    model.load_state_dict(renamed)
    assert unmatched == []
    same(model, released)


def microsoft_name(name: str) -> str:
    """The name in Microsoft's Swin of a parameter in torchvision's."""
    name = name.replace("features.0.0.", "patch_embed.proj.").replace("features.0.2.", "patch_embed.norm.")
    if found := re.match(r"features\.(\d)\.", name):
        stage, is_merge = divmod(int(found[1]) - 1, 2)
        inside = f"layers.{stage}." + ("downsample." if is_merge else "blocks.")
        name = inside + name.removeprefix(found[0])
    return name.replace("mlp.0.", "mlp.fc1.").replace("mlp.3.", "mlp.fc2.")


def test_swin_of_microsoft() -> None:
    released, model = tiny_swin(), timm_swin()
    state = {microsoft_name(name): tensor for name, tensor in released.state_dict().items()}
    state["layers.0.blocks.1.attn_mask"] = torch.zeros(64, 49, 49)
    assert "layers.2.downsample.reduction.weight" in state
    assert find_layout(state) is SWIN[0]
    renamed, unmatched = rename(state, SWIN[0])
    model.load_state_dict(renamed)
    assert unmatched == []
    same(model, released)


@pytest.mark.parametrize(
    ("released", "model", "args"),
    [
        ("resnet18", "resnet18", {}),
        ("resnet101", "resnet101", {}),
        ("resnext101_64x4d", "resnext101_64x4d", {}),
        ("wide_resnet50_2", "wide_resnet50_2", {}),
        ("vit_b_16", "vit_base_patch16_224", {}),
        ("vit_l_32", "vit_large_patch32_224", {}),
        ("vit_h_14", "vit_huge_patch14_224", {"img_size": 518}),
        ("swin_t", "swin_tiny_patch4_window7_224", {}),
        ("swin_b", "swin_base_patch4_window7_224", {}),
    ],
)
def test_every_name_of_torchvision(released: str, model: str, args: dict[str, Any]) -> None:
    sized = {"image_size": args["img_size"]} if args else {}
    with torch.device("meta"):
        state = getattr(torchvision.models, released)(**sized).state_dict()
    found = convert(state, "torchvision")
    assert found.complete
    assert (found.model, found.classes, found.options) == (model, 1000, args)
    assert found.cfg["mean"] == (0.485, 0.456, 0.406)
    if "swin" in released:
        state = {microsoft_name(name): tensor for name, tensor in state.items()}
        assert (convert(state, "swin").model, convert(state, "swin").complete) == (model, True)


def test_resnets_of_torchvision_compute_the_same(tmp_path: Path) -> None:
    released = randomise(torchvision.models.resnet18(num_classes=7))
    torch.save(released.state_dict(), tmp_path / "resnet18.pth")
    found = convert(tmp_path / "resnet18.pth", "torchvision")
    model = create_model(found.model, num_classes=found.classes).eval()
    model.load_state_dict(found.state_dict)
    same(model, released, size=64)


# PVTv2 and DeiT, with timm's own conversion as the reference.


def pvt_name(name: str) -> str:
    """The released name of a parameter of timm's PVTv2."""
    name = name.replace("patch_embed.", "patch_embed1.")
    name = re.sub(r"stages\.(\d)\.downsample", lambda m: f"patch_embed{int(m[1]) + 1}", name)
    name = re.sub(r"stages\.(\d)\.blocks", lambda m: f"block{int(m[1]) + 1}", name)
    name = re.sub(r"stages\.(\d)\.norm", lambda m: f"norm{int(m[1]) + 1}", name)
    return name.replace("dwconv", "dwconv.dwconv")


@pytest.mark.parametrize("name", ["pvt_v2_b0", "pvt_v2_b2_li", "pvt_v2_b5"])
def test_every_name_of_pvt_v2(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    state = {pvt_name(key): tensor for key, tensor in model.state_dict().items()}
    assert find_layout(state) is PVT_V2[0]
    found = convert(state, "pvt_v2")
    assert (found.model, found.complete) == (name, True)
    reference = pvt_v2.checkpoint_filter_fn(state, model)
    assert found.state_dict.keys() == reference.keys()
    assert all(found.state_dict[key] is reference[key] for key in reference)


@pytest.mark.parametrize(
    "name", ["deit_tiny_patch16_224", "deit_base_distilled_patch16_384", "deit3_medium_patch16_224"]
)
def test_every_name_of_deit(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    renamed = partial(re.sub, r"\.ls([12])\.gamma", r".gamma_\1")
    state = {renamed(key): tensor for key, tensor in model.state_dict().items()}
    assert find_layout(state) is (DEIT[0] if "deit3" in name else None)
    found = convert({"model": state}, "deit")
    assert (found.model, found.complete) == (name, True)
    reference = vision_transformer.checkpoint_filter_fn(state, model, adapt_layer_scale=True)
    assert found.state_dict.keys() == reference.keys()


def test_other_model_than_the_best() -> None:
    with torch.device("meta"):
        state = torchvision.models.swin_t().state_dict()
    found = convert(state, "torchvision", model="swin_iso_96")
    assert (found.model, found.complete) == ("swin_iso_96", True)
    found = convert(state, "torchvision", model="swin_small_patch4_window7_224")
    assert len(found.missing) > 100
    with pytest.raises(UserError, match="unknown model 'swin_tiny'; did you mean"):
        convert(state, "torchvision", model="swin_tiny")


def test_no_layout_fits_the_names_of_a_model() -> None:
    for name in (
        "paca_vit_nano",
        "stvit_small",
        "deit_small_patch16_224",
        "pvt_v2_b0",
        "swin_iso_96",
        "vt_resnet18",
    ):
        with torch.device("meta"):
            assert find_layout(create_model(name).state_dict()) is None
    signs = [layout.sign for family in FAMILIES.values() for layout in family]
    assert len(set(signs)) == len(signs)


# Models that convert by themselves.

DEPTHS = dict(depths=(1, 1, 1, 1))


def stvit_state(classes: int = 1000) -> dict[str, Tensor]:
    """A released STViT with one block per stage."""
    shapes = {n: s for n, s in released_shapes("stvit_small").items() if not re.search(r"blocks\.[1-9]", n)}
    shapes |= {"head.weight": (classes, 1024), "head.bias": (classes,)}
    return {name: golden_tensor(name, shape) for name, shape in shapes.items()}


def by_hand(state: dict[str, Tensor], **options: Any) -> nn.Module:
    layout = FAMILIES["stvit"][0]
    model = create_model("stvit_small", **DEPTHS, **options).eval()
    model.load_state_dict(rename(state, layout)[0])
    return model


@pytest.mark.parametrize("wrapper", ["", "model", "state_dict", "state_dict_ema"])
def test_timm_converts_by_itself(tmp_path: Path, wrapper: str) -> None:
    state = stvit_state()
    content: dict[str, Any] = dict(state)
    if wrapper:
        others = {"model": {"x": torch.zeros(1)}} if "ema" in wrapper else {}
        training = {"epoch": 299, "args": argparse.Namespace(lr=0.1), "optimizer": {"state": {}}}
        content = others | training | {wrapper: {f"module.{name}": w for name, w in state.items()}}
    torch.save(content, tmp_path / "released.pth")
    model = timm.create_model("stvit_small", **DEPTHS, checkpoint_path=str(tmp_path / "released.pth")).eval()
    same(model, by_hand(state, border="released"), size=96)
    borders = {module.border for module in model.modules() if isinstance(module, SuperTokenAttention)}
    assert borders == {"released"}


def test_timm_adapts_what_it_converts(tmp_path: Path) -> None:
    torch.save({"model": stvit_state()}, tmp_path / "released.pth")
    model = timm.create_model(
        "stvit_small",
        **DEPTHS,
        pretrained=True,
        pretrained_cfg_overlay=dict(file=str(tmp_path / "released.pth")),
        num_classes=10,
        in_chans=1,
    )
    wanted = by_hand(stvit_state()).state_dict()
    state = model.state_dict()
    assert all(
        torch.equal(state[n], wanted[n]) for n in state if n != "stages.0.embed.0.weight" and "head" not in n
    )
    first = wanted["stages.0.embed.0.weight"].sum(1, keepdim=True)
    torch.testing.assert_close(state["stages.0.embed.0.weight"], first)


def test_swin_loads_the_weights_of_microsoft() -> None:
    """``swin_iso_96`` is Swin-T for images of any size."""
    released = randomise(
        torchvision.models.SwinTransformer([4, 4], 96, [1, 1, 1, 1], [3, 6, 12, 24], [7, 7], num_classes=7)
    )
    model = timm.create_model("swin_iso_96", depths=(1, 1, 1, 1), num_classes=7).eval()
    model.load_state_dict({microsoft_name(name): w for name, w in released.state_dict().items()})
    same(model, released)


def test_all_weights_are_loaded_or_none() -> None:
    model = create_model("stvit_small", **DEPTHS)
    before = copy.deepcopy(model.state_dict())
    state = stvit_state(classes=7)
    del state["norm.weight"]
    state["layers.0.relative.table"] = torch.zeros(3)
    with pytest.raises(UserError) as caught:
        model.load_state_dict(state)
    assert str(caught.value) == (
        "the released checkpoint does not fit, so nothing was loaded; 1 missing: final.1.weight; "
        "1 unknown: layers.0.relative.table; 2 of another shape: head.weight: 7×1024 in the checkpoint, "
        "1000×1024 in the model, head.bias: 7 in the checkpoint, 1000 in the model"
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.stages[0].blocks[0].attn.border == "exact"


def test_part_of_the_weights_on_request() -> None:
    model = create_model("stvit_small", **DEPTHS)
    state = stvit_state()
    del state["norm.weight"]
    assert model.load_state_dict(state, strict=False).missing_keys == ["final.1.weight"]
    assert torch.equal(model.head.bias, state["head.bias"])


def test_timm_runs_no_pickled_code(tmp_path: Path) -> None:
    torch.save(stvit_state() | {"code": TouchesFile(tmp_path / "unpickled")}, tmp_path / "model.pth")
    with pytest.raises(RuntimeError, match="weights_only=True blocked"):
        timm.create_model("stvit_small", **DEPTHS, checkpoint_path=str(tmp_path / "model.pth"))
    assert not (tmp_path / "unpickled").exists()
