"""``vtok explain --faithfulness``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from visualtokens.cli.report import table, unreadable_as_json, warn_unreadable
from visualtokens.cli.verb import Failure, Result
from visualtokens.errors import UserError

if TYPE_CHECKING:
    from visualtokens.cli.explain import ExplainConfig
    from visualtokens.data import BadImage, ImageDataset
    from visualtokens.explain import Judge, Score
    from visualtokens.train import Checkpoint


def measure(config: ExplainConfig, checkpoint: Checkpoint) -> Result:
    """Score our maps beside other methods' on the images of a dataset, print the table, draw the curves."""
    from visualtokens.data import open_dataset
    from visualtokens.explain import METHODS, Judge, Setting, gather
    from visualtokens.explain.faithfulness import HEADER

    save = Path(config.save or "faithfulness.png")
    if save.suffix != ".png":
        raise UserError(f"the curves are drawn as a picture; end --save {config.save!r} in .png")
    if not config.data:
        raise UserError("--faithfulness needs images to measure on; give --data")
    if config.images < 1:
        raise UserError(f"images={config.images} must be at least 1")
    dataset = open_dataset(config.data, config.split)
    setting = Setting(checkpoint.preprocess, layer=config.layer, of=config.of, batch=config.batch)
    judge = Judge(checkpoint.model, setting, methods=config.methods or list(METHODS), steps=config.steps)
    unreadable: list[BadImage] = []
    found = gather(_scores(config, dataset, judge, unreadable))
    warn_unreadable(unreadable)
    if not found.images:
        raise Failure(f"none of the images of {config.data} could be read")
    save.parent.mkdir(parents=True, exist_ok=True)
    found.plot().savefig(save, dpi=160)
    document = {
        "data": config.data,
        "split": config.split,
        "images": found.images,
        "methods": found.to_dict(),
        "unreadable": unreadable_as_json(unreadable),
        "saved": str(save),
    }
    head = f"{found.images} images, the predicted class of each; means with their standard errors:"
    text = f"{head}\n\n{table(found.rows(), header=HEADER, right=(1, 2, 3, 4))}\n\ncurves saved as {save}"
    return Result(text, document, code=1 if unreadable else 0)


def _scores(
    config: ExplainConfig, dataset: ImageDataset, judge: Judge, unreadable: list[BadImage]
) -> Iterator[dict[str, Score]]:
    import numpy as np
    from tqdm import tqdm

    from visualtokens.data import BadImage
    from visualtokens.explain.masks import find_mask, read_mask

    preprocess = judge.setting.preprocess
    chosen = np.linspace(0, len(dataset) - 1, min(config.images, len(dataset))).round().astype(int)
    for index in tqdm(chosen.tolist(), desc="judge", unit="image", leave=False, disable=None):
        try:
            image, _ = dataset[index]
            mask = None
            if config.masks:
                mask = read_mask(find_mask(dataset.path(index), config.masks), preprocess, image.size)
        except BadImage as bad:
            unreadable.append(bad)
        else:
            yield judge(preprocess(image), mask)
