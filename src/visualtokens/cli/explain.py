"""``vtok explain``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from visualtokens.cli.output import (
    checkpoint_files,
    log_header,
    refuse_overwriting,
    unreadable_as_json,
    warn_unreadable,
)
from visualtokens.cli.terminal import write_error
from visualtokens.cli.verb import Failure, Result, Verb
from visualtokens.errors import UserError, unknown
from visualtokens.files import write_atomically
from visualtokens.progress import count, one_image, track
from visualtokens.tables import printable, table
from visualtokens.tasks.options import DataOptions

if TYPE_CHECKING:
    from visualtokens.data import BadImage, ImageDataset
    from visualtokens.explain import Explanation, FaithfulnessEvaluator, Gallery, Origin, Score
    from visualtokens.tasks import Checkpoint


PAGE = "explanation.html"
MEASURED: tuple[str, ...] = ("data", "val_share", "data_args", "split", "images", "masks", "methods", "steps")
EXPLAINED: tuple[str, ...] = ("target", "top")


@dataclass(frozen=True, kw_only=True)
class ExplainConfig(DataOptions):
    """Show which regions of an image determine a checkpoint's prediction."""

    image: str = ""
    """Image file, or a folder of images. The name of its folder, if it is a class, is its label."""

    checkpoint: str
    """Checkpoint folder that `vtok train --out` wrote, or hf-hub:ORGANIZATION/NAME."""

    save: str = ""
    """Output file: a page (.html), or for one image also a picture (.png) or arrays (.npz).
    By default explanation.html, with --faithfulness faithfulness.png."""

    target: str | int | None = None
    """Class to explain; by default the predicted one."""

    layer: int = -1
    """Index of the grouping to show: 0 is the first of the model, -1 the last."""

    of: Literal["groups", "attention"] = "groups"
    """Maps to show and to measure: groups (patches of each cluster) or attention (patches that attend to
    it)."""

    top: int = 6
    """Number of clusters to show, most important first."""

    size: int | None = None
    """Side of the square input images; by default as in training."""

    batch: int = 16
    """Masked images per step."""

    faithfulness: bool = False
    """Measure on --data how faithful the maps are, compared with other methods."""

    data: str = ""
    """Images for --faithfulness: digits, digit_scenes, folder:PATH, csv:FILE, parquet:FILE or npz:FILE."""

    split: Literal["train", "val", "test"] = "val"
    """Split of the data: train, val or test."""

    masks: str = ""
    """Folder of foreground masks with the names of the images of --data, for localization metrics:
    1 foreground, 2 background, 3 undecided, or white on black."""

    methods: list[str] = field(default_factory=list)
    """Methods for --faithfulness: path, shapley, clusters, attention, rollout, relevance, grad-cam,
    integrated gradients, rise, random; by default all."""

    images: int = 100
    """Number of images of --data, evenly spaced."""

    steps: int = 24
    """Points of the deletion and insertion curves."""

    device: str = "auto"
    """Device: auto (an accelerator if there is one), cpu, cuda, cuda:1 or mps."""


def run(config: ExplainConfig) -> Result:
    """Explain one image or a folder, or measure faithfulness."""
    if bool(config.image) == config.faithfulness:
        raise UserError("give an image or a folder to explain, or --faithfulness with --data")
    _refuse_without_effect(config)
    if not config.faithfulness:
        refuse_overwriting([Path(config.save or PAGE)], _explained_files(config))
    checkpoint = _load(config)
    if config.faithfulness:
        return _measure_faithfulness(config, checkpoint)
    target = _target(config, checkpoint.classes)
    if Path(config.image).is_dir():
        return _explain_folder(config, checkpoint, target)
    return _explain_image(config, checkpoint, target)


def _refuse_without_effect(config: ExplainConfig) -> None:
    """Raise :class:`UserError` for an option of the other kind of run: an explanation or --faithfulness."""
    names = EXPLAINED if config.faithfulness else MEASURED
    other = "with" if config.faithfulness else "without"
    for option in fields(config):
        default = option.default if option.default_factory is MISSING else option.default_factory()
        if option.name in names and (given := getattr(config, option.name)) != default:
            raise UserError(
                f"{option.name}={printable(str(given))} has no effect {other} --faithfulness; leave it out"
            )


def _explained_files(config: ExplainConfig) -> Iterator[Path]:
    """Yield the input files, without the pages in the folder, which an earlier run may have written."""
    from visualtokens.explain.gallery import find_files

    image = Path(config.image)
    yield from checkpoint_files(config.checkpoint)
    yield from (file for file in find_files(image) if file.suffix != ".html") if image.is_dir() else [image]


def _load(config: ExplainConfig) -> Checkpoint:
    """Load the checkpoint with the model to explain."""
    from dataclasses import replace

    from visualtokens.checkpoint import load

    checkpoint = load(config.checkpoint, device=config.device)
    checkpoint = replace(checkpoint, model=checkpoint.task.classifier(checkpoint))
    return checkpoint if config.size is None else checkpoint.task.resize(checkpoint, config.size)


def _target(config: ExplainConfig, classes: list[str]) -> int | None:
    if config.target is None:
        return None
    if str(config.target) not in classes:
        raise unknown("class", str(config.target), classes)
    return classes.index(str(config.target))


def _options(config: ExplainConfig, checkpoint: Checkpoint, target: int | None) -> dict[str, Any]:
    """Return the arguments that ``explain`` and ``explain_folder`` share."""
    return dict(
        preprocess=checkpoint.preprocess,
        target=target,
        layer=config.layer,
        top=config.top,
        of=config.of,
        batch=config.batch,
        classes=checkpoint.classes,
    )


def _origin(config: ExplainConfig, checkpoint: Checkpoint) -> Origin:
    """Return the footer of a page: the model, the name of the checkpoint's folder, and the current date."""
    from datetime import date

    from visualtokens.explain import Origin
    from visualtokens.train.folder import BEST

    folder = Path(config.checkpoint).resolve()
    name = f"{folder.parent.name}/{folder.name}" if folder.name == BEST else folder.name
    return Origin(model=checkpoint.config["architecture"], checkpoint=name, date=date.today())


def _explain_image(config: ExplainConfig, checkpoint: Checkpoint, target: int | None) -> Result:
    from visualtokens.data import read_image
    from visualtokens.explain import explain
    from visualtokens.explain.gallery import class_of

    explanation = explain(
        checkpoint.model,
        read_image(config.image),
        method="cluster",
        **_options(config, checkpoint, target),
        truth=class_of(Path(config.image), checkpoint.classes),
    )
    saved = explanation.save(config.save or PAGE, origin=_origin(config, checkpoint))
    document = {
        "image": config.image,
        "predicted": checkpoint.classes[explanation.predicted],
        "target": checkpoint.classes[explanation.target],
        "about": explanation.about,
        "probability": float(explanation.probabilities[explanation.target]),
        "layer": explanation.layer,
        "clusters": [
            {
                "cluster": k,
                "importance": float(explanation.values[k]),
                "entropy": float(explanation.entropy[k]),
            }
            for k in explanation.order
        ],
        "saved": str(saved),
    }
    return Result(_text(explanation, str(saved)), document)


def _text(explanation: Explanation, saved: str) -> str:
    target = explanation.target
    before, about = float(explanation.probabilities[target]), printable(explanation.about)
    rows = [(str(k), f"{explanation.masked_probability(k):.1%}") for k in explanation.top]
    return (
        f"The probability of {explanation.class_name(target)!r} is {before:.1%}. {about}\n"
        f"Its probability when one cluster is hidden ({explanation.layer}):\n\n"
        + table(rows, header=("cluster", "probability"), right=(0, 1))
        + f"\n\nsaved as {printable(saved)}"
    )


def _measure_faithfulness(config: ExplainConfig, checkpoint: Checkpoint) -> Result:
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
    setting = Setting(checkpoint.preprocess, layer=config.layer, of=config.of, batch=config.batch)
    methods = config.methods or methods_for(checkpoint.model)
    evaluator = FaithfulnessEvaluator(checkpoint.model, setting, methods=methods, steps=config.steps)
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


def _explain_folder(config: ExplainConfig, checkpoint: Checkpoint, target: int | None) -> Result:
    """Explain a folder on one page. Images that cannot be explained are listed; the exit code is then 1.

    Files that are no images, such as notes or an earlier page, are ignored.
    SIGINT and SIGTERM stop after the current image; the page shows those before it.
    """
    from visualtokens.explain import explain_folder
    from visualtokens.processes import catch_signals

    save = config.save or PAGE
    if not save.endswith(".html"):  # checked before the work
        raise UserError(f"a folder is explained on one page; end --save {config.save!r} in .html")
    log_header(config.checkpoint, checkpoint, data=config.image, out=save)
    with catch_signals() as stop:
        gallery = explain_folder(
            checkpoint.model,
            config.image,
            **_options(config, checkpoint, target),
            stop=stop.__bool__,
        )
    saved = gallery.write(save, origin=_origin(config, checkpoint))
    warn_unreadable(gallery.refused)
    document = {"folder": config.image, **gallery.to_dict(), "saved": str(saved)}
    code = 1 if gallery.refused else 0
    if gallery.not_reached and stop.signal is not None:
        write_error(
            f"interrupted after {gallery.files - gallery.not_reached} of {count(gallery.files, 'file')}\n"
        )
        code = 128 + stop.signal
    return Result(_folder_text(gallery, str(saved)), document, code=code)


def _folder_text(gallery: Gallery, saved: str) -> str:
    rows = [
        (entry.name, f"{entry.probability:.1%}", entry.target, f"{entry.clusters[0][1]:z.1%}")
        for entry in gallery.entries
    ]
    head = table(
        rows, header=("image", "probability", "class", "importance of its top cluster"), right=(1, 3)
    )
    left_out = f", {count(len(gallery.refused), 'image')} left out" if gallery.refused else ""
    ignored = f", {count(len(gallery.ignored), 'other file')} ignored" if gallery.ignored else ""
    explained = f"{count(len(rows), 'image')} explained"
    return f"{head}\n\n{explained}{left_out}{ignored}; saved as {printable(saved)}"


GROUPS = {
    "images and model": ("image", "checkpoint", "size"),
    "explanation": ("target", "layer", "of", "top", "save"),
    "faithfulness": ("faithfulness", "data", "split", "images", "masks", "methods", "steps"),
    "hardware and speed": ("device", "batch"),
}
VERB = Verb(
    config=ExplainConfig,
    run=run,
    groups=GROUPS,
    example="vtok explain photo.jpg --checkpoint run/ --save out.html",
    positional="image",
)
