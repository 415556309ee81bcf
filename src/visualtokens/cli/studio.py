"""``vtok studio``."""

from __future__ import annotations

import importlib.util
import os
import webbrowser
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from visualtokens.cli.terminal import write_error
from visualtokens.cli.verb import Result, Verb
from visualtokens.errors import UserError

if TYPE_CHECKING:
    from visualtokens.tasks import Checkpoint

PASSWORD = "VTOK_STUDIO_PASSWORD"


@dataclass(frozen=True, kw_only=True)
class StudioConfig:
    """See, explain, reduce and compare models in the browser."""

    checkpoint: list[str] = field(default_factory=list)
    """Checkpoint folders that `vtok train --out` wrote, or hf-hub:ORGANIZATION/NAME; two can be compared."""

    model: str = ""
    """Name of a timm model, instead of or beside checkpoints."""

    weights: str = "pretrained"
    """Weights of --model: pretrained, or a .safetensors or .pth file."""

    port: int = 7860
    """Port of the page."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but this machine's own needs a password in VTOK_STUDIO_PASSWORD; the user is
    then "studio"."""

    no_browser: bool = False
    """Do not open the page in the browser."""

    device: str = "auto"
    """Device: auto (an accelerator if there is one), cpu, cuda, cuda:1 or mps."""


def run(config: StudioConfig) -> Result:
    """Serve the studio until it is interrupted."""
    if importlib.util.find_spec("gradio") is None:
        raise UserError("the studio needs Gradio; run: pip install 'visualtokens[studio]'")
    if not config.checkpoint and not config.model:
        raise UserError("give a --checkpoint folder or the name of a --model")
    from visualtokens.studio.server import serve
    from visualtokens.studio.workbench import Source

    models = dict(_open(config))
    sources = {
        name: Source(source, is_checkpoint, config.weights)
        for name, (_, source, is_checkpoint) in models.items()
    }

    def started(url: str) -> None:
        write_error(f"The studio is open at {url} (Ctrl+C closes it)\n")
        if not config.no_browser:
            webbrowser.open(url)

    serve(
        {name: checkpoint for name, (checkpoint, _, _) in models.items()},
        sources,
        host=config.host,
        port=config.port,
        password=os.environ.get(PASSWORD),
        started=started,
    )
    return Result("The studio is closed; uploaded photos are deleted.", {"closed": True})


def _open(config: StudioConfig) -> dict[str, tuple[Checkpoint, str, bool]]:
    """Return the models by the name that the page shows, with what they were opened from."""
    from visualtokens.checkpoint import load, pick_device

    found: dict[str, tuple[Checkpoint, str, bool]] = {}
    for path in config.checkpoint:
        name = Path(path).resolve().name if Path(path).exists() else path
        name = path if name in found else name
        found[name] = (load(path, device=config.device), path, True)
    if config.model:
        checkpoint = _named(config.model, config.weights)
        checkpoint.model.to(pick_device(config.device))
        found[config.model] = (checkpoint, config.model, False)
    return found


def _named(name: str, weights: str) -> Checkpoint:
    """Return a timm model as a checkpoint."""
    from visualtokens.tasks import Checkpoint, get_task
    from visualtokens.tasks.timm_models import class_names, preprocess_for
    from visualtokens.tune.inputs import named_model

    model = named_model(name, weights).eval()
    return Checkpoint(model, class_names(model), preprocess_for(model), get_task("classify"), {})


VERB = Verb(config=StudioConfig, run=run, example="vtok studio --checkpoint run/")
