"""A hub of the tests, with which the Hub's library talks, and a checkpoint with a log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.hub.server import TOKEN, Hub, serve
from visualtokens.checkpoint import save_checkpoint
from visualtokens.tasks.timm_models import build_model, preprocess_for

CLASSES = ["cat", "dog", "<b>|übergroß|</b>"]
HISTORY: list[dict[str, Any]] = [
    {"epoch": 1, "loss": 1.5, "val_loss": 1.25, "train_accuracy": 0.5, "val_accuracy": 0.5},
    {"epoch": 2, "loss": 1.0, "val_loss": 0.75, "train_accuracy": 0.75, "val_accuracy": 0.875},
    {"epoch": 3, "loss": None, "val_loss": 0.8, "train_accuracy": 0.8, "val_accuracy": 0.75},
]
TRAINING: dict[str, Any] = {
    "model": "paca_vit_nano",
    "data": "folder:/home/alice/secret/photos",
    "task": "classify",
    "init": "/home/alice/runs/first",
    "epochs": 3,
    "lr": 0.002,
    "mixup": 0.0,
    "out": "/home/alice/runs/second",
    "device": "cuda:3",
    "weight_decay": 0.05,
}


def write_run(folder: Path, name: str = "paca_vit_nano") -> Path:
    """A run of three epochs, the second of which was the best."""
    torch.manual_seed(0)
    model = build_model(name, classes=3, model_args={})
    for target in (folder, folder / "best"):
        save_checkpoint(
            target,
            model,
            classes=CLASSES,
            preprocess=preprocess_for(model, size=32),
            model_args={},
            training=TRAINING,
        )
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in HISTORY))
    return folder


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("hub") / "run")


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    Image.linear_gradient("L").convert("RGB").resize((40, 32)).save(path)
    return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, the only one that the Hub's library knows; we are logged in."""
    from huggingface_hub import constants

    with serve() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served
