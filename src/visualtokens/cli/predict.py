"""``vtok predict``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from visualtokens.cli import detect, segment
from visualtokens.cli.output import each_image
from visualtokens.cli.parse import Result, Verb
from visualtokens.cli.tasks import refuse_others, task_of
from visualtokens.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

    from visualtokens.train import Checkpoint


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """Say what a checkpoint sees in your images; one that segments or detects also draws it."""

    images: list[str]
    """Image files."""

    checkpoint: str
    """Folder that `vtok train --out` wrote."""

    top: int = 5
    """How many classes to tell for each image, the most probable first."""

    out: str | None = None
    """Of a segmentation model or detector: folder for the pictures; by default predictions."""

    score: float | None = None
    """Of a detector: how sure it must be of what it draws, from 0 to 1; by default 0.5."""

    scales: list[float] = field(default_factory=list)
    """Of a segmentation model: sizes to look at each image in, such as 0.75 1 1.25; the mean counts."""

    flip: bool = False
    """Of a segmentation model: look at the mirror image, too."""

    window: int | None = None
    """Of a segmentation model: side of a window that slides over the image; by default it sees it whole."""

    device: str = "auto"
    """Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1, mps."""


def run(config: PredictConfig) -> Result:
    """Predict, image by image. One that cannot be read does not stop the others; the exit code is then 1."""
    task = task_of(config.checkpoint)
    looks = ("out", "scales", "flip", "window")
    refuse_others(config, task, {"classify": ("top",), "segment": looks, "detect": ("out", "score")})
    out = config.out or "predictions"
    if task == "segment":
        return segment.predict(config, out=out)
    return detect.predict(config, out=out) if task == "detect" else _classify(config)


def _classify(config: PredictConfig) -> Result:
    from visualtokens.train import load_checkpoint, pick_device

    if config.top < 1:
        raise UserError(f"top={config.top} must be at least 1")
    checkpoint = load_checkpoint(config.checkpoint)
    checkpoint.model.to(pick_device(config.device))
    return each_image(
        config.images,
        lambda image, name: {"classes": _predict(checkpoint, image, top=config.top)},
        text=_text,
    )


def _predict(checkpoint: Checkpoint, image: Image.Image, *, top: int) -> list[dict[str, Any]]:
    import torch

    device = next(checkpoint.model.parameters()).device
    x = checkpoint.preprocess(image).to(device)  # (3, H, W)
    with torch.inference_mode():
        probabilities = checkpoint.model(x.unsqueeze(0))[0].float().softmax(0)  # (classes,)
    values, indices = probabilities.topk(min(top, len(checkpoint.classes)))
    return [
        {"class": checkpoint.classes[i], "probability": p}
        for p, i in zip(values.tolist(), indices.tolist(), strict=True)
    ]


def _text(prediction: dict[str, Any]) -> str:
    lines = [f"  {c['probability']:6.1%}  {c['class']}" for c in prediction["classes"]]
    return "\n".join([prediction["image"], *lines])


VERB = Verb(
    config=PredictConfig,
    run=run,
    example="vtok predict photo.jpg --checkpoint run/ --top 3",
    positional="images",
)
