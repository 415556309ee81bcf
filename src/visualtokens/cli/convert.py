"""``vtok convert``."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from visualtokens.cli.verb import Result, Verb
from visualtokens.errors import UserError
from visualtokens.tables import printable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Convert released weights into a checkpoint folder for all other verbs; no code in the file is run."""

    file: str
    """File of weights: .pth, .pt, .bin, .ckpt, .tar or .safetensors, plain or as a training script saved
    them; EMA weights are preferred."""

    out: str
    """Output folder, new or empty."""

    from_: str
    """Whose names the weights have: paca, stvit, deit, pvt_v2, swin, torchvision (ResNet, ViT and Swin), or
    the name of a timm model."""

    model: str | None = None
    """Model that the weights are for; by default the one that they fit best."""


def run(config: ConvertConfig) -> Result:
    """Convert the file; weights that do not fit are listed, and nothing is written."""
    from visualtokens.converters import convert

    out = Path(config.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{config.out!r} exists already; give a new or empty folder")
    if not Path(config.file).is_file():
        raise UserError(f"{config.file!r} is not a file; give a .pth or .safetensors file of weights")
    found = convert(config.file, config.from_, model=config.model)
    problems = {"missing": found.missing, "unknown": found.unknown, "of another shape": found.misfits}
    for what, names in problems.items():
        for name in names:
            logger.warning("%s: %s", what, printable(name))
    if not found.complete:
        counts = ", ".join(f"{len(names)} {what}" for what, names in problems.items() if names)
        raise UserError(f"{config.file!r} does not fit {found.model!r}, so nothing was written: {counts}")
    found.save(out)
    options = ", ".join(f"{name}={value}" for name, value in found.options.items())
    named = f"{found.model} ({options})" if options else found.model
    text = (
        f"{named}, {found.classes:,} classes, saved as {printable(config.out)}\n"
        f"try: vtok predict photo.jpg --checkpoint {printable(config.out)}"
    )
    document = {"model": found.model, "model_args": found.options, "classes": found.classes}
    return Result(text, document | {"saved": config.out})


VERB = Verb(
    config=ConvertConfig,
    run=run,
    example="vtok convert --from stvit stvit_small.pth stvit/",
    positional=("file", "out"),
    groups={"weights": ("file", "from_", "model"), "output": ("out",)},
)
