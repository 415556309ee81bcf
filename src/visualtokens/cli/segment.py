"""What ``vtok eval`` and ``vtok predict`` do with a checkpoint that was trained to segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from visualtokens.cli.output import each_image, table, unreadable_as_json, warn_unreadable
from visualtokens.cli.parse import Result
from visualtokens.cli.tasks import require_classes

if TYPE_CHECKING:
    from PIL import Image

    from visualtokens.cli.eval import EvalConfig
    from visualtokens.cli.predict import PredictConfig
    from visualtokens.tasks.segment import Inference, SegmentEvaluation
    from visualtokens.train.segment import SegmentCheckpoint

SHOWN = 30  # classes in the table
BATCH = 16


def evaluate(config: EvalConfig) -> Result:
    """Judge a checkpoint on a dataset of images with masks."""
    from visualtokens.data.segmentation import open_segmentation
    from visualtokens.data.segmentation_loader import create_segment_loader
    from visualtokens.tasks import segment
    from visualtokens.train import pick_device
    from visualtokens.train.segment import load_segmenter

    checkpoint = load_segmenter(config.checkpoint)
    classes = checkpoint.classes
    dataset = open_segmentation(config.data, config.split)
    require_classes(config.data, dataset.classes, config.checkpoint, classes)
    preprocess = checkpoint.preprocess
    if config.size is not None:
        preprocess = replace(preprocess, size=(config.size, config.size))
    batch = BATCH if config.batch is None else config.batch
    loader = create_segment_loader(dataset, preprocess, batch=batch, train=False, workers=config.workers)
    model = checkpoint.model.to(pick_device(config.device))
    inference = _inference(checkpoint, config.scales, config.flip, config.window)
    found = segment.evaluate(model, loader, classes=classes, inference=inference)
    warn_unreadable(found.unreadable)
    document = {
        "checkpoint": config.checkpoint,
        "data": config.data,
        "split": config.split,
        **found.metrics,
        "images": found.images,
        "classes": classes,
        "iou": found.iou,
        "class_accuracy_by_class": found.class_accuracy,
        "confusion": found.confusion.tolist(),
        "unreadable": unreadable_as_json(found.unreadable),
    }
    return Result(_text(found, classes), document)


def _inference(
    checkpoint: SegmentCheckpoint, scales: Sequence[float], flip: bool, window: int | None
) -> Inference:
    """How the model looks at an image: as the checkpoint does by itself, but for what is given."""
    own = checkpoint.inference
    return replace(
        own, scales=tuple(scales) or own.scales, flip=flip, window=own.window if window is None else window
    )


def _text(found: SegmentEvaluation, classes: list[str]) -> str:
    head = (
        f"mIoU {found.miou:.1%}, pixel accuracy {found.pixel_accuracy:.1%}, loss {found.loss:.3f} "
        f"({found.images} images)"
    )
    judged = [(value, i) for i, value in enumerate(found.iou) if value is not None]
    pixels = found.confusion.sum(1) / found.confusion.sum()  # (classes,)
    rows = [(classes[i], f"{pixels[i].item():.1%}", f"{value:.1%}") for value, i in sorted(judged)[:SHOWN]]
    more = len(judged) - len(rows)
    foot = f"\n… and {more} classes that do better; --json has all" if more else ""
    return f"{head}\n\n" + table(rows, header=("class", "pixels", "IoU"), right=(1, 2)) + foot


def predict(config: PredictConfig, *, out: str) -> Result:
    """Write an overlay and the numbers of the classes of every image; exit code 1 if one is unreadable."""
    from visualtokens.tasks import segment
    from visualtokens.train import pick_device
    from visualtokens.train.segment import load_segmenter

    checkpoint = load_segmenter(config.checkpoint)
    classes, preprocess = checkpoint.classes, checkpoint.preprocess
    model = checkpoint.model.to(pick_device(config.device))
    inference = _inference(checkpoint, config.scales, config.flip, config.window)

    def say(image: Image.Image, name: str) -> dict[str, Any]:
        labels = segment.predict(model, image, preprocess=preprocess, classes=classes, inference=inference)
        drawn, numbers = segment.save_prediction(image, labels, classes=classes, out=out, name=name)
        counts = labels.flatten().long().bincount(minlength=len(classes))
        order = counts.argsort(descending=True).tolist()
        shares = {classes[i]: counts[i].item() / labels.numel() for i in order if counts[i]}
        return {"overlay": str(drawn), "classes": str(numbers), "shares": shares}

    return each_image(config.images, say, text=_lines)


def _lines(prediction: dict[str, Any]) -> str:
    shares = [f"  {share:6.1%}  {name}" for name, share in list(prediction["shares"].items())[:SHOWN]]
    return "\n".join([f"{prediction['image']}: {prediction['overlay']}, {prediction['classes']}", *shares])
