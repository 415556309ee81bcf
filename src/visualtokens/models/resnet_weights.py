"""Start a model from the stages 1 to 4 of a trained ResNet, timm's or torchvision's."""

from __future__ import annotations

from pathlib import Path

import timm
from safetensors import SafetensorError
from timm.models import load_state_dict
from torch import Tensor, nn

from visualtokens.errors import UserError

STAGES = ("conv1", "bn1", "layer1", "layer2", "layer3")
REPLACED = ("layer4", "fc")


def load_stages(model: nn.Module, source: str | Path, *, in_chans: int) -> None:
    """Copy the stages of ``source`` into those of the same names in ``model``.

    ``source`` is a model of timm, whose pretrained weights timm fetches, or a checkpoint file. What the
    model has instead of layer4 and fc is left as it is; every other difference is an error.
    """
    found = _read(source, in_chans)
    counters = [k for k in model.state_dict() if k.endswith(".num_batches_tracked")]  # old files have none
    wanted = {k: v for k, v in model.state_dict().items() if k.partition(".")[0] in STAGES}
    given = {k: v for k, v in found.items() if k.partition(".")[0] not in REPLACED}
    shapes = [
        f"{k} {tuple(given[k].shape)} instead of {tuple(wanted[k].shape)}"
        for k in sorted(wanted.keys() & given.keys())
        if given[k].shape != wanted[k].shape
    ]
    problems = [
        _listed("missing", sorted(wanted.keys() - given.keys() - set(counters))),
        _listed("unexpected", sorted(given.keys() - wanted.keys())),
        _listed("of another shape", shapes),
    ]
    if any(problems):
        what = "; ".join(filter(None, problems))
        raise UserError(f"init_from={str(source)!r} does not fit: {what}; give the ResNet of this depth")
    model.load_state_dict(given, strict=False)


def _read(source: str | Path, in_chans: int) -> dict[str, Tensor]:
    name = str(source)
    if Path(source).is_file():
        return _read_file(name)
    if not timm.is_model(name):
        raise UserError(
            f"init_from={name!r} is neither a file nor a model of timm; give one, like 'resnet18'"
        )
    try:
        return timm.create_model(name, pretrained=True, in_chans=in_chans).state_dict()
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"the pretrained weights of {name!r} cannot be fetched: {_first_line(error)}; "
            f"give init_from the path of a checkpoint instead"
        ) from error


def _read_file(path: str) -> dict[str, Tensor]:
    why = "it holds no tensors by name"
    try:
        found = load_state_dict(path, weights_only=True)
        if all(isinstance(value, Tensor) for value in found.values()):
            return found
    except (OSError, RuntimeError, EOFError, AttributeError, SafetensorError) as error:
        why = _first_line(error)
    raise UserError(f"init_from={path!r} is not a checkpoint: {why}; give a .safetensors or .pth of weights")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _listed(what: str, keys: list[str], *, limit: int = 4) -> str:
    if not keys:
        return ""
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return f"{what}: {', '.join(keys[:limit])}{more}"
