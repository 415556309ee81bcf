"""``vtok models``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from visualtokens.cli.verb import Result, Verb
from visualtokens.errors import unknown
from visualtokens.tables import table


@dataclass(frozen=True, kw_only=True)
class ModelsConfig:
    """List the models of this library with their sizes."""

    filter: str = ""
    """Part of a model name, or a pattern such as 'paca_*_32'; by default all models."""


def run(config: ModelsConfig) -> Result:
    """List the models."""
    from visualtokens import list_models

    pattern = config.filter if any(c in config.filter for c in "*?[") else f"*{config.filter}*"
    names = list_models(pattern)
    if not names:
        raise unknown("model", config.filter, list_models())
    models = [_describe(name) for name in names]
    rows = [(m["name"], f"{m['parameters'] / 1e6:.2f} M", f"{m['size'][0]}×{m['size'][1]}") for m in models]
    return Result(table(rows, header=("model", "parameters", "input"), right=(1, 2)), {"models": models})


def _describe(name: str) -> dict[str, Any]:
    import torch

    from visualtokens import create_model

    with torch.device("meta"):  # counts without allocating the weights
        model = create_model(name)
    parameters = sum(p.numel() for p in model.parameters())
    return {"name": name, "parameters": parameters, "size": list(model.pretrained_cfg["input_size"][1:])}


VERB = Verb(config=ModelsConfig, run=run, example="vtok models 'paca_*'", positional="filter")
