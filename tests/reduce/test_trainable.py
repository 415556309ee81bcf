"""Soft extraction against PoWER-BERT's definition, and ``reduced_vit``: created, saved, loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.reduce.helpers import SMALL, randn, small_vit
from visualtokens.errors import UserError
from visualtokens.grouping import record_groupings
from visualtokens.reduce import Seen, reduce
from visualtokens.reduce.trainable import (
    NAME,
    SoftExtraction,
    extraction_cost,
    extraction_pools,
    learned_keep,
    project,
    soft_extraction,
)

BASE = "deit_tiny_patch16_224"
KEEP = [40, 20, 20, 0]
IMAGES = randn(3, 3, 32, 32, seed=1)


def soft_vit(*, price: float = 1e-3) -> nn.Module:
    return reduce(small_vit(), soft_extraction(price=price), keep=1.0, carry=False)


def set_r(pool: SoftExtraction, r: Tensor) -> None:
    with torch.no_grad():
        pool.slow.copy_(r / pool.pace)


def test_the_jth_most_significant_token_is_multiplied_by_the_jth_factor() -> None:
    pool = SoftExtraction(6, price=1.0, pace=20.0)
    factors = torch.tensor([1.0, 0.9, 0.5, 0.3, 0.1, 0.0])
    set_r(pool, factors)
    x, significance = randn(2, 6, 3), randn(2, 6, seed=1).exp()
    out = pool(x, 6, Seen(significance, None, None, (2, 3), assign=True)).tokens
    for b in range(2):
        ranked = sorted(range(6), key=lambda i: -significance[b, i].item())
        for j, i in enumerate(ranked):
            assert_close(out[b, i], factors[j] * x[b, i])


def test_untrained_factors_leave_the_model_unchanged() -> None:
    with torch.inference_mode():
        assert_close(soft_vit()(IMAGES), small_vit()(IMAGES), rtol=1e-4, atol=1e-4)


def test_cost_weighs_each_block_by_its_depth() -> None:
    model, mass = soft_vit(price=0.01), []
    for i, pool in enumerate(extraction_pools(model)):
        r = torch.linspace(0, 1, 64) ** i
        set_r(pool, r)
        mass.append(r.sum().item())
    expected = 0.01 * sum((i + 1) * m for i, m in enumerate(mass))
    assert extraction_cost(model).item() == pytest.approx(expected, rel=1e-5)


def test_learned_keep_is_the_mass_rounded_up_and_never_rises() -> None:
    model = soft_vit()
    for pool, mass in zip(extraction_pools(model), (40.0, 10.2, 12.7, 0.0), strict=True):
        set_r(pool, torch.full((64,), mass / 64))
    assert learned_keep(model) == (40, 11, 11, 0)


@pytest.mark.parametrize("bound", [0.0, 1.0])
def test_factors_at_a_bound_have_a_gradient(bound: float) -> None:
    pool = SoftExtraction(5, price=0.5, pace=20.0)
    set_r(pool, torch.full((5,), bound))
    pool.cost().backward()
    assert pool.slow.grad is not None
    assert_close(pool.slow.grad, torch.full((5,), 0.5 * 20))


def test_projection_clamps_the_factors() -> None:
    model, r = soft_vit(), torch.linspace(-1, 2, 64)
    pool = extraction_pools(model)[0]
    set_r(pool, r)
    project(model)
    assert_close(pool.pace * pool.slow.detach(), r.clamp(0, 1))


def test_useless_tokens_lose_their_mass() -> None:
    """The labels do not depend on the images, so only the price matters, which grows with depth."""
    model = soft_vit(price=0.01).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(15):
        project(model)
        optimizer.zero_grad()
        (model(IMAGES).square().mean() + extraction_cost(model)).backward()
        optimizer.step()
    kept = learned_keep(model)
    assert kept[-1] <= kept[0] < 64


def test_images_of_another_size_are_refused() -> None:
    model = small_vit(dynamic_img_size=True)
    reduce(model, soft_extraction(price=1e-3), keep=1.0, carry=False)
    with pytest.raises(UserError, match="learned for images of 64 patches, this one has 256"):
        model(torch.randn(1, 3, 64, 64))


def test_wrong_prices_and_plain_models_are_refused() -> None:
    with pytest.raises(UserError, match="price=-1"):
        soft_extraction(price=-1)
    with pytest.raises(UserError, match="has no soft extraction"):
        extraction_cost(small_vit())


def test_reduced_vit_is_its_base_with_the_reduction() -> None:
    base = small_vit()
    model = timm.create_model(NAME, base=BASE, method="kmedoids", keep=KEEP, **SMALL).eval()
    model.load_state_dict(base.state_dict())
    reduce(base, "kmedoids", keep=KEEP, carry=False)
    with torch.inference_mode():
        assert torch.equal(model(IMAGES), base(IMAGES))


def test_timm_saves_and_loads_reduced_vit(tmp_path: Path) -> None:
    args = SMALL | dict(base=BASE, method="merge", keep=KEEP)
    model = timm.create_model(NAME, **args).eval()
    timm.models.save_for_hf(model, tmp_path, model_args=args, safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert loaded.reduction == model.reduction
    with torch.inference_mode():
        assert torch.equal(loaded(IMAGES), model(IMAGES))


def test_reduced_vit_has_the_preprocessing_of_its_base() -> None:
    base = "vit_tiny_patch16_224"
    model = timm.create_model(NAME, base=base, keep=0.5, **SMALL)
    assert model.pretrained_cfg["mean"] == timm.get_pretrained_cfg(base).mean == (0.5, 0.5, 0.5)
    assert model.pretrained_cfg["architecture"] == NAME
    assert model.pretrained_cfg["classifier"] == "head"


def test_reduced_vit_for_another_image_size() -> None:
    model = timm.create_model(NAME, base=BASE, keep=0.25, **(SMALL | dict(img_size=(16, 24)))).eval()
    assert timm.data.resolve_model_data_config(model)["input_size"] == (3, 16, 24)
    assert model.reduction.schedule.tokens(model.patch_embed.num_patches)[-1] == 6  # of 4×6 patches
    model.set_input_size(img_size=32)
    with torch.inference_mode(), record_groupings(model) as groupings:
        model(randn(2, 3, 32, 32))
    assert [grouping.tokens for grouping in groupings.values()][-1] == 16  # of 8×8


def test_features_of_reduced_vit_have_every_patch() -> None:
    model = timm.create_model(NAME, base=BASE, keep=KEEP, features_only=True, **SMALL)
    assert [m.shape for m in model(IMAGES)] == [(3, 24, 8, 8)] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(base="deit_tinny"), "unknown base 'deit_tinny'"),
        (dict(method="kmedoid"), "unknown method 'kmedoid'; did you mean 'kmedoids'"),
        (dict(method="soft"), "price=None with method='soft'"),
        (dict(method="merge", price=0.1), "price=0.1 with method='merge'"),
        (dict(img_size=(32, 3)), r"img_size=\(32, 3\) is less than a patch; give at least 4"),
    ],
)
def test_wrong_options_of_reduced_vit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        timm.create_model(NAME, **({"base": BASE, "keep": KEEP} | SMALL | options))
