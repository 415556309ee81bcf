"""VT-ResNet: published sizes, every ablation and feature maps."""

from __future__ import annotations

import itertools

import pytest
import timm
import torch
from torch import nn

import visualtokens
from visualtokens import record_groupings
from visualtokens.bench import count_macs, count_parameters
from visualtokens.errors import UserError
from visualtokens.layers.tokenizers import Centroids
from visualtokens.papers.counting import macs_without, pixel_macs

from ..ops.helpers import LargestTensor

SMALL = dict(width=0.25, stem="small", num_classes=5)

# Million multiply-adds at 224×224, million parameters. tests/papers compares all published figures.
FIGURES = [
    (18, {}, 1579.0, 11.672),
    (18, dict(tokenizer="pool"), 1577.3, 11.668),
    (18, dict(recurrent=False), 1557.7, 11.087),
    (18, dict(mixer="none"), 1527.8, 8.514),
    (18, dict(mixer="graphconv"), 1528.4, 8.515),
    (18, dict(tokens=32), 1711.0, 11.676),
    (18, dict(projector=False), 1494.0, 9.335),
    (34, {}, 3299.0, 21.894),
    (50, {}, 3582.5, 21.370),
]


def on_meta(depth: int, **options: object) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(f"vt_resnet{depth}", **options)


def small(depth: int = 18, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(f"vt_resnet{depth}", **(SMALL | options))


@pytest.mark.parametrize(("depth", "options", "mmacs", "mparams"), FIGURES)
def test_multiply_adds_and_parameters(
    depth: int, options: dict[str, object], mmacs: float, mparams: float
) -> None:
    model = on_meta(depth, **options)
    assert count_macs(model, (224, 224)) / 1e6 == pytest.approx(mmacs, abs=0.06)
    assert count_parameters(model) / 1e6 == pytest.approx(mparams, abs=0.0006)


def test_multiply_adds_of_clustering_without_and_with_k_means() -> None:
    model = on_meta(18, tokenizer="cluster")
    assert macs_without(model, (224, 224), Centroids) / 1e6 == pytest.approx(1579.0, abs=0.06)
    assert count_macs(model, (224, 224)) / 1e6 == pytest.approx(1579.0 + 4.8, abs=0.1)


def test_multiply_adds_without_token_convolutions() -> None:
    assert pixel_macs(on_meta(50), (224, 224)) / 1e6 == pytest.approx(3402.1, abs=0.06)


def test_residual_branches_start_as_the_identity() -> None:
    zero = {
        name
        for name, module in small().vt.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.weight.any()
    }
    transformer = {"mixer.norm", "mixer.ffn2.norm"}
    expected = {f"blocks.{i}.{name}" for i in (0, 1) for name in transformer} | {"blocks.0.projector.norm"}
    assert zero == expected


# Each tokenizer with each mixer, and each pair of the two switches with several of them.
ABLATIONS = [
    (tokenizer, mixer, *switches)
    for (tokenizer, mixer), switches in zip(
        itertools.product(("filter", "cluster", "pool"), ("transformer", "graphconv", "none")),
        itertools.cycle(itertools.product((True, False), (True, False))),
        strict=False,
    )
]


@pytest.mark.parametrize(("tokenizer", "mixer", "recurrent", "projector"), ABLATIONS)
def test_every_ablation_trains(tokenizer: str, mixer: str, recurrent: bool, projector: bool) -> None:
    model = small(
        tokenizer=tokenizer, mixer=mixer, recurrent=recurrent, projector=projector, tokens=7
    ).train()
    x = torch.randn(2, 3, 32, 24)
    tokens = model.forward_features(x)
    assert tokens.shape == (2, 7, 256)
    model.forward_head(tokens).square().sum().backward()
    bad = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert bad == []


@pytest.mark.parametrize("tokenizer", ["cluster", "pool"])
def test_other_tokenizers_compile_as_one_graph(tokenizer: str) -> None:
    torch._dynamo.reset()
    model = small(tokenizer=tokenizer, depths=(1, 1, 1, 2)).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-5)


@pytest.mark.parametrize("tokenizer", ["filter", "cluster", "pool"])
def test_number_of_tokens_does_not_depend_on_the_image(tokenizer: str) -> None:
    model = small(stem="imagenet", tokenizer=tokenizer).eval()
    with torch.inference_mode():
        for size in [(33, 33), (97, 211), (320, 224)]:
            tokens = model.forward_features(torch.randn(1, 3, *size))
            assert tokens.shape == (1, 16, 256)
            assert tokens.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vt_resnet18", "vt_resnet50"])
def test_images_of_detection(name: str) -> None:
    model = timm.create_model(name, num_classes=0, global_pool="").eval()
    with torch.inference_mode(), record_groupings(model) as groupings:
        assert model(torch.randn(1, 3, 800, 1216)).isfinite().all()
    assert all(g.grid == (50, 76) for g in groupings.values())


def test_memory_is_linear_in_the_pixels() -> None:
    stage, largest = small(34).eval().vt, []
    for size in (32, 64):
        with torch.no_grad(), LargestTensor() as recorder:
            stage(torch.randn(1, 64, size, size))
        largest.append(recorder.numel)
    assert largest == [128 * 32 * 32, 128 * 64 * 64]


def test_groupings_of_tokenizers_and_projectors() -> None:
    model = small(34).eval()
    with torch.no_grad(), record_groupings(model) as groupings:
        model(torch.randn(2, 3, 32, 48))
    assert list(groupings) == [
        "vt.blocks.0.tokenizer.tap",
        "vt.blocks.0.projector.tap",
        "vt.blocks.1.tokenizer.tap",
        "vt.blocks.1.projector.tap",
        "vt.blocks.2.tokenizer.tap",
    ]
    for name, grouping in groupings.items():
        assert grouping.maps().shape == (2, 16, 8, 12)
        over = 1 if "tokenizer" in name else 2
        assert torch.allclose(grouping.weights.sum(over), torch.ones(()), atol=1e-5)


def test_explains_a_prediction() -> None:
    explanation = visualtokens.explain(small().eval(), torch.randn(3, 32, 32), method="cluster", target=2)
    assert explanation.layer == "vt.blocks.1.tokenizer.tap"
    assert explanation.maps.shape == (16, 8, 8)


def test_channels_and_strides_of_the_maps() -> None:
    with torch.device("meta"):
        maps, theirs = (timm.create_model(n, features_only=True) for n in ("vt_resnet18", "resnet18"))
    assert maps.feature_info.channels() == [64, 64, 128, 256, 512]
    assert maps.feature_info.reduction() == [2, 4, 8, 16, 16]
    assert maps.feature_info.channels()[:4] == theirs.feature_info.channels()[:4]


def test_output_stride_averages_the_last_map() -> None:
    plain, coarse = small(34).eval(), small(34, output_stride=8).eval()  # the small stem: layer3 has stride 4
    x = torch.randn(2, 3, 32, 52)
    with torch.no_grad():
        _, maps = plain.forward_intermediates(x)
        tokens, coarser = coarse.forward_intermediates(x)
        assert torch.equal(coarse(x), plain(x))
        assert torch.equal(tokens, plain.forward_features(x))
    assert all(torch.equal(a, b) for a, b in zip(maps[:-1], coarser[:-1], strict=True))
    rows, columns = maps[-1].shape[2:]
    assert (rows, columns) == (8, 13)
    for i in range(4):
        for j in range(7):  # the last column has one pixel
            cell = maps[-1][:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            assert torch.allclose(coarser[-1][:, :, i, j], cell.mean((2, 3)), atol=1e-6)
    assert [info["reduction"] for info in coarse.feature_info] == [1, 1, 2, 4, 8]
    assert [info["reduction"] for info in small(34, output_stride=4).feature_info] == [1, 1, 2, 4, 4]
    with pytest.raises(UserError, match="output_stride=16; the last map has stride 4 or 8"):
        small(34, output_stride=16)


def test_every_parameter_of_features_only_gets_a_gradient() -> None:
    maps = small(34, features_only=True).train()
    sum(m.square().sum() for m in maps(torch.randn(2, 3, 32, 32))).backward()
    assert [n for n, p in maps.named_parameters() if p.grad is None] == []


def test_last_map_is_that_of_the_last_projector() -> None:
    model, x = small(34).eval(), torch.randn(2, 3, 32, 32)
    outputs = []
    model.vt.blocks[1].projector.register_forward_hook(lambda module, inputs, out: outputs.append(out))
    with torch.no_grad():
        tokens, maps = model.forward_intermediates(x)
        assert torch.equal(maps[-1], outputs[0])
        assert torch.allclose(tokens, model.forward_features(x), atol=1e-6)
        pruned = small(34, features_only=True).eval()
        pruned.load_state_dict({f"model.{k}": v for k, v in model.state_dict().items()}, strict=False)
        assert torch.allclose(pruned(x)[-1], maps[-1], atol=1e-6)


def test_without_projector_the_last_map_is_that_of_layer3() -> None:
    model = small(34, projector=False).eval()
    with torch.no_grad():
        _, maps = model.forward_intermediates(torch.randn(1, 3, 32, 32))
    assert torch.equal(maps[-1], maps[-2])
    assert [info["num_chs"] for info in model.feature_info[-2:]] == [64, 64]


def test_pruning_keeps_the_layers_that_are_needed() -> None:
    model, x = small(34).eval(), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        assert model.prune_intermediate_layers([4], prune_head=False) == [4]
        assert torch.allclose(model(x), expected, atol=1e-6)
        model.prune_intermediate_layers([2])
        assert not hasattr(model, "layer3")
        assert model.vt is None
        assert torch.allclose(model(x), model.forward_intermediates(x, [2])[1][0], atol=1e-6)


def test_small_stem_and_width() -> None:
    model = small(50)
    assert [info["reduction"] for info in model.feature_info] == [1, 1, 2, 4, 4]
    assert [info["num_chs"] for info in model.feature_info] == [16, 64, 128, 256, 256]
    assert model.num_features == 256
    narrow = timm.create_model("vt_resnet18", width=0.3)  # channels are rounded to multiples of 8
    assert narrow.eval()(torch.randn(1, 3, 64, 64)).shape == (1, 1000)


def test_drop_path_increases_over_blocks_and_modules() -> None:
    model = small(drop_path_rate=0.7)
    rates = [getattr(b.drop_path, "drop_prob", 0.0) for n in model.layers for b in getattr(model, n)]
    rates += [block.mixer.drop_path.drop_prob for block in model.vt.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    assert model.train()(torch.randn(2, 3, 32, 32)).isfinite().all()


def test_each_token_is_classified_without_pooling() -> None:
    model = small(global_pool="").eval()
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 16, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tokenizer="filters"), "unknown tokenizer 'filters'; did you mean 'filter'?"),
        (dict(mixer="graph"), "unknown mixer 'graph'; did you mean 'graphconv'?"),
        (dict(stem="tiny"), "unknown stem 'tiny'; choose from imagenet, small"),
        (dict(block="wide"), "unknown block 'wide'"),
        (dict(tokens=0), "tokens=0; give at least 1"),
        (dict(width=0.0), "width=0.0; give a factor above 0"),
        (dict(depths=(2, 2, 2, 0)), "a stage of 0 VT modules"),
        (dict(global_pool="max"), "global_pool='max' is neither"),
        (dict(groups=3), "groups=3 does not divide"),
    ],
)
def test_invalid_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as error:
        timm.create_model("vt_resnet18", **options)
    assert message in str(error.value)


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'token'"):
        timm.create_model("vt_resnet18", token=8)
