"""What a run needs to go on, in one file, so that all of it is of the same moment."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visualtokens.errors import UserError
from visualtokens.train.files import write_atomically

STATE = "state.pt"


@dataclass(frozen=True)
class State:
    """A run between two epochs."""

    epoch: int  # whole epochs done
    step: int  # steps done, which is all the learning-rate schedule depends on
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    history: list[dict[str, Any]]


def save_state(out: Path, state: State) -> None:
    """Write ``state.pt``."""
    write_atomically(out / STATE, lambda path: torch.save(vars(state), path))


def load_state(out: Path) -> State | None:
    """Read ``state.pt``; None when the run ended within its first epoch."""
    path = out / STATE
    if not path.exists():
        return None
    try:
        return State(**torch.load(path, map_location="cpu", weights_only=True))
    except (RuntimeError, EOFError, TypeError, pickle.UnpicklingError) as error:
        raise UserError(f"{path} cannot be read, so the run cannot resume; give --overwrite") from error
