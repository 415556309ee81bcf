"""``vtok explain --faithfulness``: how faithful the maps are, measured on a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from visualtokens.cli.output import (
    checkpoint_files,
    log_header,
    refuse_overwriting,
    unreadable_as_json,
    warn_unreadable,
)
from visualtokens.cli.verb import Failure, Result
from visualtokens.errors import UserError
from visualtokens.files import write_atomically
from visualtokens.progress import count, one_image, track
from visualtokens.tables import printable, table

if TYPE_CHECKING:
    from visualtokens.cli.explain import ExplainConfig
    from visualtokens.data import BadImage, ImageDataset
    from visualtokens.explain import FaithfulnessEvaluator, Score
    from visualtokens.tasks import Checkpoint


def measure(config: ExplainConfig, checkpoint: Checkpoint) -> Result:
    """Evaluate our maps and other methods on a dataset; print the metrics, plot the curves."""
    from visualtokens.data import open_dataset
    from visualtokens.explain import FaithfulnessEvaluator, Setting, gather
    from visualtokens.explain.baselines import methods_for
    from visualtokens.explain.faithfulness import HEADER

    save = Path(config.save or "faithfulness.png")
    if save.suffix != ".png":
        raise UserError(f"the curves are drawn as a picture; end --save {config.save!r} in .png")
    if not config.data:
        raise UserError("--faithfulness needs images to measure on; give --data")
    if config.images < 1:
        raise UserError(f"images={config.images} must be at least 1")
    dataset = open_dataset(config.data, config.split, **config.data_options)
    refuse_overwriting([save], _measured_files(config, dataset))
    classifier = checkpoint.task.classifier(checkpoint)
    setting = Setting(checkpoint.preprocess, layer=config.layer, of=config.of, batch=config.batch)
    methods = config.methods or methods_for(classifier)
    evaluator = FaithfulnessEvaluator(classifier, setting, methods=methods, steps=config.steps)
    images = count(min(config.images, len(dataset)), "image")
    data = f"{config.data}, split {config.split}, {images}"
    log_header(config.checkpoint, checkpoint, data=data, out=str(save))
    unreadable: list[BadImage] = []
    found = gather(_scores(config, dataset, evaluator, unreadable))
    warn_unreadable(unreadable)
    if not found.images:
        raise Failure(f"none of the images of {config.data} could be read")
    save.parent.mkdir(parents=True, exist_ok=True)
    figure = found.plot()
    write_atomically(save, lambda temporary: figure.savefig(temporary, dpi=160, format="png"))
    document = {
        "data": config.data,
        "split": config.split,
        "images": found.images,
        "methods": found.to_dict(),
        "unreadable": unreadable_as_json(unreadable),
        "saved": str(save),
    }
    head = f"{count(found.images, 'image')}, the predicted class of each; means with their standard errors:"
    drawn = table(found.rows(), header=HEADER, right=(1, 2, 3, 4, 5))
    text = f"{head}\n\n{drawn}\n\ncurves saved as {printable(str(save))}"
    return Result(text, document, code=1 if unreadable else 0)


def _measured_files(config: ExplainConfig, dataset: ImageDataset) -> Iterator[str | Path]:
    """Yield the input files."""
    yield from checkpoint_files(config.checkpoint)
    yield from map(dataset.path, range(len(dataset)))
    if config.masks:
        yield from Path(config.masks).rglob("*")


def _scores(
    config: ExplainConfig, dataset: ImageDataset, evaluator: FaithfulnessEvaluator, unreadable: list[BadImage]
) -> Iterator[dict[str, Score]]:
    import numpy as np

    from visualtokens.data import BadImage
    from visualtokens.explain.foreground import find_mask, read_foreground

    preprocess = evaluator.setting.preprocess
    chosen = np.linspace(0, len(dataset) - 1, min(config.images, len(dataset))).round().astype(int)
    for index in track(chosen.tolist(), "evaluate", unit="image", images=one_image):
        try:
            image, _ = dataset[index]
            mask = None
            if config.masks:
                mask = read_foreground(find_mask(dataset.path(index), config.masks), preprocess, image.size)
        except BadImage as bad:
            unreadable.append(bad)
        else:
            yield evaluator.evaluate(preprocess(image), mask)
