"""What several verbs share: the header, the list of unreadable images, the protection of input files."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from visualtokens.errors import UserError
from visualtokens.files import CONFIG, WEIGHTS

if TYPE_CHECKING:
    from visualtokens.data import BadImage
    from visualtokens.tasks import Checkpoint

logger = logging.getLogger(__name__)
SHOWN = 20


def log_header(
    folder: str, checkpoint: Checkpoint, *, data: str, processes: int = 1, workers: int = 0, out: str = ""
) -> None:
    """Log what a verb is about to do with a checkpoint, unless stderr is a terminal."""
    from visualtokens.progress import count, hardware, header, model_name, parameters

    model = checkpoint.model
    size = checkpoint.task.input_size(model, checkpoint.preprocess)
    named = model_name(checkpoint.config["architecture"], checkpoint.config.get("model_args", {}))
    rows = {
        "model": f"{named} of {folder}, {parameters(model)}, input {size}",
        "task": f"{checkpoint.task.name}, {count(len(checkpoint.classes), 'class')}",
        "data": data,
        "device": hardware(next(model.parameters()).device, processes=processes, workers=workers),
    }
    header(rows | ({"output": out} if out else {}))


def warn_unreadable(
    unreadable: Sequence[BadImage], *, total: int | None = None, listed: str = "--json lists all"
) -> None:
    """List the unreadable images on stderr: the first of ``total``, by default of those that are given."""
    if not unreadable:
        return
    total = len(unreadable) if total is None else total
    logger.warning("could not be read (%d):", total)
    for bad in unreadable[:SHOWN]:
        logger.warning("  %s: %s", bad.path, bad.reason)
    if total > SHOWN:
        logger.warning("  and %d more; %s", total - SHOWN, listed)


def unreadable_as_json(unreadable: Sequence[BadImage]) -> list[dict[str, str]]:
    return [{"path": bad.path, "reason": bad.reason} for bad in unreadable]


def checkpoint_files(folder: str) -> list[Path]:
    """Return the files of a checkpoint that a verb reads."""
    from visualtokens.tasks.hub import checkpoint_folder

    return [checkpoint_folder(folder) / name for name in (CONFIG, WEIGHTS)]


def refuse_overwriting(outputs: Iterable[Path], inputs: Iterable[str | Path]) -> None:
    """Raise a :class:`UserError` if an output is an existing file that is also an input.

    Files are compared, not names: a link to an input is the input.
    """
    existing = {_identity(path): path for path in outputs if path.exists()}
    if not existing:
        return
    for path in map(Path, inputs):
        output = existing.get(_identity(path)) if path.exists() else None
        if output is not None:
            raise UserError(f"{str(output)!r} would overwrite the input {str(path)!r}; save elsewhere")


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
