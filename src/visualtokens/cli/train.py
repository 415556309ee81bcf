"""``vtok train``."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from visualtokens.cli.output import unreadable_as_json, warn_unreadable
from visualtokens.cli.verb import Failure, Result, Verb, data_arguments
from visualtokens.train.config import TrainConfig

if TYPE_CHECKING:
    from visualtokens.train import TrainResult


def run(config: TrainConfig) -> Result:
    """Train. The exit code is 128 plus the signal that interrupted the run, if one did."""
    from visualtokens.train import CannotSave, Diverged, train

    try:
        result = train(config)
    except (CannotSave, Diverged) as error:
        raise Failure(str(error)) from error
    if result.is_main:
        warn_unreadable(result.unreadable)
    document = {
        "out": result.out,
        "classes": result.classes,
        "accuracy": result.accuracy,
        "best": result.best,
        "metrics": result.metrics,
        "confusion": None if result.confusion is None else result.confusion.tolist(),
        "history": result.history,
        "seconds": result.seconds,
        "images_per_second": result.images_per_second,
        "data_wait": result.data_wait,
        "skipped": result.skipped,
        "unreadable": unreadable_as_json(result.unreadable),
        "signal": result.signal,
    }
    code = 0 if result.signal is None else 128 + result.signal
    return Result(_text(config, result), document, code, silent=not result.is_main)


def _text(config: TrainConfig, result: TrainResult) -> str:
    score = result.metrics.get(result.score)
    reached = "not evaluated yet" if score is None else f"{result.score} {score:.1%}"
    return (
        f"{config.model}: {reached} after {len(result.history)} of {config.epochs} epochs "
        f"({result.seconds:.0f} s, {result.images_per_second:.0f} images/s, "
        f"{result.data_wait:.1%} of the time waiting for images)\n"
        f"saved in {result.out}; "
        f"try: vtok eval --checkpoint {quote(result.out)} {data_arguments(config.data, config)}"
    )


VERB = Verb(
    config=TrainConfig,
    run=run,
    example="vtok train --model paca_vit_nano --data digits --out run/ --epochs 10",
)
