"""``vtok demo``."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict, dataclass
from shlex import quote

from visualtokens.cli.verb import Result, Verb


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Train, evaluate and explain a small model on real digits, and write a report."""

    out: str = "demo"
    """Output folder for the model and the report; it must be empty or hold a demo. An interrupted demo is
    resumed; a finished one is not trained again, only evaluated and explained."""


def run(config: DemoConfig) -> Result:
    """Run the demonstration."""
    from visualtokens import demo

    result = demo.run(config.out)
    program = "vtok" if shutil.which("vtok") else quote(sys.argv[0])  # such as .venv/bin/vtok
    text = (
        f"accuracy    {result.accuracy:.1%} of {result.images} unseen images\n"
        f"training    {result.seconds:.0f} s, {result.train_images_per_second:,.0f} images/s\n"
        f"prediction  {result.images_per_second:,.0f} images/s\n"
        f"report      {result.report}\n"
        f"try it      {program} studio --checkpoint {quote(config.out)}"
    )
    return Result(text, asdict(result) | {"report": str(result.report)})


VERB = Verb(config=DemoConfig, run=run, example="vtok demo --out demo")
