"""Saving and loading checkpoints, refusing damaged ones, and choosing a device."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch import nn

from tests.train.helpers import signal_at
from visualtokens.checkpoint import load, pick_device, save_checkpoint
from visualtokens.data import Preprocess
from visualtokens.errors import UserError
from visualtokens.tasks.task import Loading
from visualtokens.tasks.timm_models import build_model, preprocess_for, sized_args
from visualtokens.train import TrainConfig, train
from visualtokens.train.snapshot import load_snapshot

CLASSES = ["cat", "dog", "übergroß"]


def randomise(model: nn.Module) -> nn.Module:
    """Fill weights and running statistics with values that no constructor gives."""
    generator = torch.Generator().manual_seed(7)
    for tensor in [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]:
        tensor.data = torch.rand(tensor.shape, generator=generator) * 0.1 + 0.01
    return model.eval()


def save(
    folder: Path,
    name: str = "paca_vit_nano",
    *,
    size: int | None = None,
    model_args: dict[str, Any] | None = None,
) -> tuple[nn.Module, Preprocess]:
    args = sized_args(name, model_args or {}, size=size)
    model = randomise(build_model(name, classes=len(CLASSES), model_args=args))
    preprocess = preprocess_for(model, size=size)
    save_checkpoint(
        folder, model, classes=CLASSES, preprocess=preprocess, model_args=args, training={"seed": 3}
    )
    return model, preprocess


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "size", "model_args"),
    [
        ("paca_vit_nano", None, {}),
        ("paca_vit_nano", 48, {"drop_path_rate": 0.1, "clusters": (8, 8, 0, 0)}),
        ("paca_vit_nano", 48, {"img_size": 48}),
        ("stvit_iso_64", 64, {"depths": (1, 1, 1, 1), "img_size": 64}),  # positions for this size
        ("vit_tiny_patch16_224", 64, {"depth": 1}),  # built for one size
        ("resnet18", 32, {}),  # running statistics
    ],
)
def test_loads_identically_here_and_in_timm(
    tmp_path: Path, name: str, size: int | None, model_args: dict[str, Any]
) -> None:
    model, preprocess = save(tmp_path, name, size=size, model_args=model_args)
    x = torch.randn(2, 3, *preprocess.size)
    loaded = load(tmp_path)
    by_timm = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.inference_mode():
        wanted = model(x)
        assert wanted.std() > 0
        torch.testing.assert_close(loaded.model(x), wanted, rtol=0, atol=0)
        torch.testing.assert_close(by_timm(x), wanted, rtol=0, atol=0)
    assert loaded.classes == CLASSES
    assert loaded.preprocess == preprocess
    assert loaded.preprocess.size == ((size, size) if size else (32, 32))
    assert loaded.config["training"] == {"seed": 3}
    assert not loaded.model.training
    assert tuple(timm.data.resolve_model_data_config(by_timm)["input_size"]) == (3, *preprocess.size)
    assert by_timm.pretrained_cfg["label_names"] == CLASSES


def test_custom_preprocessing_is_kept(tmp_path: Path) -> None:
    model = build_model("paca_vit_nano", classes=3, model_args={})
    own = Preprocess((40, 56), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), crop=0.75)
    save_checkpoint(tmp_path, model, classes=CLASSES, preprocess=own, model_args={}, training={})
    assert load(tmp_path).preprocess == own


def test_channels_last_weights_are_saved(tmp_path: Path) -> None:
    model = build_model("paca_vit_nano", classes=3, model_args={}).to(memory_format=torch.channels_last)
    save_checkpoint(
        tmp_path, model, classes=CLASSES, preprocess=preprocess_for(model), model_args={}, training={}
    )
    saved = load(tmp_path).model.state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in model.state_dict().items())


def test_loads_a_folder_saved_by_timm(tmp_path: Path) -> None:
    model = randomise(timm.create_model("resnet18", num_classes=5))
    timm.models.save_for_hf(model, str(tmp_path), safe_serialization=True)
    checkpoint = load(tmp_path)
    assert checkpoint.classes == ["0", "1", "2", "3", "4"]
    with torch.inference_mode():
        x = torch.randn(1, 3, 64, 64)
        torch.testing.assert_close(checkpoint.model(x), model(x), rtol=0, atol=0)


def test_classes_without_names_are_those_of_imagenet(tmp_path: Path) -> None:
    """Also in a dataset whose folders have ImageNet's own names, or numbers."""
    model = timm.create_model("resnet10t", num_classes=1000)
    timm.models.save_for_hf(model, str(tmp_path / "run"), safe_serialization=True)
    checkpoint = load(tmp_path / "run")
    assert checkpoint.classes[:2] == ["tench", "goldfish"]
    assert len(set(checkpoint.classes)) == 1000
    for goldfish, shark in (("n01443537", "n01484850"), ("1", "2"), ("goldfish", "great white shark")):
        for name in (goldfish, shark):
            folder = tmp_path / goldfish / "val" / name
            folder.mkdir(parents=True)
            Image.new("RGB", (32, 32)).save(folder / "photo.png")
        data = checkpoint.task.open_data(checkpoint, f"folder:{tmp_path / goldfish}", "val")
        assert [data[i][1] for i in range(2)] == [1, 2]
        assert data.classes == checkpoint.classes


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "does not exist; a checkpoint is a folder" in refusal(tmp_path / "nowhere")
    assert "has no config.json; a checkpoint is a folder" in refusal(tmp_path)
    save(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    assert "has no model.safetensors" in refusal(tmp_path / "run")


def test_pickled_files_are_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, tmp_path / "model.pth")
    assert "is a pickle, which is not loaded because it can run any code" in refusal(tmp_path / "model.pth")


def test_damaged_config_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "does not hold a JSON object" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "config.json: it does not name an 'architecture'" in refusal(tmp_path)


def test_damaged_or_mismatched_weights_are_refused(tmp_path: Path) -> None:
    save(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "model.safetensors is damaged" in refusal(tmp_path)
    weights.write_bytes(whole)
    change_config(tmp_path, lambda c: c.update(architecture="resnet18"))
    assert "does not fit 'resnet18'" in refusal(tmp_path)


def test_inconsistent_config_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    change_config(tmp_path, lambda c: c["label_names"].pop())
    assert "names 2 classes for a model of 3" in refusal(tmp_path)


def test_unknown_architecture_is_refused_with_the_nearest(tmp_path: Path) -> None:
    save(tmp_path)
    change_config(tmp_path, lambda c: c.update(architecture="paca_vit_nan0"))
    assert "unknown model 'paca_vit_nan0'; did you mean 'paca_vit_nano'?" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name", ["checkpoint_path", "pretrained", "pretrained_cfg", "cache_dir", "num_classes"]
)
def test_config_cannot_make_timm_fetch_or_unpickle_files(tmp_path: Path, name: str) -> None:
    save(tmp_path)
    change_config(tmp_path, lambda c: c["model_args"].update({name: str(tmp_path / "evil.pth")}))
    assert f"model_args may not hold {name!r}" in refusal(tmp_path)


def test_unknown_model_argument_is_refused() -> None:
    with pytest.raises(UserError, match=r"'paca_vit_nano' refuses model_args=\{'wings': 2\}.*wings"):
        build_model("paca_vit_nano", classes=3, model_args={"wings": 2})


def test_initial_weights_are_not_needed_to_load(tmp_path: Path) -> None:
    """A run that was initialized from a file loads without that file."""
    start = timm.create_model("resnet18")
    torch.save(start.state_dict(), tmp_path / "resnet18.pth")
    model_args = {"init_from": str(tmp_path / "resnet18.pth")}
    model = build_model("vt_resnet18", classes=3, model_args=model_args)
    assert torch.equal(model.get_parameter("layer3.0.conv1.weight"), start.layer3[0].conv1.weight)
    save_checkpoint(
        tmp_path / "run",
        model,
        classes=["a", "b", "c"],
        preprocess=preprocess_for(model),
        model_args=model_args,
        training={},
    )
    (tmp_path / "resnet18.pth").unlink()
    loaded = load(tmp_path / "run").model
    assert torch.equal(loaded.get_parameter("conv1.weight"), start.conv1.weight)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["model_args"] = {"init_from": "resnet18"}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="model_args may not hold 'init_from'"):
        load(tmp_path / "run")


@pytest.fixture
def v1(tmp_path: Path) -> Path:
    """Copy of a run of 2 epochs that was written before tasks became descriptors."""
    return Path(shutil.copytree(Path(__file__).parent / "data" / "checkpoint_v1", tmp_path / "v1"))


def test_v1_checkpoint_evaluates_to_its_accuracy(v1: Path) -> None:
    run = load(v1)
    assert (run.task.name, run.classes) == ("classify", [str(i) for i in range(10)])
    dataset = run.task.open_data(run, "digits", "val")
    evaluation = run.task.evaluate(run, run.task.loader(dataset, run.preprocess, Loading(batch=360)))
    assert evaluation.metrics["accuracy"] == pytest.approx(130 / 360, abs=1.5 / 360)  # ties may round
    assert evaluation.metrics["loss"] == pytest.approx(2.099674, rel=1e-4)


def test_v1_snapshot_resumes(v1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more step has the loss that the code of that time computed."""
    options = json.loads((v1 / "options.json").read_text())
    changes = dict(out=str(v1), epochs=3, resume=True, log_every=1)
    signal_at(monkeypatch, 24)
    train(TrainConfig(**(options | changes)))
    (record,) = (json.loads(line) for line in (v1 / "steps.jsonl").read_text().splitlines())
    assert record["step"] == 25
    assert record["loss"] == pytest.approx(2.103553533554077, rel=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        *({"epoch": value} for value in ("2", None, 2.0, True, [2])),
        *({"optimizer": value} for value in (None, [], {1: {}})),
        *({"trained": value} for value in ([], {"weight": 1}, {1: torch.zeros(1)})),
        *({"history": value} for value in (None, {}, [1], "abc")),
        *(
            {"unreadable": value}
            for value in ([], {"train": ["a"]}, {"train": [("a", 1)]}, {"train": [("a",)]})
        ),
        {"no_such_field": 1},
    ],
    ids=str,
)
def test_malformed_snapshot_is_one_line(v1: Path, change: dict[str, Any]) -> None:
    (snapshot,) = (v1 / "snapshots").iterdir()
    load_snapshot(snapshot)
    state = torch.load(snapshot / "state.pt", weights_only=True)
    torch.save(state | change, snapshot / "state.pt")
    with pytest.raises(UserError, match=r"state\.pt") as caught:
        load_snapshot(snapshot)
    assert "\n" not in str(caught.value)
    torch.save([state], snapshot / "state.pt")
    with pytest.raises(UserError, match=r"state\.pt"):
        load_snapshot(snapshot)


def test_inference_does_not_import_the_training_engine(v1: Path) -> None:
    code = (
        "import sys, visualtokens\n"
        "from PIL import Image\n"
        f"run = visualtokens.load({str(v1)!r})\n"
        "assert len(run.predict(Image.new('RGB', (32, 32)), top=2).top) == 2\n"
        "print([m for m in sys.modules if m.startswith(('visualtokens.train', 'visualtokens.cli'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_auto_is_the_accelerator_or_the_cpu() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert pick_device("auto") == (accelerator or torch.device("cpu"))
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", ""])
def test_unknown_device(name: str) -> None:
    with pytest.raises(UserError, match="unknown device"):
        pick_device(name)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_unavailable_device() -> None:
    with pytest.raises(UserError, match=r"'cuda' is not available.*use auto or cpu"):
        pick_device("cuda")


def test_device_index_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UserError, match="the last one is cuda:1"):
        pick_device("cuda:2")
