"""Soft extraction against PoWER-BERT's definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.reduce.small import small_vit
from visualtokens.errors import UserError
from visualtokens.reduce.methods import Seen
from visualtokens.reduce.reduction import reduce
from visualtokens.reduce.trainable import (
    SoftExtraction,
    extraction_cost,
    learned_keep,
    pools,
    project,
    soft_extraction,
)

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def soft_vit(*, price: float = 1e-3, pace: float = 20.0) -> nn.Module:
    return reduce(small_vit(), soft_extraction(price=price, pace=pace), keep=1.0, carry=False)


def set_r(pool: SoftExtraction, r: Tensor) -> None:
    with torch.no_grad():
        pool.slow.copy_(r / pool.pace)


def test_the_jth_most_significant_token_is_multiplied_by_the_jth_factor() -> None:
    torch.manual_seed(0)
    pool = SoftExtraction(6, price=1.0, pace=20.0)
    factors = torch.tensor([1.0, 0.9, 0.5, 0.3, 0.1, 0.0])
    set_r(pool, factors)
    x, significance = torch.randn(2, 6, 3), torch.rand(2, 6)
    out = pool(x, 6, Seen(significance, None, None, (2, 3), assign=True)).tokens
    for b in range(2):
        ranked = sorted(range(6), key=lambda i: -significance[b, i].item())
        for j, i in enumerate(ranked):
            torch.testing.assert_close(out[b, i], factors[j] * x[b, i])


def test_it_starts_as_the_plain_model() -> None:
    with torch.inference_mode():
        torch.testing.assert_close(soft_vit()(IMAGES), small_vit()(IMAGES), rtol=1e-4, atol=1e-4)


def test_the_cost_weighs_each_block_by_its_depth() -> None:
    model = soft_vit(price=0.01)
    masses = []
    for i, pool in enumerate(pools(model)):
        r = torch.rand(64, generator=torch.Generator().manual_seed(i))
        set_r(pool, r)
        masses.append(r.sum().item())
    expected = 0.01 * sum((i + 1) * mass for i, mass in enumerate(masses))
    assert extraction_cost(model).item() == pytest.approx(expected, rel=1e-5)


def test_kept_is_the_mass_rounded_up_and_never_rises() -> None:
    model = soft_vit()
    for pool, mass in zip(pools(model), (40.0, 10.2, 12.7, 0.0), strict=True):
        set_r(pool, torch.full((64,), mass / 64))
    assert learned_keep(model) == (40, 11, 11, 0)


@pytest.mark.parametrize("bound", [0.0, 1.0])
def test_a_factor_at_its_bound_can_still_learn(bound: float) -> None:
    pool = SoftExtraction(5, price=0.5, pace=20.0)
    set_r(pool, torch.full((5,), bound))
    pool.cost().backward()
    assert pool.slow.grad is not None
    torch.testing.assert_close(pool.slow.grad, torch.full((5,), 0.5 * 20))


def test_projection_brings_factors_back() -> None:
    model = soft_vit()
    set_r(pools(model)[0], torch.linspace(-1, 2, 64))
    project(model)
    expected = torch.linspace(-1, 2, 64).clamp(0, 1)
    torch.testing.assert_close(20 * pools(model)[0].slow.detach(), expected)


def test_useless_tokens_lose_their_mass_first() -> None:
    """The labels depend on nothing, so every token's price is saved; deeper ones cost more."""
    torch.manual_seed(0)
    model = soft_vit(price=0.01).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        project(model)
        optimizer.zero_grad()
        (model(IMAGES).square().mean() + extraction_cost(model)).backward()
        optimizer.step()
    kept = learned_keep(model)
    assert kept[0] < 64
    assert kept[-1] <= kept[0]


def test_images_of_another_size_are_refused() -> None:
    model = small_vit(dynamic_img_size=True)
    reduce(model, soft_extraction(price=1e-3), keep=1.0, carry=False)
    with pytest.raises(UserError, match="learned for images of 64 patches, this one has 256"):
        model(torch.randn(1, 3, 64, 64))


def test_wrong_prices_and_plain_models_are_refused() -> None:
    with pytest.raises(UserError, match="price=-1"):
        soft_extraction(price=-1)
    with pytest.raises(UserError, match="does not extract softly"):
        extraction_cost(small_vit())
