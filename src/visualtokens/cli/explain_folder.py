"""``vtok explain FOLDER``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from visualtokens.cli.report import table, warn_unreadable
from visualtokens.cli.verb import Result
from visualtokens.errors import UserError

if TYPE_CHECKING:
    from visualtokens.cli.explain import ExplainConfig
    from visualtokens.explain import Gallery
    from visualtokens.train import Checkpoint


def explain_all(config: ExplainConfig, checkpoint: Checkpoint, target: int | None) -> Result:
    """Explain a folder on one page. What cannot be explained is named; the exit code is then 1."""
    from visualtokens.explain import explain_folder

    save = config.save or "explanation.html"
    if not save.endswith(".html"):  # before the work, not behind it
        raise UserError(f"a folder is explained on one page; end --save {config.save!r} in .html")
    gallery = explain_folder(
        checkpoint.model,
        config.image,
        preprocess=checkpoint.preprocess,
        target=target,
        layer=config.layer,
        top=config.top,
        of=config.of,
        batch=config.batch,
        classes=checkpoint.classes,
    )
    saved = gallery.write(save)
    warn_unreadable(gallery.refused)
    document = {"folder": config.image, **gallery.to_dict(), "saved": str(saved)}
    return Result(_text(gallery, str(saved)), document, code=1 if gallery.refused else 0)


def _text(gallery: Gallery, saved: str) -> str:
    rows = [
        (entry.name, f"{entry.probability:.1%}", entry.target, f"{entry.clusters[0][1]:.1%}")
        for entry in gallery.entries
    ]
    head = table(rows, header=("image", "sure", "explained", "hangs on its first cluster"), right=(1, 3))
    left_out = f", {len(gallery.refused)} files left out" if gallery.refused else ""
    return f"{head}\n\n{len(rows)} images explained{left_out}; saved as {saved}"
