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
    warn_unreadable,
)
from visualtokens.cli.terminal import write_error
from visualtokens.cli.verb import Result, Verb
from visualtokens.errors import UserError, unknown
from visualtokens.progress import count
from visualtokens.tables import printable, table
from visualtokens.tasks.options import DataOptions

if TYPE_CHECKING:
    from PIL import Image

    from visualtokens.explain import Explanation, Gallery, Origin
    from visualtokens.tasks import Checkpoint


PAGE = "explanation.html"
MEASURED: tuple[str, ...] = ("data", "val_share", "data_args", "split", "images", "masks", "methods", "steps")
DATA = {"data", "val_share", "data_args", "split"}
EXPLAINED: tuple[str, ...] = (
    "target",
    "against",
    "object",
    "top",
    "method",
    "regions",
    "hide",
    "budget",
    "animate",
    "interactive",
)


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
    """Class to explain; by default the predicted one, of a segmenter the one with the largest area."""

    against: str | int | None = None
    """Another class: explains why the target, and not this one."""

    object: int = 1
    """Object of a detector to explain: 1 has the highest score, of the target class if one is given."""

    method: Literal["shapley", "greedy", "gradient", "cluster"] | None = None
    """How regions are valued: shapley (share in the score), greedy (hidden one after the other), gradient
    (one backward pass) or cluster (PaCa-ViT: one cluster masked at a time)."""

    regions: int | None = None
    """Number of regions, at most; by default 24 of the model's own tokens, or 12 made from its features."""

    hide: Literal["mean", "black", "blur", "inpaint", "tokens"] = "mean"
    """What replaces hidden regions: mean (colour), black, blur, inpaint, or tokens (removed inside a ViT)."""

    budget: int = 128
    """Forward passes per image; more give smaller errors."""

    layer: int | None = None
    """Index of the grouping that regions come from: 0 is the first of the model, -1 the last; by default the
    last, or the model's features if its clusters are vague."""

    of: Literal["groups", "attention"] = "groups"
    """Maps of --method cluster: groups (patches of each cluster) or attention (patches that attend to it)."""

    top: int = 6
    """Number of regions to show, most important first."""

    animate: str = ""
    """File (.webp or .gif) for an animation of the patches of one image flowing together into tokens."""

    interactive: bool = False
    """Adds the token view to the page of one image: pointing at a patch lights its token in every layer."""

    size: int | None = None
    """Side of the square input images; by default as in training."""

    batch: int = 16
    """Masked images per step."""

    faithfulness: bool = False
    """Measure on --data how faithful the maps are, compared with other methods."""

    data: str = ""
    """Dataset for --faithfulness: digits, digit_scenes, folder:PATH, csv:FILE, parquet:FILE or npz:FILE.
    Without it, any dataset of the task: the clusters are ranked by the drop of its metric."""

    split: Literal["train", "val", "test"] = "val"
    """Split of the data: train, val or test."""

    masks: str = ""
    """Folder of foreground masks with the names of the images of --data, for localization metrics:
    1 foreground, 2 background, 3 undecided, or white on black."""

    methods: list[str] = field(default_factory=list)
    """Methods for --faithfulness: pixels, path, shapley, clusters, attention, rollout, relevance, grad-cam,
    integrated gradients, rise, random; by default all."""

    images: int = 100
    """Number of images of --data, evenly spaced."""

    steps: int = 24
    """Points of the deletion and insertion curves."""

    device: str = "auto"
    """Device: auto (an accelerator if there is one), cpu, cuda, cuda:1 or mps."""


def run(config: ExplainConfig) -> Result:
    """Explain one image or a folder, rank clusters on a dataset, or measure faithfulness."""
    if bool(config.image) == (config.faithfulness or bool(config.data)):
        raise UserError("give an image or a folder to explain, or --data, which --faithfulness needs too")
    _refuse_without_effect(config)
    if config.interactive and (not (config.save or PAGE).endswith(".html") or Path(config.image).is_dir()):
        raise UserError("interactive=True is for the page of one image; give an image and --save NAME.html")
    if config.image:
        outputs = [Path(config.save or PAGE), *([Path(config.animate)] if config.animate else [])]
        refuse_overwriting(outputs, _explained_files(config))
    checkpoint = _load(config)
    if config.faithfulness:
        from visualtokens.cli.faithfulness import measure

        return measure(config, checkpoint)
    if config.data:
        from visualtokens.cli.ranking import rank

        return rank(config, checkpoint)
    if Path(config.image).is_dir():
        return _explain_folder(config, checkpoint)
    return _explain_image(config, checkpoint)


def _refuse_without_effect(config: ExplainConfig) -> None:
    """Raise :class:`UserError` for an option of another kind of run than this one."""
    names, kind = MEASURED, "without --faithfulness"
    if config.faithfulness:
        names, kind = EXPLAINED, "with --faithfulness"
    elif config.data:
        names = ("save", *set(EXPLAINED) - {"top", "method"}, *set(MEASURED) - DATA)
        kind = "when clusters are ranked on a dataset"
    for option in fields(config):
        default = option.default if option.default_factory is MISSING else option.default_factory()
        if option.name in names and (given := getattr(config, option.name)) != default:
            raise UserError(f"{option.name}={printable(str(given))} has no effect {kind}; leave it out")


def _explained_files(config: ExplainConfig) -> Iterator[Path]:
    """Yield the input files, without the pages in the folder, which an earlier run may have written."""
    from visualtokens.explain.gallery import find_files

    image = Path(config.image)
    yield from checkpoint_files(config.checkpoint)
    yield from (file for file in find_files(image) if file.suffix != ".html") if image.is_dir() else [image]


def _load(config: ExplainConfig) -> Checkpoint:
    """Load the checkpoint to explain, at the given size."""
    from visualtokens.checkpoint import load

    checkpoint = load(config.checkpoint, device=config.device)
    if "object" not in checkpoint.task.explain_options and config.object != 1:
        raise UserError(
            f"object={config.object} is for detectors, not for {checkpoint.task.name}; leave it out"
        )
    return checkpoint if config.size is None else checkpoint.task.resize(checkpoint, config.size)


def _class(name: str | int | None, classes: list[str]) -> int | None:
    if name is None:
        return None
    if str(name) not in classes:
        raise unknown("class", str(name), classes)
    return classes.index(str(name))


def _options(config: ExplainConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the options of ``Checkpoint.explain``."""
    options: dict[str, Any] = dict(
        target=_class(config.target, checkpoint.classes),
        against=_class(config.against, checkpoint.classes),
        regions=config.regions,
        hide=config.hide,
        budget=config.budget,
        layer=config.layer,
        top=config.top,
        of=config.of,
        batch=config.batch,
    )
    if config.method is not None:
        options["method"] = config.method
    if "object" in checkpoint.task.explain_options:
        options["object"] = config.object
    return options


def _origin(config: ExplainConfig, checkpoint: Checkpoint) -> Origin:
    """Return the footer of a page: the model, the name of the checkpoint's folder, and the current date."""
    from datetime import date

    from visualtokens.explain import Origin
    from visualtokens.train.folder import BEST

    folder = Path(config.checkpoint).resolve()
    name = f"{folder.parent.name}/{folder.name}" if folder.name == BEST else folder.name
    return Origin(model=checkpoint.config["architecture"], checkpoint=name, date=date.today())


def _explain_image(config: ExplainConfig, checkpoint: Checkpoint) -> Result:
    from visualtokens.data import read_image
    from visualtokens.explain.gallery import class_of

    image, options = read_image(config.image), _options(config, checkpoint)
    truth = class_of(Path(config.image), checkpoint.classes)
    explanation = checkpoint.explain(image, **options, truth=truth)
    save = config.save or PAGE
    beside = None
    if save.endswith(".html") and _is_mistake(explanation, config):
        beside = checkpoint.explain(
            image, **options | dict(target=truth, regions=explanation.regions), truth=truth
        )
    page: dict[str, Any] = dict(beside=beside, interactive=config.interactive)
    saved = [explanation.save(save, origin=_origin(config, checkpoint), **page)]
    if config.animate:
        saved.append(explanation.animate(config.animate))
    names = [str(path) for path in saved]
    return Result(_text(explanation, names), _document(config, explanation, names))


def _is_mistake(explanation: Explanation, config: ExplainConfig) -> bool:
    """Whether a wrong prediction is explained by regions, which the true class can be compared on."""
    known = explanation.truth is not None and explanation.kind == "image"
    wrong = known and explanation.target_is_prediction and explanation.truth != explanation.predicted
    return wrong and explanation.method != "cluster" and config.against is None


def _document(config: ExplainConfig, explanation: Explanation, saved: list[str]) -> dict[str, Any]:
    variants = {
        name: {"regions": list(variant.kept), "score": variant.score}
        for name, variant in (("only", explanation.only), ("without", explanation.without))
        if variant is not None
    }
    regions = [
        {
            "region": k,
            "value": float(explanation.values[k]),
            "error": None if explanation.errors is None else float(explanation.errors[k]),
            "entropy": float(explanation.entropy[k]),
        }
        for k in explanation.order
    ]
    return {
        "image": config.image,
        "predicted": explanation.class_name(explanation.predicted),
        "target": explanation.class_name(explanation.target),
        "about": explanation.about,
        "probability": float(explanation.probabilities[explanation.target]),
        "score": explanation.full,
        "score_name": explanation.score_name,
        "layer": explanation.layer,
        "method": explanation.method,
        "forward_passes": explanation.evaluations,
        "regions": regions,
        **variants,
        "saved": saved[0],
        **({"animation": saved[1]} if len(saved) > 1 else {}),
    }


def _text(explanation: Explanation, saved: list[str]) -> str:
    target, about = explanation.class_name(explanation.target), printable(explanation.about)
    score = explanation.score_name
    lines = [f"The {score} of {target!r} is {explanation.full:.3f}. {about}"]
    if explanation.method == "cluster":
        rows = [(str(k), f"{explanation.masked_probability(k):.3f}") for k in explanation.top]
        lines += [f"Its {score} when one cluster is hidden ({explanation.layer}):", ""]
        lines.append(table(rows, header=("cluster", score), right=(0, 1)))
    else:
        lines += [f"What each region adds to it ({explanation.method}, {explanation.layer}):", ""]
        lines.append(_value_table(explanation))
        if explanation.only is not None and explanation.without is not None:
            only, without = explanation.only.score, explanation.without.score
            lines += ["", f"Only regions {explanation.highlighted}: {only:.3f}. Without them: {without:.3f}."]
    return "\n".join([*lines, "", f"saved as {printable(', '.join(saved))}"])


def _value_table(explanation: Explanation) -> str:
    from visualtokens.explain.cards import INTERVAL

    rows = []
    for number, k in enumerate(explanation.listed, start=1):
        error = "" if explanation.errors is None else f"± {INTERVAL * explanation.errors[k]:.3f}"
        rows.append((str(number), f"{explanation.values[k]:+z.3f}", error))
    return table(rows, header=("region", "value", "95 %"), right=(0, 1, 2))


def _explain_folder(config: ExplainConfig, checkpoint: Checkpoint) -> Result:
    """Explain a folder on one page. Images that cannot be explained are listed; the exit code is then 1.

    Files that are no images, such as notes or an earlier page, are ignored.
    SIGINT and SIGTERM stop after the current image; the page shows those before it.
    """
    from visualtokens.explain import explain_images
    from visualtokens.processes import catch_signals

    save = config.save or PAGE
    if not save.endswith(".html"):  # checked before the work
        raise UserError(f"a folder is explained on one page; end --save {config.save!r} in .html")
    if config.animate:
        raise UserError(f"animate={config.animate!r} shows one image; give an image, not a folder")
    options = _options(config, checkpoint)

    def explain_one(image: Image.Image, truth: int | None) -> Explanation:
        return checkpoint.explain(image, **options, truth=truth)

    log_header(config.checkpoint, checkpoint, data=config.image, out=save)
    with catch_signals() as stop:
        gallery = explain_images(config.image, explain_one, classes=checkpoint.classes, stop=stop.__bool__)
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
        (entry.name, f"{entry.probability:.1%}", entry.target, f"{entry.regions[0][1]:+z.3f}")
        for entry in gallery.entries
    ]
    head = table(rows, header=("image", "probability", "class", "value of its top region"), right=(1, 3))
    left_out = f", {count(len(gallery.refused), 'image')} left out" if gallery.refused else ""
    ignored = f", {count(len(gallery.ignored), 'other file')} ignored" if gallery.ignored else ""
    explained = f"{count(len(rows), 'image')} explained"
    return f"{head}\n\n{explained}{left_out}{ignored}; saved as {printable(saved)}"


GROUPS = {
    "images and model": ("image", "checkpoint", "size"),
    "explanation": ("target", "against", "object", "top", "save", "animate", "interactive"),
    "method": ("method", "regions", "hide", "budget", "layer", "of"),
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
