from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.explain.evidence import (
    PAIRS,
    Probe,
    _random_halves,
    gradient_map,
    path_cost,
    path_map,
    relevance_map,
    with_detail,
)
from visualtokens.explain.render import upsample


class Linear(nn.Module):
    """A linear classifier with one feature map."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Conv2d(3, 6, 4, 4), nn.Linear(6 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).flatten(1))


def test_gradient_times_feature_is_exact_for_a_linear_model() -> None:
    """Each patch's share is the change of the logit when it alone is shown."""
    model, x = Linear(), torch.randn(3, 16, 16)
    got = gradient_map(model, x, lambda images: model(images)[:, 1])
    with torch.no_grad():
        for row in range(4):
            for column in range(4):
                alone = torch.zeros(1, 3, 16, 16)
                part = slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4)
                alone[0, :, *part] = x[:, *part]
                change = model(alone)[0, 1] - model(torch.zeros_like(alone))[0, 1]
                assert got[row, column] == pytest.approx(change.item(), abs=1e-5)


def slow_relevance(model: nn.Module, x: Tensor, target: int) -> Tensor:
    """R ← R + A R with A = mean over heads of (A ⊙ gradient)⁺, all matrices written out."""
    weights = []
    tokens = model.norm_pre(model._pos_embed(model.patch_embed(x[None])))
    for block in model.blocks:
        attn = block.attn
        q, k, v = attn.qkv(block.norm1(tokens)).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        a = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        weights.append(a)
        tokens = tokens + attn.proj((a @ v).transpose(1, 2).flatten(2))
        tokens = tokens + block.mlp(block.norm2(tokens))
    score = model.forward_head(model.norm(tokens))[0, target]
    relevance = torch.eye(tokens.shape[1])
    for a, gradient in zip(weights, torch.autograd.grad(score, weights), strict=True):
        relevance = relevance + (a * gradient).clamp_min(0).mean(1)[0] @ relevance
    return relevance[0, 1:]


def test_relevance_against_its_equations() -> None:
    torch.manual_seed(0)
    options = dict(img_size=(32, 48), depth=3, embed_dim=24, num_heads=3, num_classes=4)
    model = timm.create_model("vit_tiny_patch16_224", **options).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = torch.randn(3, 32, 48)
    got = relevance_map(model, x, lambda images: model(images)[:, 2])
    want = slow_relevance(model, x, 2).detach().reshape(2, 3)
    want = want / want.sum() * got.sum()  # the factor ½ of rollout changes the scale only
    assert got == pytest.approx(want.numpy(), rel=1e-4)


class EitherEye(nn.Module):
    """The score is the brighter of two patches: the other one matters once the first is hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 1, 4, 4, bias=False)
        nn.init.ones_(self.embed.weight)

    def forward(self, x: Tensor) -> Tensor:
        values = self.embed(x)[:, 0]
        return torch.maximum(values[:, 1, 1], values[:, 2, 3])


def test_the_path_finds_what_one_pass_misses() -> None:
    model, x = EitherEye(), torch.zeros(3, 16, 16)
    x[:, 4:8, 4:8], x[:, 8:12, 12:16] = 1.0, 0.9
    first = gradient_map(model, x, model)
    assert np.flatnonzero(first).tolist() == [5]
    found = path_map(model, x, model, steps=4)
    assert found is not None
    assert np.argsort(-found.patches.ravel())[:2].tolist() == [5, 11]
    assert path_cost() == 46


class Enough(nn.Module):
    """The score is 1 as soon as enough of four bright patches are shown: hiding one changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 1, 4, 4, bias=False)
        nn.init.ones_(self.embed.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (self.embed(x).flatten(1).sum(1) / 144).clamp(max=1)


def test_halves_find_what_the_whole_image_has_too_much_of() -> None:
    """At the whole image, all gradients are 0; with half of the patches hidden, they are not."""
    model, x = Enough(), torch.zeros(3, 16, 16)
    bright = torch.zeros(16)
    bright[[1, 6, 8, 15]] = 1.0
    x += bright.view(4, 4).repeat_interleave(4, 0).repeat_interleave(4, 1)
    assert not gradient_map(model, x, model).any()
    found = path_map(model, x, model)
    assert found is not None
    assert sorted(np.argsort(-found.patches.ravel())[:4].tolist()) == [1, 6, 8, 15]


def test_pixels_are_the_mean_of_gradient_times_pixel() -> None:
    """Of a linear score, each version in which a pixel is shown has the same."""
    model, x = Linear(), torch.randn(3, 16, 16)
    found = path_map(model, x, lambda images: model(images)[:, 1], steps=4)
    weight = torch.autograd.functional.jacobian(lambda image: model(image[None])[0, 1], x)
    assert found is not None
    share = (x * weight).sum(0).numpy()
    shown = found.pixels / share  # in which share of the 1 + 2 · PAIRS + 4 versions a pixel is shown
    versions = 1 + 2 * PAIRS + 4
    assert shown * versions == pytest.approx(np.rint(shown * versions), abs=1e-3)
    assert shown.max() * versions == pytest.approx(1 + PAIRS + 4, abs=1e-3)
    assert shown.min() * versions >= 1 + PAIRS - 1e-3


def test_detail_orders_the_pixels_of_a_patch() -> None:
    patches, pixels = np.array([[0.0, 1.0]]), np.zeros((2, 4))
    pixels[0] = 1.0
    got = with_detail(patches, pixels)
    coarse = upsample(patches, 2, 4)
    want = (coarse - coarse.mean()) / coarse.std() + 0.5 * (2 * pixels - 1)
    assert got == pytest.approx(want, abs=1e-6)
    assert with_detail(np.ones((1, 2)), np.zeros((2, 4))).tolist() == [[0.0] * 4] * 2


def test_a_score_that_no_patch_changes() -> None:
    model = Linear()
    assert path_map(model, torch.randn(3, 16, 16), lambda images: 0 * model(images)[:, 0]) is None


@pytest.mark.parametrize("grid", [(14, 14), (5, 3), (20, 40)])
def test_every_patch_is_shown_in_half_of_the_halves(grid: tuple[int, int]) -> None:
    halves = np.stack(list(_random_halves(grid, seed=1)))
    assert (halves.sum(0) == PAIRS).all()
    assert len({half.tobytes() for half in halves}) == 2 * PAIRS
    assert (halves == np.stack(list(_random_halves(grid, seed=1)))).all()


def test_a_model_without_attention_and_maps() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))

    def score(images: Tensor) -> Tensor:
        return flat(images)[:, 0]

    assert path_map(flat, torch.randn(3, 4, 4), score) is None
    with pytest.raises(UserError, match="no attention"):
        relevance_map(flat, torch.randn(3, 4, 4), score)
    with pytest.raises(UserError, match="shapley"):
        gradient_map(flat, torch.randn(3, 4, 4), score)


def test_a_probe_leaves_no_hooks_and_no_gradients() -> None:
    model, x = Linear(), torch.randn(3, 16, 16)
    Probe(model, x, lambda images: model(images)[:, 0])(x)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
