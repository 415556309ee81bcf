"""``vtok`` in this process, and what it works on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.digits import save_digits
from visualtokens import progress
from visualtokens.cli import main
from visualtokens.data import open_dataset
from visualtokens.train import TrainConfig, train


@pytest.fixture
def vtok_with_progress(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command with these arguments: exit code, stdout, stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(map(str, arguments)))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def vtok(
    vtok_with_progress: Callable[..., tuple[int, str, str]],
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """The same, with stderr without the header and the progress."""
    before = progress.logger.level
    progress.logger.setLevel(logging.WARNING)
    yield vtok_with_progress
    progress.logger.setLevel(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few digits as ``few.npz``, two of them as pictures, and a file that is no picture."""
    root = tmp_path_factory.mktemp("cli")
    save_digits(root / "few.npz", train=64, val=30)
    digits = open_dataset("digits", "val")
    for i in range(2):
        digits[i][0].save(root / f"{i}.png")
    (root / "broken.png").write_bytes(b"no picture")
    return root


@pytest.fixture(scope="session")
def data(folder: Path) -> str:
    return f"npz:{folder / 'few.npz'}"


@pytest.fixture(scope="session")
def checkpoint(folder: Path, data: str) -> Path:
    """A model that was trained for one epoch."""
    out = folder / "run"
    train(TrainConfig(model="paca_vit_nano", data=data, out=str(out), epochs=1, batch=32, device="cpu"))
    return out
