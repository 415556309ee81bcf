"""A studio in a process of its own, with a small vision transformer and a small PaCa-ViT."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch

import visualtokens.models  # noqa: F401  registers the models
from visualtokens.checkpoint import save_checkpoint
from visualtokens.data import Preprocess

CLASSES = [f"class <b>{i}</b>" if i == 3 else f"kind {i}" for i in range(6)]  # a name is not HTML
VIT: dict[str, Any] = dict(img_size=64, depth=4, embed_dim=48, num_heads=3)
PREPROCESS = Preprocess((64, 64), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


class Running(NamedTuple):
    """A studio that is open."""

    url: str
    process: subprocess.Popen[str]
    folder: Path  # where its folder of uploads is


def save_models(folder: Path) -> list[Path]:
    """Write the two checkpoints."""
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=len(CLASSES), **VIT)
    paca = timm.create_model("paca_vit_nano", num_classes=len(CLASSES))
    small = Preprocess((32, 32), PREPROCESS.mean, PREPROCESS.std)
    for name, model, preprocess, args in (("vit", vit, PREPROCESS, VIT), ("paca", paca, small, {})):
        torch.nn.init.normal_(model.get_classifier().weight, std=0.5)  # answers that differ
        save_checkpoint(
            folder / name, model, classes=CLASSES, preprocess=preprocess, model_args=args, training={}
        )
    return [folder / "vit", folder / "paca"]


@contextlib.contextmanager
def opened(*arguments: str, folder: Path, password: str = "") -> Iterator[Running]:
    """Run ``vtok studio`` on a free port until the block ends."""
    folder.mkdir(exist_ok=True)
    environment = os.environ | {
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "VTOK_STUDIO_PASSWORD": password,
    }
    command = [
        sys.executable,
        "-m",
        "visualtokens",
        "studio",
        "--port",
        "0",
        "--no_browser",
        *arguments,
    ]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"http://\S+", line):
                break
        else:
            pytest.fail("the studio did not open: " + "".join(lines))
        try:
            yield Running(found.group(), process, folder)
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_models(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def studio(checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with opened(
        "--checkpoint", *map(str, checkpoints), folder=tmp_path_factory.mktemp("temporary")
    ) as running:
        yield running
