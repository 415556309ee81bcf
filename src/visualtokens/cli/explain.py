"""``vtok explain``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from visualtokens.cli.report import table
from visualtokens.cli.verb import Result, Verb
from visualtokens.errors import unknown

if TYPE_CHECKING:
    from visualtokens.explain import Explanation


@dataclass(frozen=True, kw_only=True)
class ExplainConfig:
    """Draw which regions of an image a checkpoint's answer rests on."""

    image: str
    """Image file."""

    checkpoint: str
    """Folder that `vtok train --out` wrote."""

    save: str = "explanation.html"
    """Where to write the explanation: a page (.html), a picture (.png) or the numbers (.npz)."""

    target: str | int | None = None
    """Name of the class to explain; by default the one the model predicts."""

    layer: int = -1
    """Which grouping to draw: 0 is the model's first, -1 its last."""

    top: int = 6
    """How many clusters to draw, the most important first."""

    device: str = "auto"
    """Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1, mps."""


def run(config: ExplainConfig) -> Result:
    """Explain one image."""
    from visualtokens.data import read_image
    from visualtokens.explain import explain
    from visualtokens.train import load_checkpoint, pick_device

    checkpoint = load_checkpoint(config.checkpoint)
    target = None if config.target is None else str(config.target)
    if target is not None and target not in checkpoint.classes:
        raise unknown("class", target, checkpoint.classes)
    explanation = explain(
        checkpoint.model.to(pick_device(config.device)),
        read_image(config.image),
        preprocess=checkpoint.preprocess,
        target=None if target is None else checkpoint.classes.index(target),
        layer=config.layer,
        top=config.top,
        classes=checkpoint.classes,
    )
    saved = explanation.save(config.save)
    document = {
        "image": config.image,
        "predicted": checkpoint.classes[explanation.predicted],
        "target": checkpoint.classes[explanation.target],
        "probability": float(explanation.probabilities[explanation.target]),
        "layer": explanation.layer,
        "clusters": [
            {
                "cluster": k,
                "importance": float(explanation.importance[k]),
                "entropy": float(explanation.entropy[k]),
            }
            for k in explanation.order
        ],
        "saved": str(saved),
    }
    return Result(_text(explanation, str(saved)), document)


def _text(explanation: Explanation, saved: str) -> str:
    target = explanation.target
    before = float(explanation.probabilities[target])
    rows = [(str(k), f"{explanation.masked_probability(k):.1%}") for k in explanation.top]
    return (
        f"The model sees {explanation.class_name(target)!r} with {before:.1%}. "
        f"What is left of that when one of its clusters is hidden ({explanation.layer}):\n\n"
        + table(rows, header=("cluster", "left"), right=(0, 1))
        + f"\n\nsaved as {saved}"
    )


VERB = Verb(
    config=ExplainConfig,
    run=run,
    example="vtok explain photo.jpg --checkpoint run/ --save out.html",
    positional="image",
)
