"""The repository of a checkpoint: its files as a folder, and on the Hugging Face Hub.

The layout is timm's: ``model.safetensors``, ``config.json`` and the model card, ``README.md``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, errors, get_token
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

import visualtokens
from visualtokens.checkpoint import load
from visualtokens.data import read_image
from visualtokens.errors import UserError
from visualtokens.files import (
    CONFIG,
    MAX_JSON,
    WEIGHTS,
    link,
    one_line,
    write_atomically,
    write_config,
    write_folder,
)
from visualtokens.hub.card import (
    Figures,
    Picture,
    Pictures,
    check_license,
    check_repository,
    model_card,
    public_value,
)
from visualtokens.tables import metric_name, printable
from visualtokens.tasks import Checkpoint
from visualtokens.tasks.hub import HUB_ERRORS, checkpoint_folder, is_offline
from visualtokens.train.folder import BEST
from visualtokens.train.log import LOG

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)
CARD, CURVES, EXAMPLES = "README.md", "curves.png", "example_{}.png"
_ERRORS: tuple[type[Exception], ...] = (*HUB_ERRORS, RuntimeError)  # the last one wraps failed uploads
MAX_EXAMPLES = 16
EXAMPLE_SIDE = 1024  # pixels of the longer side of an example's photo
LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token with write access"


def push_to_hub(
    checkpoint: str | Path,
    repository: str,
    *,
    private: bool = False,
    license: str | None = None,
    examples: Sequence[str | Path] = (),
    replace_card: bool = False,
) -> str:
    """Upload a checkpoint to the Hugging Face Hub with a model card; return the address of the repository.

    ``repository`` is ``organization/name``, or ``name`` in your own account; it is created if it does not
    exist, ``private`` if wanted. The other arguments are those of :func:`write_repository`. A card that the
    repository has already is kept unless ``replace_card`` is True. The token is that of ``hf auth login`` or
    of the environment variable ``HF_TOKEN``.

    >>> visualtokens.push_to_hub("run/", "me/flowers", license="apache-2.0", examples=["rose.jpg"])
    >>> visualtokens.load("hf-hub:me/flowers")
    """
    repository = check_repository(repository)
    check_license(license)
    if not get_token():
        raise UserError(f"pushing to the Hugging Face Hub needs a token; {LOGIN}")
    api = HfApi(library_name="visualtokens", library_version=visualtokens.__version__)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "repository")
        with _reasons(repository):
            name = repository if "/" in repository else f"{api.whoami()['name']}/{repository}"
        write_repository(checkpoint, folder, repository=name, license=license, examples=examples)
        with _reasons(name):
            return _upload(api, folder, name, private=private, replace_card=replace_card)


@contextlib.contextmanager
def _reasons(repository: str) -> Iterator[None]:
    """Turn the errors of the Hub into one line."""
    try:
        yield
    except UserError:
        raise
    except _ERRORS as error:
        raise UserError(f"{repository!r} cannot be pushed: {_reason(error)}") from error


def _upload(api: HfApi, folder: Path, name: str, *, private: bool, replace_card: bool) -> str:
    """Upload the files in one commit, check their sizes on the Hub, and return the repository's address."""
    disable_progress_bars()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        kept = []
        if not replace_card and api.file_exists(name, CARD):
            kept = [CARD]
            logger.info("%s of %s is kept; replace_card replaces it", CARD, name)
        api.upload_folder(
            repo_id=name, folder_path=folder, commit_message="Upload model", ignore_patterns=kept
        )
        sent = {file.name: file.stat().st_size for file in folder.iterdir() if file.name not in kept}
        found = {each.path: getattr(each, "size", 0) for each in api.get_paths_info(name, list(sent))}
    finally:
        enable_progress_bars()
    for file, size in sent.items():
        if found.get(file) != size:
            raise UserError(
                f"{file} has {size:,} bytes, but {found.get(file, 0):,} arrived in {name!r}; push it again"
            )
    return str(address)


def _reason(error: Exception) -> str:
    """Return why a repository cannot be written, and what to do."""
    cause: BaseException | None = error  # a failed upload of one file wraps the error of the Hub
    while cause is not None and not isinstance(cause, errors.HfHubHTTPError) and not _offline(cause):
        cause = cause.__cause__
    if cause is None:
        return one_line(error)
    if _offline(cause):
        return (
            "the Hub cannot be reached; try again where there is a network, or write a folder: --out FOLDER"
        )
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status == 401:
        return f"the Hub does not accept the token; {LOGIN}"
    if status == 403:
        return f"the token may not write there; give a repository of your own, or {LOGIN}"
    if status == 404:
        return "the Hub has no such account; give a repository of your own"
    return one_line(Exception(cause))


def _offline(error: BaseException) -> bool:
    return isinstance(error, ConnectionError) or (isinstance(error, Exception) and is_offline(error))


# The folder.


def write_repository(
    checkpoint: str | Path,
    out: str | Path,
    *,
    repository: str,
    license: str | None = None,
    examples: Sequence[str | Path] = (),
) -> None:
    """Write the files of a repository into a new folder ``out``.

    The checkpoint is loaded, so that only one that works is written. The card has the figures and curves of
    the run's log, and a picture of what the model predicts for each image in ``examples``: nothing else of
    the data is written. The names of folders above data and files are left out of ``config.json`` and the
    card. ``license`` is one of :data:`visualtokens.hub.LICENSES`.
    """
    repository, target = check_repository(repository), Path(out)
    check_license(license)
    if len(examples) > MAX_EXAMPLES:
        raise UserError(f"{len(examples)} examples; a card has at most {MAX_EXAMPLES}")
    if target.exists():
        raise UserError(f"out={str(out)!r} exists already; give the name of a new folder")
    source = checkpoint_folder(checkpoint)
    run = load(source)
    images = {str(path): read_image(path) for path in examples}
    history = read_history(source)
    figures = read_figures(source, run, history)

    def fill(folder: Path) -> None:
        curves = _write_curves(folder / CURVES, run, history) if len(history) > 1 else None
        drawn = [
            _write_example(folder / EXAMPLES.format(number), run, image)
            for number, image in enumerate(images.values(), start=1)
        ]
        card = model_card(
            run,
            repository=repository,
            license=license,
            figures=figures,
            pictures=Pictures(curves, drawn),
        )
        (folder / CARD).write_text(card, encoding="utf-8")
        write_config(folder / CONFIG, _public_config(run.config))
        link((source / WEIGHTS).resolve(), folder / WEIGHTS)

    target.parent.mkdir(parents=True, exist_ok=True)
    write_folder(target, fill)


def _public_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config.json`` without the names of folders on this machine."""
    training = {name: value for name, value in config.get("training", {}).items() if name != "out"}
    return dict(config) | ({"training": public_value(training)} if training else {})


# The log of the run.


def _log(folder: Path) -> Path:
    """Return the log of the run that a checkpoint belongs to; the best one has a folder of its own."""
    return (folder.parent if folder.name == BEST else folder) / LOG


def read_history(folder: Path) -> list[dict[str, float]]:
    """Return the finite numbers of every epoch in the log of a run; empty if there is none."""
    path = _log(folder)
    if not path.is_file():
        return []
    with path.open("rb") as file:
        content = file.read(MAX_JSON + 1)
    try:
        if len(content) > MAX_JSON:
            raise ValueError(f"it is larger than {MAX_JSON >> 20} MB")
        records = [json.loads(line) for line in content.decode("utf-8").splitlines()]
        if not all(isinstance(record, dict) and isinstance(record.get("epoch"), int) for record in records):
            raise ValueError("a line is not the record of an epoch")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not the log of a run: {one_line(error)}; restore or remove it") from error
    return [{name: value for name, value in record.items() if _is_number(value)} for record in records]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_figures(folder: Path, run: Checkpoint, history: Sequence[Mapping[str, float]]) -> Figures | None:
    """Return the metrics of the epoch that the weights are of: the best one, or the last."""
    score = f"val_{run.task.score}"
    records = [record for record in history if score in record]
    if not records:
        return None
    record = max(records, key=lambda each: each[score]) if folder.name == BEST else records[-1]
    metrics = {name.removeprefix("val_"): v for name, v in record.items() if name.startswith("val_")}
    epochs = run.config.get("training", {}).get("epochs")
    return Figures(int(record["epoch"]), epochs if isinstance(epochs, int) else len(history), metrics)


# Pictures.


def _write_curves(path: Path, run: Checkpoint, history: Sequence[Mapping[str, float]]) -> Picture:
    """Draw the loss and the score of every epoch."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    score, name = run.task.score, metric_name(run.task.score)
    panels = {
        "loss": {"training": "loss", "validation": "val_loss"},
        name: {"training": f"train_{score}", "validation": f"val_{score}"},
    }
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for (label, key), style in zip(lines.items(), ("--", "-"), strict=True):
            points = [(record["epoch"], record[key]) for record in history if key in record]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label, color="#3949ab", linewidth=1.8)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        if title == name:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        if axes.lines:
            axes.legend(frameon=False)
    _save(figure, path)
    return Picture(path.name, f"Loss and {name} over the epochs")


def _write_example(path: Path, run: Checkpoint, image: Any) -> Picture:
    """Draw what the model predicts for an image: objects, segments, or the regions behind a class."""

    image.thumbnail((EXAMPLE_SIDE, EXAMPLE_SIDE))
    prediction = run.predict(image)
    said = ", ".join(prediction.text().split("\n")[:3])
    if run.task.pictures:
        with tempfile.TemporaryDirectory() as temporary:
            first, *_ = prediction.save(image, Path(temporary), "example").values()
            write_atomically(path, lambda file: file.write_bytes(first.read_bytes()))
    elif run.task.name == "classify":
        _save(run.explain(image, top=3).plot(), path)
    else:
        write_atomically(path, lambda file: image.save(file, format="PNG"))
    return Picture(path.name, f"Prediction: {' '.join(printable(said).split())}")


def _save(figure: Figure, path: Path) -> None:
    write_atomically(path, lambda file: figure.savefig(file, dpi=120, format="png"))
