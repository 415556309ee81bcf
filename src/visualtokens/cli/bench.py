"""``vtok bench``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from visualtokens.cli.verb import Result, Verb
from visualtokens.errors import UserError


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Compare the speed and memory of models on this machine."""

    models: list[str]
    """Models to measure."""

    against: list[str] = field(default_factory=list)
    """Baselines to compare them with."""

    size: int | str = 224
    """Image size: one number for squares, or HEIGHTxWIDTH such as 1280x800."""

    batch: int = 8
    """Images per step."""

    mode: Literal["eager", "channels_last", "compile", "train"] = "eager"
    """What to time: a forward pass (eager), in channels_last memory format, compiled, or a training step."""

    rounds: int = 7
    """Rounds in which the models take turns; the table shows the median."""

    threads: int | None = None
    """CPU threads; by default torch's choice."""


def run(config: BenchConfig) -> Result:
    """Measure and compare."""
    from visualtokens.bench import compare

    comparison = compare(
        config.models,
        against=config.against,
        size=parse_size(config.size),
        batch=config.batch,
        mode=config.mode,
        rounds=config.rounds,
        threads=config.threads,
    )
    return Result(comparison.table(), comparison.to_dict())


def parse_size(size: int | str) -> tuple[int, int]:
    """Return (H, W) from one number or from HEIGHTxWIDTH."""
    found = re.fullmatch(r"(\d+)(?:[x×](\d+))?", str(size).strip())
    height, width = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if min(height, width) < 1:
        raise UserError(f"size {size!r} is not an image size; give 224 or 1280x800 (height x width)")
    return height, width


VERB = Verb(
    config=BenchConfig,
    run=run,
    example="vtok bench paca_vit_b0 --against pvt_v2_b0 --size 224 --batch 8",
    positional="models",
)
