from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import visualtokens
from visualtokens.errors import UserError
from visualtokens.explain import explain
from visualtokens.explain.features import Features, descriptors
from visualtokens.grouping import record_groupings

from .stubs import (
    MEAN,
    STD,
    FixedMaps,
    OneRegion,
    SoftClusters,
    explain_clusters,
    noise_image,
    one_hot_maps,
    preprocess,
    slow_upsample,
)

PREPROCESS = preprocess(16, 16)


def slow_importance(model: nn.Module, pixels: np.ndarray, tap: str, target: int) -> list[float]:
    """PaCa-ViT, Sec. 3.5, on an image (H, W, 3) from 0 to 1: one cluster and one pixel at a time."""

    def probability(values: np.ndarray) -> Tensor:
        x = torch.tensor((values - MEAN) / STD, dtype=torch.float32).permute(2, 0, 1)
        return model(x[None])[0].softmax(0)[target]

    model.eval()
    out = []
    with torch.no_grad():
        with record_groupings(model) as groupings:
            before = probability(pixels)
        for one in groupings[tap].maps()[0].numpy():
            heat = (one - one.min()) / (one.max() - one.min())
            mask = 1 - slow_upsample(heat, *pixels.shape[:2])
            out.append(float(before - probability(pixels * mask[..., None])))
    return out


@pytest.mark.parametrize(
    ("size", "layer", "tap"), [((16, 16), -1, "taps.1"), ((12, 20), 0, "taps.0"), ((20, 8), 1, "taps.1")]
)
def test_importance_against_the_slow_reference(size: tuple[int, int], layer: int, tap: str) -> None:
    torch.manual_seed(3)
    model = SoftClusters()
    image = noise_image(size[1], size[0])
    got = explain_clusters(model, image, preprocess=preprocess(*size), layer=layer, target=2, batch=2)
    want = slow_importance(model, np.asarray(image) / 255, tap, 2)
    assert got.layer == tap
    assert max(map(abs, want)) > 0.01
    assert got.values.tolist() == pytest.approx(want, abs=1e-5)
    assert got.maps.shape == (5, size[0] // 4, size[1] // 4)


def test_the_cluster_that_the_prediction_depends_on_ranks_first() -> None:
    model = OneRegion(one_hot_maps(), slice(0, 12), slice(12, 24))
    image = Image.new("RGB", (24, 24), "white")
    got = explain_clusters(model, image, preprocess=preprocess(24, 24))
    assert got.predicted == got.target == 1
    assert got.order[0] == 1
    assert got.values[1] > 0.3
    assert got.values[2] < 0.1 * got.values[1]  # the opposite corner
    other = explain_clusters(model, image, preprocess=preprocess(24, 24), target=0)
    assert other.order[-1] == 1
    assert other.values[1] < -0.3
    assert other.saliency().max() == 0  # no cluster supports the class


def test_a_normalised_tensor_is_explained_like_its_image() -> None:
    image = noise_image(24, 16)
    model = OneRegion(one_hot_maps(), slice(0, 8), slice(0, 12))
    from_image = explain_clusters(model, image, preprocess=preprocess(16, 24))
    from_tensor = explain_clusters(model, preprocess(16, 24)(image), preprocess=preprocess(16, 24))
    assert np.array_equal(from_tensor.values, from_image.values)
    assert np.array_equal(np.asarray(from_tensor.image), np.asarray(image))
    assert from_tensor.crop_box == (0, 0, 24, 16)


def test_without_any_effect_the_more_concentrated_cluster_ranks_first() -> None:
    uniform = torch.full((2, 2), 0.25)
    broad = torch.tensor([[0.0, 0.6], [0.4, 0.0]])
    point = torch.tensor([[0.0, 0.0], [0.0, 1.0]])

    class Constant(FixedMaps):
        def score(self, pixels: Tensor) -> Tensor:
            return pixels.new_ones(len(pixels))

    got = explain_clusters(
        Constant(torch.stack((uniform, point, broad))), noise_image(16, 16), preprocess=PREPROCESS
    )
    assert got.order == (1, 2, 0)
    assert got.entropy.tolist() == pytest.approx(
        [math.log(4), 0, -0.6 * math.log(0.6) - 0.4 * math.log(0.4)], abs=1e-6
    )
    assert got.maps[0].max() == 0  # a uniform map masks nothing


def test_batches_stay_within_the_bound() -> None:
    model = FixedMaps(one_hot_maps(4, 5))
    got = explain_clusters(model, noise_image(20, 16), preprocess=preprocess(16, 20), batch=7)
    assert len(got.order) == 20
    assert len(got.top) == 6
    assert model.batches == [1, 1, 7, 7, 6]  # the prediction, the groupings, the clusters


def test_the_model_is_left_unchanged_and_explained_in_eval_mode() -> None:
    torch.manual_seed(0)
    model = SoftClusters().train()
    model.norm.eval()
    before = {name: module.training for name, module in model.named_modules()}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    training = explain_clusters(model, noise_image(16, 16), preprocess=PREPROCESS)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.is_grad_enabled()
    evaluated = explain_clusters(model.eval(), noise_image(16, 16), preprocess=PREPROCESS)
    assert np.array_equal(training.values, evaluated.values)


def test_threads_may_explain_one_model_in_training_mode() -> None:
    torch.manual_seed(1)
    model = SoftClusters()
    images = [noise_image(16, 16, seed=i) for i in range(8)]
    alone = [explain_clusters(model.eval(), image, preprocess=PREPROCESS) for image in images]
    model.train()
    with ThreadPoolExecutor(4) as pool:
        together = list(
            pool.map(lambda i: explain_clusters(model, i, preprocess=PREPROCESS, batch=1), images)
        )
    assert all(module.training for module in model.modules())
    for a, b in zip(alone, together, strict=True):
        assert a.values.tolist() == pytest.approx(b.values.tolist(), abs=1e-6)


def test_the_models_float_type_is_used() -> None:
    torch.manual_seed(0)
    model = SoftClusters()
    full = explain_clusters(model, noise_image(16, 16), preprocess=PREPROCESS)
    half = explain_clusters(model.bfloat16(), noise_image(16, 16), preprocess=PREPROCESS, target=full.target)
    assert half.values.dtype == np.float32
    assert half.values.tolist() == pytest.approx(full.values.tolist(), abs=0.1)


def test_the_default_preprocessing_is_that_of_pretrained_cfg() -> None:
    model = visualtokens.create_model("paca_vit_nano", num_classes=4)
    cfg = model.pretrained_cfg
    got = explain_clusters(model, noise_image(50, 40), classes=["a", "b", "c", "d"])
    assert got.input_size == tuple(cfg["input_size"][1:])
    assert got.probabilities.sum() == pytest.approx(1, abs=1e-5)
    assert got.class_name(2) == "c"
    left, top, right, bottom = got.crop_box
    assert (left + right, top + bottom) == (50, 40)  # the centre
    assert right - left == pytest.approx(40 * cfg["crop_pct"])


SMALL_STVIT = dict(channels=(8, 16, 16, 16), depths=(1, 1, 1, 1), heads=(1, 1, 1, 1))


@pytest.mark.parametrize(
    ("name", "options", "form"),
    [("paca_vit_nano", {}, "soft"), ("stvit_small", SMALL_STVIT, "tessellation")],
)
def test_every_layer_of_a_family(name: str, options: dict, form: str) -> None:
    torch.manual_seed(0)
    model = visualtokens.create_model(name, num_classes=4, **options).eval()
    x = torch.randn(3, 32, 64)
    with torch.no_grad(), record_groupings(model) as groupings:
        probabilities = model(x[None]).softmax(1)[0]
    for layer, (tap, grouping) in enumerate(groupings.items()):
        got = explain_clusters(model, x, layer=layer, batch=64)
        assert (got.layer, got.form) == (tap, form)
        assert got.maps.shape == (grouping.tokens, *grouping.grid)
        assert sorted(got.order) == list(range(grouping.tokens))
        assert np.allclose(got.probabilities, probabilities, atol=1e-5)


def with_config(crop_mode: str) -> nn.Module:
    model = SoftClusters()
    model.pretrained_cfg = {"input_size": (3, 16, 16), "crop_mode": crop_mode}  # type: ignore[assignment]
    return model


class FeatureMap(FixedMaps):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :, None]


class NotFinite(FixedMaps):
    def score(self, pixels: Tensor) -> Tensor:
        return pixels.mean((1, 2, 3)) * math.nan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(layer=2), "layer=2, but SoftClusters made 2 groupings; give -2 to 1"),
        (dict(layer=-3), "layer=-3.*give -2 to 1"),
        (dict(target=3), "target=3.*0 to 2"),
        (dict(target=-1), "target=-1"),
        (dict(truth=3), "truth=3.*0 to 2"),
        (dict(top=0), "top=0"),
        (dict(batch=0), "batch=0"),
        (dict(of="clusters"), "unknown of 'clusters'"),
        (dict(classes=["a", "b"]), "2 class names for a model of 3"),
        (dict(image=noise_image(1, 300)), "1×300 pixels, of which the model sees 1×1"),
        (dict(image="cat.jpg"), "image is a str"),
        (dict(image=torch.rand(1, 3, 8, 8)), r"\(1, 3, 8, 8\)"),
        (dict(image=torch.zeros(3, 8, 8, dtype=torch.uint8)), "uint8"),
        (dict(image=torch.full((3, 8, 8), math.inf)), "not finite"),
        (dict(preprocess=None), "no pretrained_cfg"),
        (dict(model=with_config("squash"), preprocess=None), "'squash'"),
        (
            dict(model=nn.Sequential(nn.Flatten(), nn.Linear(768, 2))),
            r"does not group its patches.*visualtokens\.reduce",
        ),
        (dict(model=FeatureMap(one_hot_maps())), r"shape \(1, 2, 1\)"),
        (dict(model=NotFinite(one_hot_maps())), "not finite"),
        (dict(model=FixedMaps(one_hot_maps() * math.nan)), "clusters of tap are not finite"),
    ],
)
def test_errors_are_one_line_and_restore_the_mode(options: dict, message: str) -> None:
    options = dict(model=SoftClusters(), image=noise_image(16, 16), preprocess=PREPROCESS) | options
    model = options.pop("model").train()
    with pytest.raises(UserError, match=message) as error:
        explain_clusters(model, options.pop("image"), **options)
    assert "\n" not in str(error.value)
    assert all(module.training for module in model.modules())


def test_clusters_that_show_one_place_give_way_to_features() -> None:
    torch.manual_seed(0)
    model = SoftClusters().eval()
    for assign in model.assign:
        nn.init.zeros_(assign.weight)  # type: ignore[arg-type]
    got = explain(model, noise_image(48, 48), preprocess=preprocess(48, 48), regions=6, budget=16, path=0)
    assert got.regions.max() == 5
    assert not got.layer.startswith("taps")


def test_large_feature_maps_are_averaged() -> None:
    values = torch.arange(130 * 140.0).view(130, 140, 1) * torch.tensor([1.0, -2.0])
    got, _ = descriptors([Features("fine", values), Features("finer", values.repeat(2, 2, 1))])
    assert got.shape == (44, 47, 2)  # squares of 3 × 3 cells, because 65 · 70 > MAX_CELLS
