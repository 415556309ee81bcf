"""The registry: a task defined here and registered by one line works everywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import visualtokens
from visualtokens.cli import main
from visualtokens.data import Batch, Preprocess, create_loader, open_dataset
from visualtokens.errors import UserError
from visualtokens.tasks import Checkpoint, Prediction, Task, TaskOptions, Training, get_task, register_task
from visualtokens.tasks import task as registry
from visualtokens.tasks.evaluation import require_classes
from visualtokens.tasks.task import Loading, Loss

PREPROCESS = Preprocess((8, 8), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@dataclass(frozen=True)
class Brightness(Prediction):
    value: float

    def to_dict(self) -> dict[str, Any]:
        return {"brightness": self.value}

    def text(self) -> str:
        return f"  brightness {self.value:.2f}"


@dataclass(frozen=True)
class RegressionEvaluation:
    error: float
    images: int
    unreadable: tuple[Any, ...] = ()

    @property
    def metrics(self) -> dict[str, float]:
        return {"loss": self.error, "fit": 1 / (1 + self.error)}

    def to_dict(self, classes: object) -> dict[str, Any]:
        return {**self.metrics, "images": self.images}

    def text(self, classes: object) -> str:
        return f"error {self.error:.3f}"


def evaluate(model: nn.Module, batches: Iterable[Batch]) -> RegressionEvaluation:
    with torch.inference_mode():
        errors = torch.cat([(model(b.images) - brightness(b.images)).square() for b in batches])
    return RegressionEvaluation(errors.mean().item(), len(errors))


def brightness(images: Tensor) -> Tensor:
    return images.mean(dim=(1, 2, 3))  # (B,)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.flatten(1))[:, 0]  # (B,)


class Brighten(Task):
    """Regress the mean brightness of an image."""

    name = "brighten"
    score = "fit"

    def open(self, options: TaskOptions) -> BrightenTraining:
        train_set = open_dataset(options.data, "train", **options.data_options)
        val_set = open_dataset(options.data, "val", **options.data_options)
        return BrightenTraining(self, Linear(), train_set=train_set, val_set=val_set, preprocess=PREPROCESS)

    def build(self, config: Mapping[str, Any]) -> tuple[nn.Module, list[str], Preprocess]:
        _, classes, _ = self.described(config)
        return Linear(), classes, PREPROCESS

    def open_data(self, checkpoint: Checkpoint, data: str, split: Any, /, **options: Any) -> Any:
        return open_dataset(data, split, **options)

    def loader(self, dataset: Any, preprocess: Preprocess, loading: Loading) -> Any:
        return create_loader(dataset, preprocess, train=False, **vars(loading))

    def evaluate(self, checkpoint: Checkpoint, batches: Any) -> RegressionEvaluation:  # type: ignore[override]
        return evaluate(checkpoint.model, batches)

    def predict(self, checkpoint: Checkpoint, image: Image.Image) -> Brightness:  # type: ignore[override]
        return Brightness(checkpoint.model(checkpoint.preprocess(image)[None]).item())


class BrightenTraining(Training[Batch]):
    def train_loader(self, loading: Loading) -> Any:
        return create_loader(self.train_set, self.preprocess, train=True, **vars(loading))

    def loss(self, model: nn.Module, batch: Batch, *, rng: np.random.Generator) -> Loss:
        return Loss((model(batch.images) - brightness(batch.images)).square().mean())

    def evaluate(self, model: nn.Module, batches: Any, *, progress: bool | None) -> RegressionEvaluation:
        return evaluate(model, batches)

    def describe(self) -> dict[str, Any]:
        return self.task.describe("linear", classes=self.classes, model_args={})


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    register_task(Brighten())


@pytest.mark.usefixtures("registered")
def test_registered_task_trains_evaluates_predicts_and_loads(
    digits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    options = ["--model", "linear", "--data", digits, "--out", out, "--epochs", "2", "--device", "cpu"]
    assert main(["train", "--task", "brighten", *options]) == 0
    assert "fit " in capsys.readouterr().out
    assert main(["eval", "--checkpoint", out, "--data", digits, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 20

    image, _ = open_dataset(digits, "val")[0]
    image.save(tmp_path / "0.png")
    assert main(["predict", str(tmp_path / "0.png"), "--checkpoint", out, "--json"]) == 0
    (printed,) = json.loads(capsys.readouterr().out)["predictions"]
    run = visualtokens.load(out)
    assert (run.task.name, run.model.training, len(run.classes)) == ("brighten", False, 10)
    assert run.predict(image).to_dict()["brightness"] == pytest.approx(printed["brightness"], rel=1e-4)

    assert main(["predict", str(tmp_path / "0.png"), "--checkpoint", out, "--top", "2"]) == 2
    assert "top=2 has no effect" in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "0.png"), "--checkpoint", out]) == 2
    assert (
        "a checkpoint of task 'brighten' cannot be explained; its task has no subject"
        in capsys.readouterr().err
    )


def test_unknown_task_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown task 'segmnt'; did you mean 'segment'"):
        get_task("segmnt")


def test_require_classes_compares_names_and_order() -> None:
    require_classes("data", ["a", "b"], "run", ("a", "b"))
    with pytest.raises(
        UserError, match=r"data has 2 classes \(b, a\), but run was trained for 4 classes \(a, b, c, …\)"
    ):
        require_classes("data", ["b", "a"], "run", list("abcd"))
    with pytest.raises(UserError, match="data has classes that run was not trained for: e, f; remove them"):
        require_classes("data", ["f", "a", "e"], "run", list("abcd"))
    with pytest.raises(UserError, match=r"data has 1 class \(e\), but run was trained for 4 classes"):
        require_classes("data", ["e"], "run", list("abcd"))
