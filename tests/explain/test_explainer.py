from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import visualtokens
from visualtokens.errors import UserError
from visualtokens.explain import Explanation, explain
from visualtokens.grouping import record_groupings

from .stubs import MEAN, STD, FixedMaps, Learned, OneRegion, preprocess, quarters, upsample


def picture(width: int, height: int, *, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(60, 256, (height, width, 3), dtype=np.uint8))


def slow_importance(model: nn.Module, pixels: np.ndarray, layer: str, target: int) -> list[float]:
    """Sec. 3.5 word by word on an image (H, W, 3) from 0 to 1, one cluster and one pixel at a time."""

    def ask(values: np.ndarray) -> Tensor:
        x = torch.tensor((values - MEAN) / STD, dtype=torch.float32).permute(2, 0, 1)
        return model(x[None])[0].softmax(0)[target]

    model.eval()
    out = []
    with torch.no_grad():
        with record_groupings(model) as groupings:
            before = ask(pixels)
        for one in groupings[layer].maps()[0].numpy():
            heat = (one - one.min()) / (one.max() - one.min())
            mask = 1 - upsample(heat, *pixels.shape[:2])
            out.append(float(before - ask(pixels * mask[..., None])))
    return out


@pytest.mark.parametrize("size", [(16, 16), (12, 20), (20, 8)])
@pytest.mark.parametrize(("layer", "name"), [(-1, "taps.1"), (0, "taps.0")])
def test_importance_against_the_slow_reference(size: tuple[int, int], layer: int, name: str) -> None:
    torch.manual_seed(3)
    model = Learned()
    image = picture(size[1], size[0])
    got = explain(model, image, preprocess=preprocess(*size), layer=layer, target=2, batch=2)
    want = slow_importance(model, np.asarray(image) / 255, name, 2)
    assert got.layer == name
    assert max(map(abs, want)) > 0.01
    assert got.importance.tolist() == pytest.approx(want, abs=1e-5)
    assert got.maps.shape == (5, size[0] // 4, size[1] // 4)


@pytest.mark.parametrize("cell", range(4))
def test_the_cluster_that_the_decision_depends_on_comes_first(cell: int) -> None:
    rows, columns = ((slice(0, 12), slice(12, 24))[i] for i in divmod(cell, 2))
    model = OneRegion(quarters(), rows, columns)
    got = explain(model, Image.new("RGB", (24, 24), "white"), preprocess=preprocess(24, 24))
    assert got.predicted == got.target == 1
    assert got.order[0] == cell
    assert got.importance[cell] > 0.3
    opposite = 3 - cell  # its map only reaches the region through the blur between the cells
    assert got.importance[opposite] < 0.1 * got.importance[cell]


def test_a_cluster_that_speaks_against_the_class_has_negative_importance() -> None:
    model = OneRegion(quarters(), slice(0, 12), slice(0, 12))
    got = explain(model, Image.new("RGB", (24, 24), "white"), preprocess=preprocess(24, 24), target=0)
    assert not got.target_is_prediction
    assert got.order[-1] == 0
    assert got.importance[0] < -0.3


def test_a_tensor_is_explained_as_the_image_it_was_made_of() -> None:
    image, prepare = picture(24, 16), preprocess(16, 24)
    model = OneRegion(quarters(), slice(0, 8), slice(0, 12))
    from_image = explain(model, image, preprocess=prepare)
    from_tensor = explain(model, prepare(image), preprocess=prepare)
    assert np.array_equal(from_tensor.importance, from_image.importance)
    assert np.array_equal(np.asarray(from_tensor.image), np.asarray(image))
    assert from_tensor.crop_box == (0, 0, 24, 16)


def test_near_ties_go_to_the_more_concentrated_cluster() -> None:
    """The decision is blind to the image, so every cluster has the same effect: none."""
    spread_out = torch.tensor([[0.4, 0.3], [0.2, 0.1]])
    middling = torch.tensor([[0.0, 0.6], [0.4, 0.0]])
    point = torch.tensor([[0.0, 0.0], [0.0, 1.0]])

    class Blind(FixedMaps):
        def score(self, picture: Tensor) -> Tensor:
            return picture.new_ones(len(picture))

    model = Blind(torch.stack((spread_out, point, middling)))
    got = explain(model, picture(8, 8), preprocess=preprocess(8, 8))
    assert got.order == (1, 2, 0)
    assert got.entropy[1] == 0


def test_a_constant_map_is_zero_and_costs_nothing() -> None:
    maps = torch.stack((torch.full((2, 2), 0.25), quarters()[0]))
    got = explain(FixedMaps(maps), picture(8, 8), preprocess=preprocess(8, 8))
    assert got.maps[0].max() == 0
    assert got.importance[0] == pytest.approx(0, abs=1e-6)
    assert got.importance[1] > 0.01
    assert got.entropy[0] == pytest.approx(math.log(4))


def test_one_cluster() -> None:
    got = explain(FixedMaps(quarters()[1:2]), picture(8, 8), preprocess=preprocess(8, 8), top=6)
    assert got.order == got.top == (0,)
    assert got.importance.shape == (1,)


def test_batches_stay_within_the_bound_for_many_clusters() -> None:
    model = FixedMaps(quarters(20, 30))
    got = explain(model, picture(60, 40), preprocess=preprocess(40, 60), batch=7, top=6)
    assert len(got.order) == 600
    assert len(got.top) == 6
    assert max(model.batches) == 7
    assert sum(model.batches) == 601


def test_the_batch_size_does_not_change_the_answer() -> None:
    torch.manual_seed(0)
    model = Learned(clusters=6)
    one, many = (explain(model, picture(16, 16), preprocess=preprocess(16, 16), batch=b) for b in (1, 6))
    assert one.importance.tolist() == pytest.approx(many.importance.tolist(), abs=1e-6)


def test_the_model_is_left_as_it_was() -> None:
    model = Learned()
    model.train()
    model.norm.eval()
    before = {name: module.training for name, module in model.named_modules()}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    explain(model, picture(16, 16), preprocess=preprocess(16, 16))
    assert {name: module.training for name, module in model.named_modules()} == before
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.is_grad_enabled()


def test_a_model_in_training_is_explained_as_in_evaluation() -> None:
    model = FixedMaps(quarters())  # with dropout
    evaluated = explain(model.eval(), picture(8, 8), preprocess=preprocess(8, 8))
    training = explain(model.train(), picture(8, 8), preprocess=preprocess(8, 8))
    assert np.array_equal(training.importance, evaluated.importance)


def test_flags_come_back_after_an_error() -> None:
    model = Learned().train()
    model.norm.eval()
    with pytest.raises(UserError, match="layer=2"):
        explain(model, picture(16, 16), preprocess=preprocess(16, 16), layer=2)
    assert model.training
    assert model.taps[0].training
    assert not model.norm.training


def test_threads_may_explain_one_model_in_training() -> None:
    torch.manual_seed(1)
    model = Learned()
    images = [picture(16, 16, seed=i) for i in range(12)]
    alone = [explain(model.eval(), image, preprocess=preprocess(16, 16)) for image in images]
    model.train()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda i: explain(model, i, preprocess=preprocess(16, 16), batch=1), images))
    assert all(module.training for module in model.modules())
    for a, b in zip(alone, together, strict=True):
        assert a.importance.tolist() == pytest.approx(b.importance.tolist(), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_models_own_float_type_is_used(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Learned()
    full = explain(model, picture(16, 16), preprocess=preprocess(16, 16))
    got = explain(model.to(dtype), picture(16, 16), preprocess=preprocess(16, 16), target=full.target)
    assert got.importance.dtype == np.float32
    assert got.importance.tolist() == pytest.approx(full.importance.tolist(), abs=0.1)


def test_the_models_own_configuration_prepares_the_image() -> None:
    model = visualtokens.create_model("paca_vit_nano", num_classes=4)
    cfg = model.pretrained_cfg
    got = explain(model, picture(50, 40))
    assert got.input_size == tuple(cfg["input_size"][1:])
    assert got.probabilities.shape == (4,)
    assert got.probabilities.sum() == pytest.approx(1, abs=1e-5)
    left, top, right, bottom = got.crop_box
    assert (left + right, top + bottom) == (50, 40)  # the centre
    assert right - left == pytest.approx(40 * cfg["crop_pct"])


def test_a_real_model_on_a_tensor_that_is_not_square() -> None:
    model = visualtokens.create_model("paca_vit_nano", num_classes=4)
    x = torch.rand(3, 40, 64)
    with record_groupings(model) as groupings:
        model(x[None])
    for layer, (name, grouping) in enumerate(groupings.items()):
        got = explain(model, x, layer=layer)
        assert got.layer == name
        assert got.maps.shape == (grouping.tokens, *grouping.grid)
        assert sorted(got.order) == list(range(grouping.tokens))


def no_configuration(mode: str) -> nn.Module:
    model = Learned()
    model.pretrained_cfg = {"input_size": (3, 16, 16), "crop_mode": mode}  # type: ignore[assignment]
    return model


class Features(FixedMaps):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :, None]


class Broken(FixedMaps):
    def score(self, picture: Tensor) -> Tensor:
        return picture.mean((1, 2, 3)) * math.nan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(layer=2), "layer=2, but Learned made 2 groupings; give -2 to 1"),
        (dict(layer=-3), "layer=-3.*give -2 to 1"),
        (dict(target=3), "target=3.*0 to 2"),
        (dict(target=-1), "target=-1"),
        (dict(truth=3), "truth=3.*0 to 2"),
        (dict(top=0), "top=0"),
        (dict(image=picture(1, 1)), "1×1 pixels, of which the model sees 1×1"),
        (dict(image=picture(1, 300)), "1×300 pixels, of which the model sees 1×1"),
        (dict(batch=0), "batch=0"),
        (dict(classes=["a", "b"]), "2 class names for a model of 3"),
        (dict(image="cat.jpg"), "image is a str"),
        (dict(image=torch.rand(1, 3, 8, 8)), r"\(1, 3, 8, 8\)"),
        (dict(image=torch.zeros(3, 8, 8, dtype=torch.uint8)), "uint8"),
        (dict(image=torch.full((3, 8, 8), math.inf)), "not finite"),
        (dict(preprocess=None), "no pretrained_cfg"),
        (dict(model=no_configuration("squash"), preprocess=None), "'squash'"),
        (dict(model=nn.Sequential(nn.Flatten(), nn.Linear(768, 2))), "does not group its patches"),
        (dict(model=Features(quarters())), r"shape \(1, 2, 1\)"),
        (dict(model=Broken(quarters())), "not finite"),
        (dict(model=FixedMaps(quarters() * math.nan)), "clusters of tap are not finite"),
    ],
)
def test_errors_say_what_is_wrong_in_one_line(options: dict, message: str) -> None:
    options = dict(model=Learned(), image=picture(16, 16), preprocess=preprocess(16, 16)) | options
    with pytest.raises(UserError, match=message) as error:
        explain(options.pop("model"), options.pop("image"), **options)
    assert "\n" not in str(error.value)


def test_masks_reach_the_input_through_half_pixel_upsampling() -> None:
    """What the model is shown is black exactly where the interpolated map is 1."""
    seen: list[Tensor] = []

    class Watching(FixedMaps):
        def score(self, picture: Tensor) -> Tensor:
            seen.append(picture)
            return super().score(picture)

    model = Watching(quarters(2, 3))
    explain(model, Image.new("RGB", (18, 12), "white"), preprocess=preprocess(12, 18))
    heat = F.interpolate(quarters(2, 3)[:, None], (12, 18), mode="bilinear", align_corners=False)
    assert torch.allclose(seen[1][:, 0], 1 - heat[:, 0], atol=1e-5)
    assert float(seen[1][0, :, :3, :3].abs().max()) < 1e-5


def test_explanation_has_the_given_class_names() -> None:
    got = explain(Learned(), picture(16, 16), preprocess=preprocess(16, 16), classes=["a", "b", "c"])
    assert isinstance(got, Explanation)
    assert got.class_name(2) == "c"
    assert got.target_is_prediction
