"""``vtok help``."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from visualtokens.cli.verb import Result, Verb
from visualtokens.errors import unknown


@dataclass(frozen=True, kw_only=True)
class HelpConfig:
    """Show this list, or the options of a verb."""

    verb: str = ""
    """Verb to describe; by default all are listed."""


def run(config: HelpConfig) -> Result:
    """Return the text of ``vtok --help`` or ``vtok VERB --help``."""
    from visualtokens.cli.app import VERBS, usage
    from visualtokens.cli.parse import help_text

    if not config.verb:
        return Result(usage(), {"verbs": VERBS})
    if config.verb not in VERBS:
        raise unknown("verb", config.verb, VERBS)
    verb = importlib.import_module(f"visualtokens.cli.{config.verb}").VERB
    text = help_text(config.verb, VERBS[config.verb], verb)
    return Result(text, {"verb": config.verb, "help": text})


VERB = Verb(config=HelpConfig, run=run, example="vtok help train", positional="verb", light=True)
