"""Released names become ours, and the converted models compute what the released ones do."""

from __future__ import annotations

import csv
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from visualtokens.converters import convert
from visualtokens.errors import UserError
from visualtokens.models import create_model

GOLDEN = Path(__file__).parents[1] / "../shared/golden"
needs_golden = pytest.mark.skipif(
    not GOLDEN.exists(), reason="the reference outputs are not beside the checkout"
)

MODELS = {
    "pacavit_tiny_p2cconv_100_0": "paca_vit_tiny",
    "pacavit_small_p2cconv_100_0": "paca_vit_small",
    "pacavit_small_p2cmlp_100_0": "paca_vit_small_mlp",
    "pacavit_base_p2cconv_100_0": "paca_vit_base",
}


STVIT = ("stvit_small", "stvit_base", "stvit_large")


def golden_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """The rule of the reference: every tensor follows from its name."""
    if name.endswith("fold.weights"):
        return torch.eye(9).view(9, 1, 3, 3)
    n = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if name.endswith("running_var"):
        n = 1 + np.float32(0.1) * np.abs(n)
    elif len(shape) >= 2:
        scale = 8 if "clustering" in name else 0.5
        n = n * np.float32(scale / np.sqrt(np.prod(shape[1:])))
    elif name.endswith("weight"):
        n = 1 + np.float32(0.1) * n
    else:
        n = np.float32(0.1) * n
    return torch.from_numpy(n)


def golden_checkpoint(released: str) -> dict[str, Tensor]:
    with (GOLDEN / f"{released}.keys.csv").open() as file:
        rows = list(csv.DictReader(file))
    counts = {r["name"]: torch.tensor(0) for r in rows if r["name"].endswith("num_batches_tracked")}
    return {
        r["name"]: golden_tensor(r["name"], tuple(map(int, r["shape"].split("x"))))
        for r in rows
        if r["name"] not in counts
    } | counts


def golden_image(height: int, width: int) -> Tensor:
    noise = np.random.default_rng(height * 10000 + width).standard_normal((1, 3, height, width))
    return torch.from_numpy(noise.astype(np.float32))


@needs_golden
@pytest.mark.parametrize("released", MODELS)
def test_outputs_of_the_released_models(released: str) -> None:
    found = convert(golden_checkpoint(released), "paca")
    assert found.complete
    assert (found.model, found.classes) == (MODELS[released], 1000)
    with torch.device("meta"):  # nothing to initialise: all weights come from the checkpoint
        model = create_model(found.model, num_classes=found.classes).eval()
    model.load_state_dict(found.state_dict, assign=True)
    expected = json.loads((GOLDEN / "paca.json").read_text())
    for height, width in [(224, 224), (256, 192)]:
        with torch.inference_mode():
            logits = model(golden_image(height, width))[0]
        golden = expected[f"{released}/{height}x{width}"]
        assert torch.allclose(logits[:32], torch.tensor(golden["logits"]), atol=1e-4, rtol=0)
        assert logits.std().item() == pytest.approx(golden["logits_std"], abs=1e-4)


@needs_golden
@pytest.mark.parametrize("released", STVIT)
def test_outputs_of_the_released_super_token_models(released: str) -> None:
    found = convert(golden_checkpoint(released), "stvit")
    assert found.complete
    assert (found.model, found.classes) == (released, 1000)
    assert found.options == {"border": "released"}
    model = create_model(found.model, **found.options).eval()
    model.load_state_dict(found.state_dict)
    expected = json.loads((GOLDEN / "stvit.json").read_text())
    sizes = [key.split("/")[1] for key in expected if key.startswith(f"{released}/")]
    assert sizes
    for size in sizes:
        with torch.inference_mode():
            features = model.forward_head(
                model.forward_features(golden_image(*map(int, size.split("x")))), pre_logits=True
            )
            logits = model.get_classifier()(features)[0]
        golden = expected[f"{released}/{size}"]
        assert torch.allclose(logits[:32], torch.tensor(golden["logits"]), atol=1e-4, rtol=0)
        assert logits.std().item() == pytest.approx(golden["logits_std"], abs=1e-4)
        assert features.sum().item() == pytest.approx(golden["features_sum"], rel=1e-4)


def layer(name: str, *shape: int, bias: bool = True) -> dict[str, Tensor]:
    weights = {f"{name}.weight": torch.empty(shape, device="meta")}
    return weights | ({f"{name}.bias": torch.empty(shape[0], device="meta")} if bias else {})


def released_clustering(name: str, c: int, kind: str) -> dict[str, Tensor]:
    if kind == "mlp":
        return layer(f"{name}.0", 4 * c, c) | layer(f"{name}.2", 100, 4 * c)
    first, second = layer(f"{name}.0", c, 1, 7, 7), layer(f"{name}.2", c, c, 1, 1)
    return first | second | layer(f"{name}.4", 100, c, 1, 1, bias=False)


def released_block(name: str, c: int, *, clusters: bool, kind: str | None) -> dict[str, Tensor]:
    block = layer(f"{name}.norm1_before", c) | layer(f"{name}.norm2_before", c)
    for projection in "qkv":
        block |= layer(f"{name}.attn.{projection}", c, c)
    block |= layer(f"{name}.attn.proj", c, c)
    if clusters:
        block |= layer(f"{name}.attn.cluster_norm", c)
    if kind:
        block |= released_clustering(f"{name}.attn.clustering.clustering", c, kind)
    block |= layer(f"{name}.mlp.fc1", 4 * c, c) | layer(f"{name}.mlp.dwconv.dwconv", 4 * c, 1, 3, 3)
    return block | layer(f"{name}.mlp.fc2", c, 4 * c)


def released_names(depths: tuple[int, ...], channels: tuple[int, ...], kind: str) -> dict[str, Tensor]:
    """The names and shapes of a released checkpoint, without values."""
    c = channels[0]
    names = layer("patch_embed.proj.0", c // 2, 3, 3, 3) | layer("patch_embed.proj.1", c, c // 2, 3, 3)
    names |= layer("patch_embed.norm", c)
    for i, (depth, c) in enumerate(zip(depths, channels, strict=True)):
        if i > 0:
            names |= layer(f"transition{i}.proj", c, channels[i - 1], 3, 3) | layer(f"transition{i}.norm", c)
        for j in range(depth):
            own = kind if i < 3 and j == 0 else None
            names |= released_block(f"stage{i + 1}.{j}", c, clusters=i < 3, kind=own)
        names |= layer(f"norm{i + 1}", c)
    return names | layer("head", 1000, channels[-1])


NARROW, WIDE = (96, 192, 320, 384), (96, 192, 384, 512)


def tiny() -> dict[str, Tensor]:
    return released_names((2, 2, 4, 2), NARROW, "conv")


@pytest.mark.parametrize(
    ("name", "depths", "channels", "kind"),
    [
        ("paca_vit_tiny", (2, 2, 4, 2), NARROW, "conv"),
        ("paca_vit_small", (3, 3, 10, 3), NARROW, "conv"),
        ("paca_vit_small_mlp", (3, 3, 10, 3), NARROW, "mlp"),
        ("paca_vit_base", (3, 3, 18, 3), WIDE, "conv"),
    ],
)
def test_every_name_finds_its_place(
    name: str, depths: tuple[int, ...], channels: tuple[int, ...], kind: str
) -> None:
    found = convert(released_names(depths, channels, kind), "paca")
    assert found.complete
    assert (found.model, found.classes) == (name, 1000)
    with torch.device("meta"):
        create_model(name).load_state_dict(found.state_dict)  # strict: every name and shape


def test_values_are_those_of_the_checkpoint() -> None:
    released = tiny()
    for name in ("stage2.1.attn.k.bias", "stage2.1.attn.v.bias", "norm3.weight"):
        released[name] = torch.randn(released[name].shape)
    found = convert(released, "paca").state_dict
    both = torch.cat([released["stage2.1.attn.k.bias"], released["stage2.1.attn.v.bias"]])
    assert torch.equal(found["stages.1.blocks.1.attn.kv.bias"], both)
    assert found["stages.2.norm.weight"] is released["norm3.weight"]


@pytest.mark.parametrize("wrapper", ["model", "state_dict", "state_dict_ema"])
def test_checkpoints_of_training_scripts(wrapper: str) -> None:
    saved = {wrapper: {f"module.{name}": t for name, t in tiny().items()}, "epoch": 299}
    assert convert(saved, "paca").complete


def test_another_classifier_and_none() -> None:
    released = tiny() | layer("head", 10, 384)
    assert (convert(released, "paca").classes, convert(released, "paca").complete) == (10, True)
    backbone = {name: t for name, t in released.items() if not name.startswith("head")}
    found = convert(backbone, "paca")
    assert (found.model, found.classes, found.missing) == ("paca_vit_tiny", 0, [])


def test_what_does_not_come_over_is_listed() -> None:
    released = tiny()
    released["stage1.0.attn.relative.table"] = torch.empty(3)
    del released["stage1.1.attn.v.weight"]  # a key without its value
    del released["norm2.bias"]
    released["stage3.0.mlp.fc1.bias"] = torch.empty(7)
    found = convert(released, "paca")
    assert not found.complete
    assert found.unknown == ["stage1.0.attn.relative.table", "stage1.1.attn.k.weight"]
    assert found.missing == ["stages.0.blocks.1.attn.kv.weight", "stages.1.norm.bias"]
    assert found.misfits == ["stages.2.blocks.0.ffn.fc1.bias: 7 in the checkpoint, 1280 in paca_vit_tiny"]


def test_wrong_use_is_named() -> None:
    with pytest.raises(UserError, match="unknown family of checkpoints 'pacca'; did you mean 'paca'"):
        convert(tiny(), "pacca")
    with pytest.raises(UserError, match="no checkpoint of 'paca': 'layer1"):
        convert({"layer1.weight": torch.empty(2)}, "paca")
    with pytest.raises(UserError, match="no tensors in the checkpoint, only 'epoch'"):
        convert({"epoch": 3}, "paca")
