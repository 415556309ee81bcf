"""What the documents show can be typed: commands are understood, code runs."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from visualtokens.cli.app import VERBS
from visualtokens.cli.parse import parse

DENSE = Path(__file__).parents[1] / "docs/dense.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DENSE.read_text(), re.DOTALL)


def test_code_runs() -> None:
    for code in blocks("python"):
        exec(compile(code, str(DENSE), "exec"), {})


@pytest.mark.parametrize("line", "".join(blocks("sh")).replace("\\\n", " ").splitlines())
def test_commands_are_understood(line: str) -> None:
    program, verb, *arguments = shlex.split(line, comments=True)
    assert (program, verb in VERBS) == ("vtok", True)
    module = importlib.import_module(f"visualtokens.cli.{verb}")
    config, _ = parse(verb, "", module.VERB, arguments)
    assert isinstance(config, module.VERB.config)


def test_recipes_exist() -> None:
    table = DENSE.read_text().partition("## Recipes")[2]
    for name in re.findall(r"`(\w+)`", table):
        assert (DENSE.parents[1] / f"recipes/{name}.yaml").exists(), name
