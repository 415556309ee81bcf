"""What methods of other libraries need: the library, and a copy of the model to work on."""

from __future__ import annotations

import copy
import importlib
from types import ModuleType

from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.explain.classifier import input_like


def library(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{package} is not installed; pip install 'visualtokens[explain]', or leave its method out"
        ) from error


def own_copy(model: nn.Module) -> nn.Module:
    """A copy to take gradients of: the libraries set hooks and clear gradients on what they are given."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def as_input(model: nn.Module, x: Tensor) -> Tensor:
    """The image ``x (3, H, W)`` as a batch of one, of the model's device and type."""
    like = input_like(model)
    return x.to(like.device, like.dtype).unsqueeze(0)
