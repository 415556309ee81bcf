"""Every registered model in the formats of torch and ONNX, and detectors, which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm

import visualtokens
from visualtokens.errors import UserError
from visualtokens.tasks import Checkpoint, get_task


@pytest.mark.slow
@pytest.mark.parametrize("name", visualtokens.list_models())
def test_registered_models_export(name: str, tmp_path: Path) -> None:
    model = timm.create_model(name, num_classes=3)
    for ending in ("onnx", "pt2"):
        assert visualtokens.export(model, tmp_path / f"model.{ending}").difference <= 1e-4


@pytest.mark.slow
def test_fused_models_export(tmp_path: Path) -> None:
    model = visualtokens.fuse(timm.create_model("paca_vit_nano", num_classes=3).eval())
    assert visualtokens.export(model, tmp_path / "model.onnx").difference <= 1e-4


def test_detectors_are_refused(tmp_path: Path) -> None:
    model = visualtokens.detect.create("faster_rcnn", backbone="resnet18", classes=2, short=64, long=128)
    checkpoint = Checkpoint(
        model.eval(), ["a", "b"], None, get_task("detect"), {"architecture": "faster_rcnn"}
    )
    with pytest.raises(UserError, match="a faster_rcnn cannot be exported: torch captures no program"):
        visualtokens.export(checkpoint, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []
