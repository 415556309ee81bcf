"""Data shared by the tests of several tasks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.digits import save_digits
from tests.tasks.initial import RESNET, Open
from visualtokens.tasks.options import TaskOptions
from visualtokens.tasks.task import Training, open_training


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The spec of 64 training and 20 validation digits."""
    return save_digits(tmp_path_factory.mktemp("digits") / "few.npz", train=64, val=20)


@pytest.fixture
def start(digits: str) -> Open:
    """Opens the training of a small ResNet on digits."""

    def make(**changes: Any) -> Training[Any]:
        torch.manual_seed(0)
        return open_training(TaskOptions(**dict(model="resnet18", model_args=RESNET, data=digits) | changes))

    return make
