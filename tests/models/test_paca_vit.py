"""PaCa-ViT: published sizes and costs, stages against their blocks, strips, and linear memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm
import torch
from torch import nn

from visualtokens import record_groupings
from visualtokens.bench import count_macs, count_parameters
from visualtokens.layers import Clustering, convolutions
from visualtokens.models.paca_vit import PaCaViT

from ..ops.helpers import LargestTensor

KINDS = ["squeeze", "conv", "mlp", "linear"]


def on_meta(name: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **options)


def small(**options: Any) -> PaCaViT:
    """Two stages with clusters and one without."""
    torch.manual_seed(0)
    config: dict[str, Any] = dict(
        channels=(16, 24, 32),
        depths=(2, 3, 1),
        clusters=(6, 5, 0),
        heads=(2, 2, 2),
        expansions=(4, 4, 4),
        convolutions=((3, 2), (3, 2), (3, 2)),
        num_classes=5,
    )
    return PaCaViT(**(config | options)).eval()


@pytest.mark.parametrize(
    ("name", "classes", "parameters"),
    [
        ("paca_vit_b0", 1000, 3_344_238),
        ("paca_vit_b1", 1000, 12_706_254),
        ("paca_vit_b2", 1000, 22_658_565),
        ("paca_vit_b0_32", 100, 2_989_940),
        ("paca_vit_b1_32", 100, 11_768_196),
        ("paca_vit_b2_32", 100, 20_781_396),
        ("paca_vit_tiny", 1000, 12_200_680),
        ("paca_vit_small", 1000, 22_037_704),
        ("paca_vit_small_mlp", 1000, 22_637_268),
        ("paca_vit_base", 1000, 46_911_304),
    ],
)
def test_parameters_are_exact(name: str, classes: int, parameters: int) -> None:
    assert count_parameters(on_meta(name, num_classes=classes)) == parameters


def test_multiply_adds_are_as_published() -> None:
    published = {"paca_vit_tiny": 3.2, "paca_vit_small_mlp": 5.9}
    gmacs = {name: count_macs(on_meta(name), (224, 224)) / 1e9 for name in published}
    assert {name: round(value, 1) for name, value in gmacs.items()} == published


def test_released_models_use_stochastic_depth() -> None:
    rates = [block.drop_path.drop_prob for s in on_meta("paca_vit_base").stages for block in s.blocks]
    assert rates == pytest.approx(torch.linspace(0, 0.5, len(rates)).tolist())
    without = on_meta("paca_vit_tiny", drop_path_rate=0.0)
    assert without.stages[3].blocks[0].drop_path.drop_prob == 0


@pytest.mark.parametrize(("kind", "per_stage"), [("squeeze", False), ("conv", True), ("mlp", True)])
def test_stage_equals_the_equations(kind: str, per_stage: bool) -> None:
    """With ``per_stage`` each block gathers its own tokens by the assignment of the first."""
    model = small(clustering=kind, per_stage=per_stage)
    stage = model.stages[0]
    images = torch.randn(2, 3, 18, 22)
    with torch.no_grad():
        x, grid = stage.embed(images)
        shared = None
        for block in stage.blocks:
            y = block.norm1(x)
            if shared is None or not per_stage:
                clustering = block.attn.clustering
                shared = clustering.assign(clustering.features(y, grid)).softmax(1)  # (B, N, K)
            z = block.attn.norm(torch.einsum("bnk,bnc->bkc", shared, y))
            q = block.attn.q(y).unflatten(2, (2, 8))
            k, v = block.attn.kv(z).unflatten(2, (2, 2, 8)).unbind(2)
            scores = torch.einsum("bnhd,bkhd->bhnk", q, k) / math.sqrt(8)
            attended = torch.einsum("bhnk,bkhd->bnhd", scores.softmax(3), v).flatten(2)
            x = x + block.attn.proj(attended)
            x = x + block.ffn(block.norm2(x), grid)
        expected = stage.norm(x).mT.unflatten(2, grid)
        assert torch.allclose(stage(images), expected, atol=1e-5)


@pytest.mark.parametrize(("per_stage", "blocks"), [(False, 5), (True, 2)])
def test_every_assignment_is_recorded(per_stage: bool, blocks: int) -> None:
    model = small(per_stage=per_stage)
    with torch.no_grad(), record_groupings(model) as groupings:
        model(torch.randn(1, 3, 32, 48))
    assert len(groupings) == blocks
    assert all(name.endswith("attn.tap") for name in groupings)
    if per_stage:
        assert list(groupings) == ["stages.0.blocks.0.attn.tap", "stages.1.blocks.0.attn.tap"]


def test_cluster_maps_sum_to_one() -> None:
    model = timm.create_model("paca_vit_nano").eval()
    with torch.no_grad(), record_groupings(model) as groupings:
        model(torch.randn(1, 3, 96, 64))
    for grouping in groupings.values():
        sums = grouping.maps().sum((2, 3))
        assert sums.shape == (1, 16)
        assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_initial_clusters_differ(kind: str) -> None:
    model = small(clustering=kind, clusters=(30, 30, 0))
    with torch.no_grad(), record_groupings(model) as groupings:
        model(torch.randn(1, 3, 64, 64))
    for grouping in groupings.values():
        logits = grouping.weights[0].log()  # (N, K), up to a constant per cluster
        assert 0.3 < logits.std(0).mean() < 3
        assert torch.corrcoef(logits.T)[~torch.eye(30, dtype=torch.bool)].mean().abs() < 0.3
    assert all(m.assign.weight.std() > 0.03 for m in model.modules() if isinstance(m, Clustering))


def test_strips_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(residual_ffn=True, per_stage=True).train()
    images = torch.randn(2, 3, 32, 40)
    results = []
    for size in (2**30, 6000):
        monkeypatch.setattr(convolutions, "STRIP_BYTES", size)
        for checkpointing in (False, True):
            model.set_grad_checkpointing(checkpointing)
            model.zero_grad()
            out = model(images)
            out.square().sum().backward()
            with torch.inference_mode():
                assert torch.allclose(model(images), out, atol=1e-5)
            results.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
    for other in results[1:]:
        for whole, strips in zip(results[0], other, strict=True):
            assert torch.allclose(whole, strips, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("per_stage", [False, True])
def test_memory_is_linear_in_the_pixels(train: bool, per_stage: bool) -> None:
    """Four times the pixels need at most four times the largest tensor; strips of a fixed size need less."""
    model = small(clusters=(6, 5, 4), per_stage=per_stage).train(train)
    largest = []
    for side in (64, 128):
        images = torch.randn(1, 3, side, side)
        with torch.set_grad_enabled(train), LargestTensor() as recorder:
            out = model(images)
            if train:
                out.sum().backward()
        patches = (side // 2) ** 2
        assert recorder.numel < patches**2
        largest.append(recorder.numel)
    assert largest[1] <= 4 * largest[0]
