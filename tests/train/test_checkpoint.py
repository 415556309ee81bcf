"""A saved model is the same model, and what is not one is refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from visualtokens.data import Preprocess
from visualtokens.errors import UserError
from visualtokens.tasks.classify import build_model, preprocess_for, sized_args
from visualtokens.train import load_checkpoint, save_checkpoint

CLASSES = ["cat", "dog", "übergroß"]


def made_up_weights(model: nn.Module) -> nn.Module:
    """Not those any constructor gives, running statistics included."""
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
    model = made_up_weights(build_model(name, classes=len(CLASSES), model_args=args))
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
        ("vit_tiny_patch16_224", 64, {"depth": 1}),  # built for one size
        ("resnet18", 32, {}),  # running statistics
    ],
)
def test_comes_back_the_same_here_and_in_timm(
    tmp_path: Path, name: str, size: int | None, model_args: dict[str, Any]
) -> None:
    model, preprocess = save(tmp_path, name, size=size, model_args=model_args)
    x = torch.randn(2, 3, *preprocess.size)
    loaded = load_checkpoint(tmp_path)
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


def test_preprocessing_that_is_not_the_models_own_is_kept(tmp_path: Path) -> None:
    model = build_model("paca_vit_nano", classes=3, model_args={})
    own = Preprocess((40, 56), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), crop=0.75)
    save_checkpoint(tmp_path, model, classes=CLASSES, preprocess=own, model_args={}, training={})
    assert load_checkpoint(tmp_path).preprocess == own


def test_weights_in_channels_last_order_are_saved(tmp_path: Path) -> None:
    model = build_model("paca_vit_nano", classes=3, model_args={}).to(memory_format=torch.channels_last)
    save_checkpoint(
        tmp_path, model, classes=CLASSES, preprocess=preprocess_for(model), model_args={}, training={}
    )
    saved = load_checkpoint(tmp_path).model.state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in model.state_dict().items())


def test_a_folder_that_timm_saved_is_loaded(tmp_path: Path) -> None:
    model = made_up_weights(timm.create_model("resnet18", num_classes=5))
    timm.models.save_for_hf(model, str(tmp_path), safe_serialization=True)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.classes == ["0", "1", "2", "3", "4"]
    with torch.inference_mode():
        x = torch.randn(1, 3, 64, 64)
        torch.testing.assert_close(checkpoint.model(x), model(x), rtol=0, atol=0)


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_checkpoint_is_refused_with_the_way_out(tmp_path: Path) -> None:
    assert "does not exist; a checkpoint is a folder" in refusal(tmp_path / "nowhere")
    assert "has no config.json; a checkpoint is a folder" in refusal(tmp_path)
    save(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    assert "has no model.safetensors" in refusal(tmp_path / "run")


def test_pickled_files_are_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, tmp_path / "model.pth")
    assert "pickled ones are not loaded because they can run any code" in refusal(tmp_path / "model.pth")


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "does not hold a JSON object" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "does not name an 'architecture'" in refusal(tmp_path)


def test_damaged_or_foreign_weights_are_refused(tmp_path: Path) -> None:
    save(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "model.safetensors is damaged" in refusal(tmp_path)
    weights.write_bytes(whole)
    change_config(tmp_path, lambda c: c.update(architecture="resnet18"))
    assert "does not fit 'resnet18'" in refusal(tmp_path)


def test_config_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
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
def test_a_config_cannot_make_timm_fetch_or_unpickle_files(tmp_path: Path, name: str) -> None:
    save(tmp_path)
    change_config(tmp_path, lambda c: c["model_args"].update({name: str(tmp_path / "evil.pth")}))
    assert f"model_args may not hold {name!r}" in refusal(tmp_path)


def test_an_argument_the_model_does_not_have() -> None:
    with pytest.raises(UserError, match=r"'paca_vit_nano' refuses model_args=\{'wings': 2\}.*wings"):
        build_model("paca_vit_nano", classes=3, model_args={"wings": 2})


def test_first_weights_are_used_and_not_asked_for_again(tmp_path: Path) -> None:
    """A run that started from another file must load when that file is gone."""
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
    loaded = load_checkpoint(tmp_path / "run").model
    assert torch.equal(loaded.get_parameter("conv1.weight"), start.conv1.weight)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["model_args"] = {"init_from": "resnet18"}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="model_args may not hold 'init_from'"):
        load_checkpoint(tmp_path / "run")
