"""VT-ResNet: the published sizes, every ablation, ResNet weights to start from, and images of any size."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path

import huggingface_hub.constants
import pytest
import safetensors.torch
import timm
import torch
import torchvision
from torch import nn

import visualtokens
from visualtokens import record_groupings
from visualtokens.bench import count_macs, count_parameters
from visualtokens.errors import UserError
from visualtokens.layers.tokenizers import Centroids
from visualtokens.models.vt_resnet import STAGES
from visualtokens.papers.models import macs_without, pixel_macs

from ..ops.helpers import LargestTensor

SMALL = dict(width=0.25, stem="small", num_classes=5)

# Million multiply-adds at 224×224, million parameters (None where not known beforehand).
FIGURES = [
    (18, {}, 1579.0, 11.672),
    (18, dict(tokenizer="pool"), 1577.3, 11.668),
    (18, dict(tokenizer="pool", recurrent=False), 1552.9, None),
    (18, dict(recurrent=False), 1557.7, 11.087),
    (18, dict(mixer="none"), 1527.8, 8.514),
    (18, dict(mixer="graphconv"), 1528.4, 8.515),
    (18, dict(tokens=32), 1711.0, 11.676),
    (18, dict(tokens=64), 1979.7, 11.685),
    (18, dict(projector=False), 1494.0, 9.335),
    (34, {}, 3299.0, 21.894),
    (34, dict(tokenizer="pool"), 3297.4, None),
    (34, dict(tokenizer="pool", recurrent=False), 3248.5, None),
    (34, dict(mixer="none"), 3222.3, None),
    (34, dict(mixer="graphconv"), 3223.1, None),
    (34, dict(tokens=32), 3514.1, None),
    (34, dict(tokens=64), 3951.5, None),
    (34, dict(projector=False), 3154.8, None),
    (50, {}, 3582.5, 21.370),
    (101, {}, 7294.7, 40.362),
]


def on_meta(depth: int, **options: object) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(f"vt_resnet{depth}", **options)


def small(depth: int = 18, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(f"vt_resnet{depth}", **(SMALL | options))


@pytest.mark.parametrize(("depth", "options", "mmacs", "mparams"), FIGURES)
def test_multiply_adds_and_parameters(
    depth: int, options: dict[str, object], mmacs: float, mparams: float | None
) -> None:
    model = on_meta(depth, **options)
    assert count_macs(model, (224, 224)) / 1e6 == pytest.approx(mmacs, abs=0.06)
    if mparams is not None:
        assert count_parameters(model) / 1e6 == pytest.approx(mparams, abs=0.0006)


@pytest.mark.parametrize(("depth", "mmacs", "kmeans"), [(18, 1579.0, 4.8), (34, 3299.0, 4.8)])
def test_clustering_costs_as_much_as_filters_and_k_means_on_top(
    depth: int, mmacs: float, kmeans: float
) -> None:
    model = on_meta(depth, tokenizer="cluster")
    assert macs_without(model, (224, 224), Centroids) / 1e6 == pytest.approx(mmacs, abs=0.06)
    assert count_macs(model, (224, 224)) / 1e6 == pytest.approx(mmacs + kmeans, abs=0.1)


@pytest.mark.parametrize(("depth", "mmacs"), [(50, 3402.1), (101, 7114.4)])
def test_multiply_adds_without_those_of_token_convolutions(depth: int, mmacs: float) -> None:
    assert pixel_macs(on_meta(depth), (224, 224)) / 1e6 == pytest.approx(mmacs, abs=0.06)


@pytest.mark.parametrize(("depth", "mparams"), [(18, 11.64), (34, 21.84)])
def test_parameters_without_batch_norm(depth: int, mparams: float) -> None:
    model = on_meta(depth)
    norms = sum(
        count_parameters(m) for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
    )
    assert (count_parameters(model) - norms) / 1e6 == pytest.approx(mparams, abs=0.006)


def test_batch_norms_that_start_at_zero() -> None:
    zero = {
        name
        for name, module in timm.create_model("vt_resnet18").vt.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.weight.any()
    }
    transformer = {"mixer.norm", "mixer.ffn2.norm"}
    expected = {f"blocks.{i}.{name}" for i in (0, 1) for name in transformer} | {"blocks.0.projector.norm"}
    assert zero == expected


@pytest.mark.parametrize("depth", [18, 50])
def test_stages_start_like_those_of_timm(depth: int) -> None:
    ours, theirs = timm.create_model(f"vt_resnet{depth}"), timm.create_model(f"resnet{depth}")
    for name in stage_weights(dict(theirs.named_parameters())):
        a, b = ours.get_parameter(name).detach(), theirs.get_parameter(name).detach()
        assert float(a.std(correction=0)) == pytest.approx(float(b.std(correction=0)), rel=0.1), name
        assert float(a.mean()) == pytest.approx(float(b.mean()), abs=0.02), name


@pytest.mark.parametrize(
    ("tokenizer", "mixer", "recurrent", "projector"),
    list(
        itertools.product(
            ("filter", "cluster", "pool"), ("transformer", "graphconv", "none"), (True, False), (True, False)
        )
    ),
)
def test_every_ablation_trains(tokenizer: str, mixer: str, recurrent: bool, projector: bool) -> None:
    model = small(
        tokenizer=tokenizer, mixer=mixer, recurrent=recurrent, projector=projector, tokens=7
    ).train()
    x = torch.randn(2, 3, 32, 24)
    model(x).square().sum().backward()
    bad = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert bad == []
    assert model.forward_tokens(x).shape == (2, 7, 256)


@pytest.mark.parametrize("tokenizer", ["cluster", "pool"])
def test_the_other_tokenizers_compile_as_one_graph(tokenizer: str) -> None:
    torch._dynamo.reset()
    model = small(tokenizer=tokenizer).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-5)


@pytest.mark.parametrize("size", [(33, 33), (97, 211), (160, 160), (224, 320), (320, 224)])
@pytest.mark.parametrize("tokenizer", ["filter", "cluster", "pool"])
def test_as_many_tokens_whatever_the_image(size: tuple[int, int], tokenizer: str) -> None:
    model = small(depth=50, stem="imagenet", tokenizer=tokenizer).eval()
    with torch.inference_mode():
        tokens = model.forward_tokens(torch.randn(1, 3, *size))
        assert tokens.shape == (1, 16, 256)
        assert tokens.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vt_resnet18", "vt_resnet50"])
def test_detection_sized_images(name: str) -> None:
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
    explanation = visualtokens.explain(small().eval(), torch.randn(3, 32, 32), target=2)
    assert explanation.layer == "vt.blocks.1.tokenizer.tap"
    assert explanation.maps.shape == (16, 8, 8)


def test_features_are_those_of_a_resnet_but_the_last() -> None:
    maps = timm.create_model("vt_resnet18", features_only=True)
    theirs = timm.create_model("resnet18", features_only=True)
    assert maps.feature_info.channels() == [64, 64, 128, 256, 512]
    assert maps.feature_info.reduction() == [2, 4, 8, 16, 16]
    assert maps.feature_info.channels()[:4] == theirs.feature_info.channels()[:4]


def test_features_train_every_parameter_they_have() -> None:
    maps = small(34, features_only=True).train()
    sum(m.square().sum() for m in maps(torch.randn(2, 3, 32, 32))).backward()
    assert [n for n, p in maps.named_parameters() if p.grad is None] == []


def test_refined_map_is_that_of_the_last_projector() -> None:
    model, x = small(34).eval(), torch.randn(2, 3, 32, 32)
    seen = []
    model.vt.blocks[1].projector.register_forward_hook(lambda module, inputs, out: seen.append(out))
    with torch.no_grad():
        tokens, maps = model.forward_intermediates(x)
        assert torch.equal(maps[-1], seen[0])
        assert torch.equal(tokens, model.forward_tokens(x))
        pruned = small(34, features_only=True).eval()
        pruned.load_state_dict({f"model.{k}": v for k, v in model.state_dict().items()}, strict=False)
        assert torch.equal(pruned(x)[-1], maps[-1])


def test_without_projector_the_last_map_is_that_of_layer3() -> None:
    model = small(34, projector=False).eval()
    with torch.no_grad():
        _, maps = model.forward_intermediates(torch.randn(1, 3, 32, 32))
    assert torch.equal(maps[-1], maps[-2])
    assert [info["num_chs"] for info in model.feature_info[-2:]] == [64, 64]


def test_pruning_keeps_what_the_head_reads() -> None:
    model, x = small(34).eval(), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        assert model.prune_intermediate_layers([4], prune_head=False) == [4]
        assert torch.equal(model(x), expected)
        model.prune_intermediate_layers([2])
        assert not hasattr(model, "layer3")
        assert model.vt is None
        assert torch.equal(model(x), model.forward_intermediates(x, [2])[1][0])


def test_small_stem_and_width() -> None:
    model = small(50)
    assert [info["reduction"] for info in model.feature_info] == [1, 1, 2, 4, 4]
    assert [info["num_chs"] for info in model.feature_info] == [16, 64, 128, 256, 256]
    assert model.num_features == 256
    narrow = timm.create_model("vt_resnet18", width=0.3)  # no channel count is a quarter of anything
    assert narrow.eval()(torch.randn(1, 3, 64, 64)).shape == (1, 1000)


def test_drop_path_grows_over_blocks_and_modules() -> None:
    model = small(drop_path_rate=0.7)
    rates = [getattr(b.drop_path, "drop_prob", 0.0) for n in model.layers for b in getattr(model, n)]
    rates += [block.mixer.drop_path.drop_prob for block in model.vt.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    assert model.train()(torch.randn(2, 3, 32, 32)).isfinite().all()


def test_tokens_without_pooling_are_classified_each() -> None:
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
def test_options_that_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as error:
        timm.create_model("vt_resnet18", **options)
    assert message in str(error.value)


def stage_weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in state.items() if k.partition(".")[0] in STAGES}


def resnet(library: str, name: str) -> nn.Module:
    torch.manual_seed(7)
    model = timm.create_model(name) if library == "timm" else torchvision.models.get_model(name)
    for module in model.modules():  # as if trained: nothing is at its start
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.eval()


@pytest.mark.parametrize("depth", [18, 34, 50, 101])
@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_stages_have_the_names_of_resnets(depth: int, library: str) -> None:
    with torch.device("meta"):
        theirs = stage_weights(resnet(library, f"resnet{depth}").state_dict())
    ours = stage_weights(on_meta(depth).state_dict())
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}


@pytest.mark.parametrize("library", ["timm", "torchvision"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("depth", [18, 50])
def test_starts_from_a_checkpoint(tmp_path: Path, library: str, suffix: str, depth: int) -> None:
    source, path = resnet(library, f"resnet{depth}"), tmp_path / f"resnet{suffix}"
    if suffix == ".pth":
        torch.save(source.state_dict(), path)
    else:
        safetensors.torch.save_file(source.state_dict(), path)
    model = timm.create_model(f"vt_resnet{depth}", init_from=str(path), num_classes=3).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        y = source.maxpool(torch.relu(source.bn1(source.conv1(x))))
        y = source.layer3(source.layer2(source.layer1(y)))
        # Ours runs channels-last, whose kernels round differently.
        assert torch.allclose(model.forward_intermediates(x)[1][3], y, atol=1e-5 * y.abs().max().item())


def test_starts_from_wrapped_and_from_old_checkpoints(tmp_path: Path) -> None:
    state = resnet("timm", "resnet18").state_dict()
    old = {f"module.{k}": v for k, v in state.items() if not k.endswith("num_batches_tracked")}
    torch.save({"state_dict": old, "epoch": 3}, tmp_path / "x.pth")
    model = timm.create_model("vt_resnet18", init_from=tmp_path / "x.pth")
    assert torch.equal(model.layer3[1].conv2.weight, state["layer3.1.conv2.weight"])


@pytest.mark.parametrize(
    ("source", "name", "options", "messages"),
    [
        ("resnet34", "vt_resnet18", {}, ["unexpected: layer1.2.bn1.bias", "more"]),
        ("resnet18", "vt_resnet34", {}, ["missing: layer1.2.bn1.bias", "more"]),
        (
            "resnet18",
            "vt_resnet18",
            dict(stem="small"),
            ["of another shape: conv1.weight (64, 3, 7, 7) instead of (64, 3, 3, 3)"],
        ),
        (
            "resnet18",
            "vt_resnet18",
            dict(in_chans=1),
            ["conv1.weight (64, 3, 7, 7) instead of (64, 1, 7, 7)"],
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit(
    tmp_path: Path, source: str, name: str, options: dict[str, object], messages: list[str]
) -> None:
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(timm.create_model(source).state_dict(), path)
    with pytest.raises(UserError) as error:
        timm.create_model(name, init_from=path, **options)
    assert all(message in str(error.value) for message in messages)
    assert "\n" not in str(error.value)


class Trap:
    """Runs code when unpickled without care."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("trapped"),)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.pth", b""),
        ("x.pth", b"not a checkpoint"),
        ("x.safetensors", b"not a checkpoint"),
        ("x.pth", pickle.dumps(Trap(), protocol=2)),
        ("x.pth", [1, 2]),
        ("x.pth", {"epoch": 3}),
    ],
)
def test_files_that_are_no_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: object
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UserError, match="is not a checkpoint"):
        timm.create_model("vt_resnet18", init_from=path)
    assert not Path("trapped").exists()


def test_pretrained_weights_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"weights of 'resnet18' cannot be fetched: .* path of a checkpoint"):
        timm.create_model("vt_resnet18", init_from="resnet18")


def test_pretrained_weights_are_those_timm_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    source, create = resnet("timm", "resnet18"), timm.create_model
    asked = []

    def fetch(name: str, **options: object) -> nn.Module:
        asked.append((name, options))
        return source

    monkeypatch.setattr(timm, "create_model", fetch)
    model = create("vt_resnet18", init_from="resnet18.a1_in1k", in_chans=3)
    assert asked == [("resnet18.a1_in1k", dict(pretrained=True, in_chans=3))]
    assert torch.equal(model.conv1.weight, source.conv1.weight)


def test_a_source_that_is_neither_file_nor_model() -> None:
    with pytest.raises(UserError, match="init_from='resnet19' is neither a file nor a model of timm"):
        timm.create_model("vt_resnet18", init_from="resnet19")
