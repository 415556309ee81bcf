from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visualtokens
from visualtokens.errors import UserError
from visualtokens.explain.baselines import nearest_grid, rollout
from visualtokens.explain.layers import record_attention
from visualtokens.grouping import Grouping, Tap, record_groupings


def small_vit(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=(32, 48),
        depth=3,
        embed_dim=24,
        num_heads=3,
        num_classes=3,
        **options,
    ).eval()


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_a_vit_against_the_product_of_whole_matrices(pool: str) -> None:
    model = small_vit(global_pool=pool)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)  # so that the attention is far from uniform
    x = torch.randn(3, 32, 48)
    with torch.no_grad(), record_attention({}) as attended:
        model(x[None])
    product = torch.eye(7)
    for one in attended:
        product = (torch.eye(7) + one.weights[0]) / 2 @ product
    want = product[0, 1:] if pool == "token" else product[1:, 1:].mean(0)
    got = rollout(model, x)
    assert got.shape == (2, 3)
    assert torch.allclose(got.flatten(), want, atol=1e-6)
    assert want.std() > 1e-3


def test_paca_against_the_product_of_whole_matrices() -> None:
    """Patches attend to clusters in the first two stages, to each other in the last two."""
    torch.manual_seed(0)
    model = visualtokens.create_model("paca_vit_nano", num_classes=3).eval()
    x = torch.randn(3, 32, 64)
    with torch.no_grad(), record_groupings(model) as groupings, record_attention(groupings) as attended:
        model(x[None])
    clusters = [grouping.weights[0] for grouping in groupings.values()]  # (N, K), each column sums to 1
    product = torch.eye(16 * 32)
    grid = (16, 32)
    for stage, one in enumerate(attended):
        mixing = one.weights[0] if stage > 1 else one.weights[0] @ clusters[stage].T
        patches = len(mixing)
        if patches != len(product):
            smaller = (grid[0] // 2, grid[1] // 2)
            product = F.avg_pool2d(product.T.unflatten(1, grid)[:, None], 2).flatten(1).T
            grid = smaller
        product = (torch.eye(patches) + mixing) / 2 @ product
    got = rollout(model, x)
    assert got.shape == (16, 32)
    assert float(got.sum()) == pytest.approx(1, abs=1e-4)
    assert torch.allclose(got.flatten(), product.mean(0), atol=1e-6)


class Attending(nn.Module):
    """One attention of everybody to everybody, with a given matrix."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.register_buffer("logits", weights.log())

    def forward(self) -> None:
        logits: Tensor = self.get_buffer("logits")
        eye = torch.eye(len(logits))[None, None]
        F.scaled_dot_product_attention(logits[None, None], eye, eye, scale=1.0)


def random_attention(n: int, seed: int) -> Tensor:
    return torch.rand(n, n, generator=torch.Generator().manual_seed(seed)).mul(3).softmax(1)


class Pooling(nn.Module):
    """A class token and 4 patches, which a first block merges to 2; a second block mixes those."""

    num_prefix_tokens = 1
    global_pool = "token"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attending(random_attention(5, 0)), Attending(random_attention(3, 1))
        self.tap = Tap()

    def forward(self, x: Tensor) -> Tensor:
        self.first()
        merged = Grouping.hard_from(torch.tensor([[0, 0, 1, 0]]), 2, (2, 2))
        self.tap(merged.weights, merged.grid, merged.size, merged.index)
        self.second()
        return x.mean((2, 3))[:, :2]


def test_merged_tokens_hand_on_what_they_got_to_their_patches() -> None:
    belongs = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1], [0, 1, 0]])
    made_of = torch.tensor([[1.0, 0, 0, 0, 0], [0, 1 / 3, 1 / 3, 0, 1 / 3], [0, 0, 0, 1, 0]])
    first = (torch.eye(5) + random_attention(5, 0)) / 2
    second = (torch.eye(5) + belongs @ random_attention(3, 1) @ made_of) / 2
    got = rollout(Pooling(), torch.rand(3, 8, 8))
    assert torch.allclose(got.flatten(), (second @ first)[0, 1:], atol=1e-6)


class Tessellated(nn.Module):
    """Two super tokens of 4 patches attend to each other; later, after a stage without, 2 patches do."""

    def __init__(self) -> None:
        super().__init__()
        self.supers, self.late = Attending(random_attention(2, 2)), Attending(random_attention(2, 3))
        self.tap = Tap()

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.tensor([[[0.9, 0.1], [0.6, 0.4], [0.3, 0.7], [0.2, 0.8]]])
        self.tap(weights, (4, 1), torch.ones(1, 2), torch.tensor([0, 1]).expand(1, 4, 2))
        self.supers()
        self.late()
        return x.mean((2, 3))[:, :2]


def test_super_tokens_hand_back_to_patches_and_later_patches_are_no_super_tokens() -> None:
    belongs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7], [0.2, 0.8]])
    supers = (torch.eye(4) + belongs @ random_attention(2, 2) @ (belongs / belongs.sum(0)).T) / 2
    late = (torch.eye(2) + random_attention(2, 3)) / 2
    down = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])
    want = (late @ down @ supers).mean(0)
    got = rollout(Tessellated(), torch.rand(3, 16, 4))
    assert got.shape == (4, 1)
    assert torch.allclose(got.flatten(), want, atol=1e-6)


@pytest.mark.parametrize("method", ["kmedoids", "weighted_kmedoids", "merge"])
def test_a_reduced_vit_against_the_product_of_whole_matrices(method: str) -> None:
    """Whether the pooling looks into the attention, which is then spelled out, or not."""
    model = small_vit()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    visualtokens.reduce(model, method, keep=[4, 2, 2])
    x = torch.randn(3, 32, 48)
    with torch.no_grad(), record_groupings(model) as groupings, record_attention(groupings) as attended:
        model(x[None])
    assert [one.weights.shape[1] for one in attended] == [7, 5, 3]
    product = (torch.eye(7) + attended[0].weights[0]) / 2
    for one, grouping in zip(attended[1:], groupings.values(), strict=False):
        belongs = torch.block_diag(torch.eye(1), grouping.dense()[0])  # (7, 1 + K)
        mixing = belongs @ one.weights[0] @ (belongs / belongs.sum(0)).T
        product = (torch.eye(7) + mixing) / 2 @ product
    assert torch.allclose(rollout(model, x).flatten(), product[0, 1:], atol=1e-6)


def test_attention_that_is_not_fused_is_followed_alike() -> None:
    model, x = small_vit(), torch.randn(3, 32, 48)
    fused = rollout(model, x)
    for block in model.blocks:
        block.attn.fused_attn = False
    assert torch.allclose(rollout(model, x), fused, atol=1e-6)


def test_a_head_that_pools_by_attention() -> None:
    model = small_vit(global_pool="map", class_token=False)
    x = torch.randn(3, 32, 48)
    with torch.no_grad(), record_attention({}) as attended:
        model(x[None])
    product = torch.eye(6)
    for one in attended[:-1]:
        product = (torch.eye(6) + one.weights[0]) / 2 @ product
    want = attended[-1].weights[0] @ product
    assert want.shape == (1, 6)
    assert torch.allclose(rollout(model, x).flatten(), want[0], atol=1e-6)


def test_keys_that_were_pooled_hand_on_evenly() -> None:
    """PVTv2 attends to means of patches in all but its last stage."""
    torch.manual_seed(0)
    got = rollout(timm.create_model("pvt_v2_b0", num_classes=3), torch.randn(3, 64, 128))
    assert got.shape == (16, 32)
    assert float(got.sum()) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("size", [64, 96])
def test_visual_tokens_that_talk_are_nothing_to_follow(size: int) -> None:
    model = visualtokens.create_model("vt_resnet18", num_classes=3)
    with pytest.raises(UserError, match="no attention over patches"):
        rollout(model, torch.randn(3, size, size))


@pytest.mark.parametrize(
    ("patches", "aspect", "grid"),
    [(196, 1, (14, 14)), (70, 100 / 150, (7, 10)), (7, 1 / 2, (1, 7)), (6, 3 / 2, (3, 2))],
)
def test_nearest_grid(patches: int, aspect: float, grid: tuple[int, int]) -> None:
    assert nearest_grid(patches, aspect) == grid
    assert np.prod(grid) == patches
