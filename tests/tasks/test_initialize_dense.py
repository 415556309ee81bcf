"""Initial weights of segmentation models and detectors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.initial import (
    PREFIX,
    RESNET,
    dense,
    random_model,
    save_bare,
    save_own,
    save_released,
)
from visualtokens.errors import UserError
from visualtokens.tasks.initialize import ResumedFrom

BACKBONES: dict[str, dict[str, Any]] = {
    "resnet18": RESNET,
    "convnext_atto": dict(dims=[8, 8, 8, 8], depths=[1, 1, 1, 1]),  # its names get underscores
    "paca_vit_nano": {},
    "test_vit": {},
}


@pytest.mark.parametrize("task", PREFIX)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_classifiers_initialise_backbones(tmp_path: Path, task: str, backbone: str) -> None:
    if (task, backbone) == ("detect", "test_vit"):
        pytest.skip("a detector needs maps of several strides")
    model = random_model(backbone, **BACKBONES[backbone])
    training = dense(task, backbone, BACKBONES[backbone], init=save_bare(tmp_path / "x", model))
    random = dense(task, backbone, BACKBONES[backbone]).model.state_dict()
    known = {name.replace(".", "_"): weight for name, weight in model.state_dict().items()}
    prefix = PREFIX[task]
    for name, weight in training.model.state_dict().items():
        if name.startswith(prefix):
            expected = known[name.removeprefix(prefix).removeprefix("model.").replace(".", "_")]
            if "pos_embed" not in name:  # resampled to 64 pixels
                assert torch.equal(weight, expected), name
        else:
            assert torch.equal(weight, random[name]), name
    assert training.notes[0].endswith("for the backbone; the rest starts from random weights")


@pytest.mark.parametrize("task", PREFIX)
def test_dense_models_take_the_statistics_of_the_weights(tmp_path: Path, task: str) -> None:
    training = dense(task, "resnet18", RESNET, init=save_own(tmp_path / "x", random_model()))
    stored = json.loads(json.dumps(training.describe()))["preprocess"]
    assert (stored["mean"], stored["std"]) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    built, _, preprocess = training.task.build(training.describe())
    if task == "segment":
        assert preprocess == training.preprocess
        assert preprocess.size == (64, 64)
    else:
        assert built.transform.image_mean == [0.1, 0.2, 0.3]
        assert built.transform.image_std == [0.4, 0.5, 0.6]


def test_weights_of_another_dense_task_are_refused(tmp_path: Path) -> None:
    folder = save_own(tmp_path / "x", random_model())
    config = json.loads(Path(folder, "config.json").read_text())
    Path(folder, "config.json").write_text(json.dumps(config | {"task": "detect"}))
    message = "were trained to detect; give those of a classifier, or of task=segment"
    with pytest.raises(UserError, match=re.escape(message)):
        dense("segment", "resnet18", RESNET, init=folder)


@pytest.mark.parametrize("task", PREFIX)
def test_released_checkpoint_for_a_backbone_and_resuming_without_it(tmp_path: Path, task: str) -> None:
    """The snapshot has the argument that the released weights need and the statistics of their input."""
    file = tmp_path / "released.pth"
    values = save_released(file, "stvit_small")
    training = dense(task, "stvit_small", {}, init=str(file))
    described = training.describe()
    assert described["model_args"]["backbone_args"] == {"border": "released"}
    name = f"{PREFIX[task]}model.stages.1.embed.0.weight"
    assert training.model.state_dict()[name].unique().tolist() == [
        values["layers.0.downsample.proj.0.weight"]
    ]
    described["preprocess"]["mean"] = [0.1, 0.2, 0.3]
    (tmp_path / "config.json").write_text(json.dumps(described | {"task": task}))
    resumed = dense(task, "stvit_small", {}, init=ResumedFrom(tmp_path))
    assert json.loads(json.dumps(resumed.describe())) == json.loads(json.dumps(described))
    assert resumed.notes == []
