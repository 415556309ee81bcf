"""``vtok predict``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visualtokens.cli.output import checkpoint_files, log_header, refuse_overwriting
from visualtokens.cli.stream import for_each_image, unique_names
from visualtokens.cli.verb import Stream, Verb, options_of_task
from visualtokens.progress import count
from visualtokens.tables import printable

if TYPE_CHECKING:
    from PIL import Image

COMMON = ("images", "checkpoint", "device")  # the others depend on the task


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """Print what a checkpoint predicts for your images; segmentations and detections are drawn as well."""

    images: list[str]
    """Image files."""

    checkpoint: str
    """Checkpoint folder that `vtok train --out` wrote."""

    top: int = 5
    """Classification: number of classes to print, most probable first."""

    out: str | None = None
    """Segmentation and detection: folder for the pictures; by default predictions."""

    score: float | None = None
    """Detection: minimum score, from 0 to 1; by default 0.5."""

    scales: list[float] = field(default_factory=list)
    """Segmentation: average the predictions at these relative sizes, such as 0.75 1 1.25."""

    flip: bool = False
    """Segmentation: average with the prediction of the mirrored image."""

    window: int | None = None
    """Segmentation: side of a sliding window; by default the model sees the whole image."""

    device: str = "auto"
    """Device: auto (an accelerator if there is one), cpu, cuda, cuda:1 or mps."""


def run(config: PredictConfig) -> Stream:
    """Predict image by image. Unreadable images do not stop the others; the exit code is then 1."""
    from visualtokens.checkpoint import load

    checkpoint = load(config.checkpoint, device=config.device)
    task = checkpoint.task
    own = (*task.predict_options, *(("out",) if task.pictures else ()))
    options = options_of_task(config, task, common=COMMON, own=own)
    out = Path(options.pop("out", "predictions"))
    pictures = (out / f"{name}_{kind}.png" for name in unique_names(config.images) for kind in task.pictures)
    refuse_overwriting(pictures, [*config.images, *checkpoint_files(config.checkpoint)])
    log_header(
        config.checkpoint,
        checkpoint,
        data=count(len(config.images), "image"),
        out=str(out) if task.pictures else "",
    )

    def describe(image: Image.Image, path: str, name: str) -> tuple[str, dict[str, Any]]:
        prediction = checkpoint.predict(image, **options)
        files = {kind: str(file) for kind, file in prediction.save(image, out, name).items()}
        head = f"{path}: {', '.join(files.values())}" if files else path
        return f"{printable(head)}\n{prediction.text()}", {**files, **prediction.to_dict()}

    return for_each_image(config.images, describe)


VERB = Verb(
    config=PredictConfig,
    run=run,
    example="vtok predict photo.jpg --checkpoint run/ --top 3",
    positional="images",
)
