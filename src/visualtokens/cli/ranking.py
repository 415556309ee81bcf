"""``vtok explain --data``: the clusters that a metric depends on, over a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from visualtokens.cli.output import log_header
from visualtokens.cli.verb import Result
from visualtokens.progress import count
from visualtokens.tables import table

if TYPE_CHECKING:
    from visualtokens.cli.explain import ExplainConfig
    from visualtokens.tasks import Checkpoint


def rank(config: ExplainConfig, checkpoint: Checkpoint) -> Result:
    """Evaluate by the task's metric, with one cluster after the other masked in every image."""
    from visualtokens.explain.ranking import rank_clusters
    from visualtokens.tasks.evaluation import require_classes
    from visualtokens.tasks.task import Loading

    task = checkpoint.task
    dataset = task.open_data(checkpoint, config.data, config.split, **config.data_options)
    require_classes(config.data, dataset.classes, config.checkpoint, checkpoint.classes)
    images = count(len(dataset), "image")
    log_header(config.checkpoint, checkpoint, data=f"{config.data}, split {config.split}, {images}")
    batches = task.loader(dataset, checkpoint.preprocess, Loading(batch=config.batch))
    module, black = task.image_module(checkpoint)

    def evaluate() -> float:
        return task.evaluate(checkpoint, batches, progress=False).metrics[task.score]

    found = rank_clusters(module, black, evaluate, layer=config.layer)
    rows = [(str(k), f"{found.masked[k]:.4f}", f"{found.drops[k]:+z.4f}") for k in found.order[: config.top]]
    text = (
        f"{task.score} {found.full:.4f} on {images}. With one cluster of {found.layer} masked in each:\n\n"
        + table(rows, header=("cluster", task.score, "drop"), right=(0, 1, 2))
    )
    document = {
        "data": config.data,
        "split": config.split,
        "images": len(dataset),
        "metric": task.score,
        "value": found.full,
        "layer": found.layer,
        "clusters": [{"cluster": k, "value": found.masked[k], "drop": found.drops[k]} for k in found.order],
    }
    return Result(text, document)
