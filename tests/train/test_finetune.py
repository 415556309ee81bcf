"""Fine-tuning: frozen layers, linear probes, layer-wise learning rates, resuming without the source."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import _registry
from torch import nn

from tests.train.helpers import Make, last_state, lines, same, signal_at, step_losses, weights
from tests.train.ranks import run_ranks
from visualtokens.checkpoint import load, save_checkpoint
from visualtokens.data import Preprocess
from visualtokens.errors import UserError
from visualtokens.tasks.detect import create as create_detector
from visualtokens.tasks.segment import create as create_segmenter
from visualtokens.tasks.timm_models import build_model
from visualtokens.train import TrainConfig, train
from visualtokens.train.distributed import Team
from visualtokens.train.run import Run
from visualtokens.train.step import create_optimizer

RESNET: dict[str, Any] = dict(channels=[8, 8, 8, 8])
STATISTICS = Preprocess((32, 32), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), crop=0.9, interpolation="bilinear")


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A checkpoint folder of a small ResNet for other classes than digits."""
    torch.manual_seed(1)
    model = build_model("resnet18", classes=3, model_args=RESNET)
    save_checkpoint(
        tmp_path / "source", model, classes=list("abc"), preprocess=STATISTICS, model_args=RESNET, training={}
    )
    return str(tmp_path / "source")


@pytest.fixture
def tune(config: Make, source: str) -> Make:
    """Makes configurations of a run that starts from ``source``."""

    def make(**changes: Any) -> TrainConfig:
        return config(**dict(model="resnet18", model_args=RESNET, init=source) | changes)

    return make


def run_of(config: TrainConfig) -> Run:
    return Run(config, device=torch.device("cpu"), team=Team(), progress=False)


# Freezing.


def test_frozen_run_changes_the_rest_only(tune: Make, source: str) -> None:
    settings = tune(freeze=2, ema=0.9, accumulate=2, weight_decay=0.5)
    train(settings)
    before, after = load(source).model.state_dict(), weights(settings)
    frozen = ("conv1.", "bn1.", "layer1.", "layer2.")
    for name, weight in after.items():
        if not name.startswith("fc."):
            assert torch.equal(weight, before[name]) == name.startswith(frozen), name
    state, _ = last_state(settings)
    trained = [n for n, _ in load(source).model.named_parameters() if not n.startswith(frozen)]
    assert len(state.optimizer["state"]) == len(trained)
    assert state.trained is not None
    assert all(torch.equal(w, before[n]) for n, w in state.trained.items() if n.startswith(frozen))


@pytest.mark.parametrize("options", [dict(freeze=3, ema=0.9), dict(freeze_norms=True), dict(probe=True)])
def test_frozen_run_resumes_bit_for_bit(
    tune: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    whole, broken = (tune(out=str(tmp_path / name), log_every=1, **options) for name in ("whole", "broken"))
    train(whole)
    with pytest.MonkeyPatch.context() as patch:
        signal_at(patch, 1)
        train(broken)
    train(replace(broken, resume="auto"))
    assert step_losses(broken) == step_losses(whole)
    assert same(weights(broken), weights(whole))


def test_frozen_layers_cannot_change_when_resuming(tune: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tune(freeze=3)
    signal_at(monkeypatch, 1)
    train(settings)
    with pytest.raises(UserError, match="has freeze=3, not 2; resume it with the same options"):
        train(replace(settings, freeze=2, resume=True))


def test_two_processes_train_what_is_not_frozen(tune: Make, source: str, tmp_path: Path) -> None:
    """All BatchNorm is frozen, so that two processes give the weights of one."""
    options = dict(freeze=4, optimizer="sgd", lr=0.1, warmup_epochs=0.0)
    one, two = tune(out=str(tmp_path / "one"), **options), tune(out=str(tmp_path / "two"), **options)
    train(one)
    run_ranks(train, two)
    before = load(source).model.state_dict()
    for name, weight in weights(two).items():
        torch.testing.assert_close(weight, weights(one)[name], rtol=0, atol=1e-6)
        assert name.startswith("fc.") or torch.equal(weight, before[name])


def test_probe_trains_a_linear_classifier(tune: Make, source: str) -> None:
    """The logits are a linear function of the features of the initial weights, and no weight decays."""
    settings = tune(probe=True, epochs=1)
    run = run_of(settings)
    first, second = run.training.notes
    assert first.endswith(
        "; their classifier is for 3 classes instead of 10: a new one starts from random weights"
    )
    total = sum(parameter.numel() for parameter in run.learner.model.parameters())
    assert second == f"90 of {total:,} parameters are trained"
    assert {group["weight_decay"] for group in run.learner.optimizer.param_groups} == {0.0}
    assert sum(len(group["params"]) for group in run.learner.optimizer.param_groups) == 2
    run.learner.train_mode()
    assert [name for name, m in run.learner.model.named_modules() if m.training and list(m.parameters())] == [
        "",
        "fc",
    ]
    train(settings)
    before, after = load(source).model.state_dict(), weights(settings)
    assert all(torch.equal(w, before[n]) for n, w in after.items() if not n.startswith("fc."))


@pytest.mark.parametrize("task", ["segment", "detect"])
def test_dense_models_train_with_a_frozen_backbone(source: str, tmp_path: Path, task: str) -> None:
    args = dict(backbone="resnet18", backbone_args=RESNET)
    small: dict[str, Any] = (
        dict(head_args=dict(dim=8, width=8)) if task == "segment" else dict(width=8, hidden=8)
    )
    settings = TrainConfig(
        task=task,
        model="fpn" if task == "segment" else "mask_rcnn",
        model_args=args | small,
        data="digit_scenes",
        size=64,
        init=source,
        freeze="backbone",
        out=str(tmp_path / "run"),
        device="cpu",
    )
    run = run_of(settings)
    batch = next(iter(run.train_loader)).split(16)[0]
    before = {name: weight.clone() for name, weight in run.learner.model.state_dict().items()}
    run.learner.train_mode()
    run.learner.step = 100
    run.learner.learn(batch)
    body = "backbone.body." if task == "segment" else "backbone.body.body."
    changed = {n for n, w in run.learner.model.state_dict().items() if not torch.equal(w, before[n])}
    assert changed
    assert not any(name.startswith(body) for name in changed)


# Layer-wise learning rates.

FAMILIES: dict[str, dict[str, Any]] = {
    "paca_vit_nano": {},
    "stvit_iso_64": {},
    "stvit_small": {},
    "vt_resnet18": dict(width=0.25),
    "pvt_v2_b0_pure": {},
    "swin_iso_64": {},
    "deit_e252": {},
    "reduced_vit": dict(base="test_vit", keep=0.5),
    "test_vit": {},
    "resnet18": RESNET,
    "convnext_atto": {},
    "test_efficientnet": {},
}


def scales_of(model: nn.Module, config: TrainConfig) -> dict[str, float]:
    """The factor of the learning rate of every parameter that is trained."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = create_optimizer(model, config).param_groups
    return {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}


@pytest.mark.parametrize("name", FAMILIES)
def test_layer_decay_of_every_family(config: Make, name: str) -> None:
    """Scales are powers of the factor; the stem has the lowest, the head 1, and depth does not lower it."""
    with torch.device("meta"):
        model: Any = build_model(name, classes=3, model_args=FAMILIES[name])
    settings = config(layer_decay=0.5)
    scales = scales_of(model, settings)
    assert scales.keys() == dict(model.named_parameters()).keys()
    powers = {-torch.tensor(scale).log2().item() for scale in scales.values()}
    assert powers == set(range(int(max(powers)) + 1))
    assert len(powers) >= 5
    head = tuple(f"{n}." for n in [model.pretrained_cfg["classifier"]])
    assert {scale for n, scale in scales.items() if n.startswith(head)} == {1}
    stem = model.pretrained_cfg["first_conv"]
    assert scales[f"{stem}.weight"] == min(scales.values())
    # Constructors create the layers in the order in which images pass them.
    order = [scales[n] for n, parameter in model.named_parameters() if parameter.ndim > 1]
    assert order == sorted(order)


def test_layer_decay_of_frozen_models_keeps_the_other_rates(config: Make) -> None:
    model = build_model("paca_vit_nano", classes=3, model_args={})
    settings = config(layer_decay=0.5)
    whole = scales_of(model, settings)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not parameter_name.startswith(("stages.0", "stages.1")))
    rest = scales_of(model, settings)
    assert rest == {name: scale for name, scale in whole.items() if name in rest}
    assert 0 < len(rest) < len(whole)


@pytest.mark.parametrize("backbone", ["resnet18", "convnext_atto", "paca_vit_nano", "test_vit"])
def test_layer_decay_of_dense_models_is_that_of_the_backbone(config: Make, backbone: str) -> None:
    args = RESNET if backbone == "resnet18" else {}
    models: list[tuple[nn.Module, str]] = [
        (create_segmenter("fpn", backbone=backbone, classes=3, backbone_args=args), "backbone.body.")
    ]
    if backbone != "test_vit":
        detector = create_detector("retinanet", backbone=backbone, classes=3, backbone_args=args)
        models.append((detector, "backbone.body.body."))
    classifier = scales_of(build_model(backbone, classes=3, model_args=args), config(layer_decay=0.5))
    flat = {name.replace(".", "_"): scale for name, scale in classifier.items()}
    for model, body in models:
        scales = scales_of(model, config(layer_decay=0.5))
        assert {scale for name, scale in scales.items() if not name.startswith(body)} == {1}
        found = {
            name: (scale, flat[name.removeprefix(body).removeprefix("model.").replace(".", "_")])
            for name, scale in scales.items()
            if name.startswith(body)
        }
        # The classifier may have layers between the last block and its head that a backbone lacks.
        assert len({theirs / ours for ours, theirs in found.values()}) == 1
        assert max(ours for ours, _ in found.values()) == 0.5


def test_layer_decay_that_cannot_work_is_refused(config: Make) -> None:
    with pytest.raises(UserError, match=r"layer_decay=0.5: Linear does not name its layers"):
        create_optimizer(nn.Linear(2, 2), config(layer_decay=0.5))
    model = timm.create_model("levit_128s", num_classes=3)
    with pytest.raises(
        UserError, match=r"layer_decay=0.5 has no effect: all trained parameters of Levit.* one layer"
    ):
        create_optimizer(model, config(layer_decay=0.5))


# Resuming without the source of the weights.


def resumed_equals_whole(whole: TrainConfig, broken: TrainConfig, remove: Any) -> None:
    """Stop ``broken`` after two steps, remove its source, resume it, and compare."""
    train(whole)
    with pytest.MonkeyPatch.context() as patch:
        signal_at(patch, 1)
        train(broken)
    described = json.loads((Path(broken.out) / "config.json").read_text())
    remove()
    train(replace(broken, resume=True))
    again = json.loads((Path(broken.out) / "config.json").read_text())
    assert {k: v for k, v in again.items() if k != "training"} == {
        k: v for k, v in described.items() if k != "training"
    }
    assert again["training"]["init"] == broken.init
    assert same(weights(broken), weights(whole))


def test_resumes_without_the_initial_weights(tune: Make, source: str, tmp_path: Path) -> None:
    whole, broken = (tune(out=str(tmp_path / name)) for name in ("whole", "broken"))
    resumed_equals_whole(whole, broken, lambda: shutil.rmtree(source))
    assert load(broken.out).preprocess == STATISTICS
    with pytest.raises(UserError, match=r"init: .* does not exist"):
        train(replace(broken, overwrite=True))
    assert load(broken.out).preprocess == STATISTICS


def test_resumes_without_a_network(config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "timm.safetensors"
    save_file(dict(timm.create_model("test_vit").state_dict()), file)
    cfg = replace(timm.get_pretrained_cfg("test_vit"), hf_hub_id=None, file=str(file), mean=(0.2, 0.2, 0.2))
    monkeypatch.setitem(_registry._model_pretrained_cfgs, "test_vit", cfg)
    options = dict(model="test_vit", pretrained=True, size=48)
    whole, broken = (config(out=str(tmp_path / name), **options) for name in ("whole", "broken"))
    resumed_equals_whole(whole, broken, file.unlink)
    assert load(broken.out).preprocess.mean == (0.2, 0.2, 0.2)


def test_resumes_without_the_weights_of_a_part(config: Make, tmp_path: Path) -> None:
    file = tmp_path / "resnet.pth"
    torch.save(timm.create_model("resnet18").state_dict(), file)
    options = dict(model="vt_resnet18", model_args={"init_from": str(file)}, size=32, epochs=1)
    whole, broken = (config(out=str(tmp_path / name), **options) for name in ("whole", "broken"))
    resumed_equals_whole(whole, broken, file.unlink)


def test_changed_options_are_named_before_the_weights(tune: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    signal_at(monkeypatch, 1)
    settings = tune()
    train(settings)
    with pytest.raises(UserError, match="has model='resnet18', not 'paca_vit_nano'"):
        train(replace(settings, model="paca_vit_nano", model_args={}, resume=True))


def test_new_run_logs_where_its_weights_come_from(
    tune: Make, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="visualtokens"):
        train(tune(epochs=1, freeze=2))
    first, second = caplog.messages[:2]
    assert first.startswith(
        f"init: the weights in {source!r}; their classifier is for 3 classes instead of 10"
    )
    assert second.endswith("parameters are trained")
    caplog.clear()
    with caplog.at_level("INFO", logger="visualtokens"):
        train(tune(epochs=2, freeze=2, resume=True))
    assert caplog.messages[0].startswith("resumed after step")
    assert lines(tune(), "log.jsonl")[-1]["epoch"] == 2
