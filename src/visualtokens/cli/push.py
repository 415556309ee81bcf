"""``vtok push``."""

from __future__ import annotations

from dataclasses import dataclass, field

from visualtokens.cli.verb import Result, Verb
from visualtokens.tables import printable


@dataclass(frozen=True, kw_only=True)
class PushConfig:
    """Share a checkpoint on the Hugging Face Hub with a model card; timm and transformers can load it."""

    repo: str
    """Repository: ORGANIZATION/NAME, or NAME in your own account. It is created if it does not exist."""

    checkpoint: str
    """Checkpoint folder that `vtok train --out` wrote, such as run/ or run/best/."""

    license: str | None = None
    """Licence of the weights as the Hub names it, such as apache-2.0, mit, cc-by-4.0 or other; by default
    the card says that none is stated."""

    examples: list[str] = field(default_factory=list)
    """Images to show in the card with what the model predicts for them. Nothing else of the data is
    uploaded."""

    private: bool = False
    """Create a repository that only you can see."""

    replace_card: bool = False
    """Replace the model card that the repository has; by default it is kept."""

    out: str | None = None
    """New folder for the files of the repository; nothing is uploaded."""


def run(config: PushConfig) -> Result:
    """Upload the checkpoint, or write the folder."""
    from visualtokens.hub import push_to_hub, write_repository
    from visualtokens.hub.card import check_repository

    if config.out is not None:
        write_repository(
            config.checkpoint,
            config.out,
            repository=config.repo,
            license=config.license,
            examples=config.examples,
        )
        return Result(f"saved as {printable(config.out)}", {"saved": config.out})
    address = push_to_hub(
        config.checkpoint,
        config.repo,
        private=config.private,
        license=config.license,
        examples=config.examples,
        replace_card=config.replace_card,
    )
    name = check_repository(config.repo)
    text = f"{address}\ntry: vtok predict photo.jpg --checkpoint hf-hub:{'/'.join(address.split('/')[-2:])}"
    return Result(text, {"repository": name, "url": address})


VERB = Verb(
    config=PushConfig,
    run=run,
    example="vtok push me/flowers --checkpoint run/ --license apache-2.0",
    positional="repo",
    groups={
        "model and repository": ("repo", "checkpoint", "private"),
        "model card": ("license", "examples", "replace_card"),
        "output": ("out",),
    },
)
