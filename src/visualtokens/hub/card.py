"""The model card of a checkpoint: what it predicts, how it was trained, what it reached, how to use it.

Everything that comes from files, such as the names of classes, is escaped: it cannot become markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from shlex import quote
from typing import Any

import timm
from huggingface_hub import EvalResult, ModelCardData

import visualtokens
from visualtokens.errors import UserError, unknown
from visualtokens.progress import count, model_name, parameters
from visualtokens.tables import metric_name, printable
from visualtokens.tasks import Checkpoint
from visualtokens.train.config import TrainConfig

# The Hub's identifiers of licences.
LICENSES = (
    *("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "isc", "zlib", "unlicense", "wtfpl", "ms-pl"),
    *("gpl-2.0", "gpl-3.0", "lgpl-2.1", "lgpl-3.0", "agpl-3.0", "mpl-2.0", "epl-2.0", "eupl-1.2"),
    *("cc0-1.0", "cc-by-3.0", "cc-by-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0", "cc-by-nd-4.0", "cc-by-nc-3.0"),
    *("cc-by-nc-4.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0"),
    *("openrail", "creativeml-openrail-m", "bigscience-openrail-m", "odbl", "odc-by", "other"),
)
PIPELINES = {  # the Hub's names of tasks
    "classify": "image-classification",
    "segment": "image-segmentation",
    "detect": "object-detection",
}
VERBS = {"classify": "recognizes images", "segment": "labels pixels", "detect": "finds objects"}
METRICS = {"accuracy": "accuracy", "miou": "mean_iou"}  # the Hub's names of metrics
LISTED = 20  # classes that are listed at once; more are folded
# Options that do not change what is learned.
NOT_RECIPE = (
    *("out", "overwrite", "resume", "workers", "device", "save_every", "keep", "log", "log_every"),
    *("max_bad_steps", "max_bad_images", "model", "data", "task"),
)


@dataclass(frozen=True)
class Figures:
    """What the log of a run says of the weights."""

    epoch: int
    epochs: int
    metrics: Mapping[str, float]  # of the validation images


@dataclass(frozen=True)
class Picture:
    """A picture in the repository, and what it shows."""

    path: str
    caption: str


@dataclass(frozen=True)
class Pictures:
    """The pictures of a card."""

    curves: Picture | None = None
    examples: Sequence[Picture] = field(default_factory=list)


def model_card(
    run: Checkpoint,
    *,
    repository: str,
    license: str | None = None,
    figures: Figures | None = None,
    pictures: Pictures | None = None,
) -> str:
    """Return the README.md of a repository: a YAML header for the Hub, then Markdown.

    ``repository`` is ``organization/name``. ``license`` is an identifier of :data:`LICENSES`. ``figures`` are
    those of :func:`visualtokens.hub.repository.read_figures`.
    """
    check_license(license)
    pictures = pictures or Pictures()
    data = public(str(run.config.get("training", {}).get("data") or ""))
    header = _header(run, repository, license, figures, data)
    parts = [
        f"# {escaped(repository.rpartition('/')[2])}",
        _summary(run),
        _results(run, figures, data, pictures.curves),
        _examples(pictures.examples),
        _usage(run, repository),
        _training(run, data),
        _classes(run.classes),
        _license(license),
    ]
    return f"---\n{header}\n---\n\n" + "\n\n".join(filter(None, parts)) + "\n"


def check_license(name: str | None) -> None:
    """Raise :class:`UserError` for a licence that the Hub does not know."""
    if name is not None and name not in LICENSES:
        raise unknown("license", name, LICENSES)


def _header(run: Checkpoint, repository: str, license: str | None, figures: Figures | None, data: str) -> str:
    """Return the metadata as YAML, as the Hub's own library writes it."""
    pipeline = PIPELINES.get(run.task.name)
    classifies = run.task.name == "classify"
    kind, _, name = data.partition(":")
    results = [
        EvalResult(
            task_type=pipeline or run.task.name,
            dataset_type=kind or "unknown",
            dataset_name=printable(data) or "unknown",
            dataset_split="validation",
            metric_type=METRICS.get(metric, metric),
            metric_value=round(value, 4),
        )
        for metric, value in (figures.metrics.items() if figures else ())
        if metric == run.task.score
    ]
    tags = [pipeline, *(("timm", "transformers") if classifies else ()), "visualtokens"]
    header = ModelCardData(
        license=license,
        library_name="timm" if classifies else "visualtokens",
        pipeline_tag=pipeline,
        tags=[tag for tag in tags if tag],
        datasets=[name] if kind == "hfds" and name else None,
        metrics=[METRICS.get(run.task.score, run.task.score)] if results else None,
        model_name=repository.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )
    return header.to_yaml()


# The sections.


def _summary(run: Checkpoint) -> str:
    named = model_name(f"`{run.config['architecture']}`", run.config.get("model_args", {}))
    does = VERBS.get(run.task.name, f"was trained to {escaped(run.task.name)}")
    classes = count(len(run.classes), "class")
    return (
        f"A {named} of {parameters(run.model)} that {does} of {classes}, made with "
        f"visualtokens {visualtokens.__version__}. It takes images "
        f"{_size(run.task.input_size(run.model, run.preprocess))}."
    )


def _size(size: str) -> str:
    return f"of {size} pixels" if size[0].isdigit() else size


def _results(run: Checkpoint, figures: Figures | None, data: str, curves: Picture | None) -> str:
    if figures is None:
        return ""
    rows = [
        f"| {escaped(metric_name(name))} | {_number(name, value)} |"
        for name, value in sorted(figures.metrics.items(), key=lambda item: item[0] != run.task.score)
    ]
    table = "\n".join(["| metric | value |", "|---|--:|", *rows])
    where = f"On the validation images of {escaped(data)}, " if data else "On the validation images, "
    text = f"## Results\n{where}after epoch {figures.epoch} of {figures.epochs}:\n\n{table}"
    return f"{text}\n\n{_picture(curves)}" if curves else text


def _number(name: str, value: float) -> str:
    return f"{value:.3f}" if "loss" in name else f"{100 * value:.1f} %"


def _examples(examples: Sequence[Picture]) -> str:
    return "## Examples\n" + "\n\n".join(map(_picture, examples)) if examples else ""


def _picture(picture: Picture) -> str:
    caption = escaped(picture.caption)
    return f"![{caption}]({picture.path})\n\n{caption}"


def _usage(run: Checkpoint, repository: str) -> str:
    architecture = run.config["architecture"]
    ours = is_ours(architecture)
    needed = f"import visualtokens  # registers {architecture} with timm\n" if ours else ""
    blocks = {
        "visualtokens": (
            "import visualtokens\nfrom visualtokens.data import read_image\n\n"
            f'run = visualtokens.load("hf-hub:{repository}")\n'
            'print(run.predict(read_image("photo.jpg")).text())'
        )
    }
    if run.task.name == "classify":
        blocks["timm"] = (
            f"import timm\n{needed}\n"
            f'model = timm.create_model("hf-hub:{repository}", pretrained=True).eval()\n'
            "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))"
        )
        blocks["transformers"] = (
            f"{needed}from transformers import AutoImageProcessor, AutoModelForImageClassification\n\n"
            f'processor = AutoImageProcessor.from_pretrained("{repository}")\n'
            f'model = AutoModelForImageClassification.from_pretrained("{repository}")'
        )
    shown = [f"With {name}:\n\n```python\n{code}\n```" for name, code in blocks.items()]
    command = f"vtok predict photos/ --checkpoint hf-hub:{repository}"
    install = "`pip install visualtokens` first." if ours or run.task.name != "classify" else ""
    lines = ["## Use", install, *shown, f"On the command line:\n\n```sh\n{command}\n```"]
    return "\n\n".join(filter(None, lines))


def is_ours(architecture: str) -> bool:
    """Return whether timm knows a model only after ``import visualtokens``."""
    name = architecture.partition(".")[0]
    return not timm.is_model(name) or timm.model_entrypoint(name).__module__.startswith("visualtokens")


def _training(run: Checkpoint, data: str) -> str:
    training = run.config.get("training") or {}
    if not data:
        return ""
    options = {"model": training.get("model"), "data": data, "task": training.get("task")}
    options |= {name: value for name, value in training.items() if name not in NOT_RECIPE}
    given = [_option(name, public_value(value)) for name, value in options.items() if _differs(name, value)]
    command = " \\\n  ".join(["vtok train", *given, "--out run"])
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0))
    about = f"The data are {escaped(data)}; options that are not given have their defaults."
    return f"## Training\n{about}\n\n{fence}sh\n{command}\n{fence}"


def _differs(name: str, value: Any) -> bool:
    """Return whether an option has another value than by default."""
    if name not in TrainConfig.__dataclass_fields__ or value is None:
        return False
    if name == "weight_decay":
        return bool(value != 0.05)
    return bool(value != TrainConfig.default(name))


def _option(name: str, value: Any) -> str:
    if value is True:
        return f"--{name}"
    text = value if isinstance(value, str) else json.dumps(value)
    return f"--{name} {quote(printable(text))}"


def _classes(classes: Sequence[str]) -> str:
    names = ", ".join(map(escaped, classes))
    if len(classes) <= LISTED:
        return f"## Classes\n{names}"
    return f"## Classes\n<details><summary>{len(classes):,} classes</summary>\n\n{names}\n\n</details>"


def _license(name: str | None) -> str:
    stated = f"`{name}`, chosen by the author of this repository." if name else "The author has stated none."
    return f"## Licence\n{stated} The data and the initial weights may have terms of their own."


# Text from files.

_MARKUP = re.compile(r"[\\`*_\[\]()|<>&~#!$]")


def escaped(text: str) -> str:
    """Return text that Markdown shows as it is, on one line."""
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", printable(text))


def public(spec: str) -> str:
    """Return the name of data or weights without the folders above it, such as ``folder:photos``."""
    kind, colon, path = spec.rpartition(":")
    if kind in ("hfds", "hf-hub"):
        return spec
    name = PurePath(path.replace("\\", "/")).name
    return f"{kind}{colon}{name}"


def public_value(value: Any) -> Any:
    """Return the value of an option with the names of files as :func:`public` gives them, also nested."""
    if isinstance(value, Mapping):
        return {name: public_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [public_value(item) for item in value]
    if isinstance(value, str) and re.search(r"[/\\]", value) and not re.fullmatch(r"\w+/\d+", value):
        return public(value)  # deit_small/3 is a schedule
    return value


def check_repository(name: str) -> str:
    """Return ``organization/name`` or ``name``; :class:`UserError` for anything else."""
    name = name.removeprefix("hf-hub:")
    parts = name.split("/")
    good = all(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?", part) for part in parts)
    if len(parts) > 2 or not good or "--" in name or ".." in name or name.endswith(".git"):
        raise UserError(
            f"{name!r} is not the name of a repository; give ORGANIZATION/NAME, such as me/flowers, "
            "of letters, digits, '-', '_' and '.'"
        )
    return name
