"""``vtok train``."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from visualtokens.cli.report import unreadable_as_json, warn_unreadable
from visualtokens.cli.verb import Failure, Result, Verb
from visualtokens.train.config import TrainConfig

if TYPE_CHECKING:
    from visualtokens.train import TrainResult


def run(config: TrainConfig) -> Result:
    """Train. Ends with 128 + the number of the signal that stopped it, if one did."""
    from visualtokens.train import Diverged, train

    try:
        result = train(config)
    except Diverged as error:
        raise Failure(str(error)) from error
    warn_unreadable(result.unreadable)
    document = {
        "out": result.out,
        "classes": result.classes,
        "accuracy": result.accuracy,
        "confusion": None if result.confusion is None else result.confusion.tolist(),
        "history": result.history,
        "seconds": result.seconds,
        "images_per_second": result.images_per_second,
        "unreadable": unreadable_as_json(result.unreadable),
        "signal": result.signal,
    }
    code = 0 if result.signal is None else 128 + result.signal
    return Result(_text(config, result), document, code)


def _text(config: TrainConfig, result: TrainResult) -> str:
    epochs = len(result.history)
    judged = "not evaluated yet" if result.accuracy is None else f"accuracy {result.accuracy:.1%}"
    lines = [
        f"{config.model}: {judged} after {epochs} of {config.epochs} epochs "
        f"({result.seconds:.0f} s, {result.images_per_second:.0f} images/s)",
        f"saved in {result.out}; try: vtok eval --checkpoint {quote(result.out)} --data {quote(config.data)}",
    ]
    if result.signal is not None:
        lines.append("stopped early; the same command with --resume goes on from the last whole epoch")
    return "\n".join(lines)


VERB = Verb(
    config=TrainConfig,
    run=run,
    example="vtok train --model paca_vit_nano --data digits --out run/ --epochs 10",
)
