"""A tokenizer and a reduction method, each registered by one line, work through the command line.

The same for a task is in tests/tasks/test_task.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import visualtokens
from tests.digits import save_digits
from visualtokens.cli import main
from visualtokens.data import open_dataset
from visualtokens.layers import register_tokenizer, tokenizers
from visualtokens.reduce import Pool, Pooled, Seen, methods, register_method


class MeanTokenizer(nn.Module):
    """K projections of the mean pixel."""

    def __init__(self, dim: int, *, tokens: int = 16, token_dim: int = 1024, value: bool = False) -> None:
        super().__init__()
        self.tokens = tokens
        self.project = nn.Linear(dim, tokens * token_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x.mean((2, 3))).unflatten(1, (self.tokens, -1))  # (B, K, C)


class First(Pool):
    """Keep the first K tokens."""

    joins = False

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        place = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])  # (B, n)
        return Pooled(chosen=place[:, :k], assignment=torch.where(place < k, place, -1))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registries that forget after the test what it registers."""
    monkeypatch.setattr(tokenizers, "_factories", dict(tokenizers._factories))
    monkeypatch.setattr(methods, "_REGISTRY", dict(methods._REGISTRY))
    before = list(methods.METHODS)
    register_tokenizer("mean", MeanTokenizer)
    register_method("first", lambda place: First())
    yield
    methods.METHODS[:] = before


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 training and 12 validation digits, and one of them as a picture."""
    folder = tmp_path_factory.mktemp("digits")
    save_digits(folder / "few.npz", train=24, val=12)
    open_dataset("digits", "val")[0][0].save(folder / "0.png")
    return folder


TOKENIZER = ["vt_resnet18", "--model_args.tokenizer", "mean", "--model_args.tokens", "4"]
METHOD = ["reduced_vit", "--model_args.base", "vit_tiny_patch16_224", "--model_args.depth", "2"]
METHOD += ["--model_args.method", "first", "--model_args.keep", "0.5"]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("model", "part"), [(TOKENIZER, MeanTokenizer), (METHOD, First)], ids=["tokenizer", "method"]
)
def test_extension_trains_evaluates_and_predicts(
    model: list[str], part: type, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, out = f"npz:{data / 'few.npz'}", str(tmp_path / "run")
    options = ["--data", spec, "--out", out, "--size", "64", "--epochs", "1", "--batch", "12"]
    assert main(["train", "--model", *model, *options, "--device", "cpu"]) == 0
    assert any(isinstance(module, part) for module in visualtokens.load(out).model.modules())
    capsys.readouterr()
    assert main(["eval", "--checkpoint", out, "--data", spec, "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 12
    assert main(["predict", str(data / "0.png"), "--checkpoint", out, "--device", "cpu", "--json"]) == 0
    (prediction,) = json.loads(capsys.readouterr().out)["predictions"]
    assert sum(each["probability"] for each in prediction["classes"]) <= 1 + 1e-5
