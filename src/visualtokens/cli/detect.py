"""What ``vtok eval`` and ``vtok predict`` do with a checkpoint that was trained to detect."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visualtokens.cli.output import each_image, table, unreadable_as_json, warn_unreadable
from visualtokens.cli.parse import Result
from visualtokens.cli.tasks import require_classes

if TYPE_CHECKING:
    from PIL import Image

    from visualtokens.cli.eval import EvalConfig
    from visualtokens.cli.predict import PredictConfig
    from visualtokens.tasks.detect import Evaluation

SHOWN = 30  # classes in the table
BATCH = 4
SCORE = 0.5


def evaluate(config: EvalConfig) -> Result:
    """Judge a checkpoint on a dataset of images with objects."""
    from visualtokens.data.detection import create_detection_loader, open_detection
    from visualtokens.tasks import detect
    from visualtokens.train import pick_device
    from visualtokens.train.detect import load_detector

    checkpoint = load_detector(config.checkpoint, size=config.size)
    dataset = open_detection(config.data, config.split, masks=checkpoint.model.has_masks)
    require_classes(config.data, dataset.classes, config.checkpoint, checkpoint.classes)
    batch = BATCH if config.batch is None else config.batch
    loader = create_detection_loader(dataset, sizing=None, batch=batch, workers=config.workers)
    model = checkpoint.model.to(pick_device(config.device))
    found = detect.evaluate(model, loader, classes=len(checkpoint.classes))
    warn_unreadable(found.unreadable)
    document = {
        "checkpoint": config.checkpoint,
        "data": config.data,
        "split": config.split,
        **found.metrics,
        "images": found.images,
        "objects": found.objects,
        "classes": checkpoint.classes,
        "boxes": asdict(found.boxes),
        "masks": None if found.masks is None else asdict(found.masks),
        "unreadable": unreadable_as_json(found.unreadable),
    }
    return Result(_text(found, checkpoint.classes), document)


def _text(found: Evaluation, classes: list[str]) -> str:
    kinds = {"boxes": found.boxes} | ({"masks": found.masks} if found.masks else {})
    rows = [
        (kind, *map(_percent, (p.ap, p.ap50, p.ap75, p.small, p.medium, p.large)))
        for kind, p in kinds.items()
    ]
    header = ("", "AP", "AP50", "AP75", "small", "medium", "large")
    head = f"{found.objects} objects on {found.images} images\n\n" + table(
        rows, header=header, right=range(1, 7)
    )
    judged = sorted((ap, i) for i, ap in enumerate(found.boxes.by_class) if ap is not None)
    weak = [(classes[i], _percent(ap)) for ap, i in judged[:SHOWN]]
    more = len(judged) - len(weak)
    foot = f"\n… and {more} classes that do better; --json has all" if more else ""
    return f"{head}\n\n" + table(weak, header=("class", "box AP"), right=(1,)) + foot


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def predict(config: PredictConfig, *, out: str) -> Result:
    """Draw what is found on every image; exit code 1 if one is unreadable."""
    from visualtokens.tasks import detect
    from visualtokens.train import pick_device
    from visualtokens.train.detect import load_detector

    checkpoint = load_detector(config.checkpoint)
    model = checkpoint.model.to(pick_device(config.device))
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)

    def say(image: Image.Image, name: str) -> dict[str, Any]:
        detections = detect.predict(model, image, score=SCORE if config.score is None else config.score)
        picture = folder / f"{name}_objects.png"
        detect.draw(image, detections, checkpoint.classes).save(picture)
        return {"picture": str(picture), "objects": detections.to_dicts(checkpoint.classes)}

    return each_image(config.images, say, text=_lines)


def _lines(prediction: dict[str, Any]) -> str:
    objects = prediction["objects"]
    lines = [f"  {o['score']:6.1%}  {o['class']}  at {', '.join(map(str, o['box']))}" for o in objects]
    return "\n".join(
        [f"{prediction['image']}: {prediction['picture']}", *(lines or ["  nothing that is sure enough"])]
    )
