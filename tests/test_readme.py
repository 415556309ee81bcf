"""The examples of the README run as they are printed, in order, in one folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from visualtokens.cli import main
from visualtokens.data import open_dataset

README = Path(__file__).parents[1] / "README.md"


def examples() -> list[tuple[str, str]]:
    text = README.read_text().partition("## Examples")[2].partition("\n## ")[0]
    return re.findall(r"```(python|sh)\n(.*?)```", text, re.DOTALL)


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_dataset("digits", "val")[0][0].save("digit.png")
    found = examples()
    assert len(found) == 6
    names: dict[str, object] = {}
    for language, code in found:
        if language == "python":
            exec(compile(code, str(README), "exec"), names)
        else:
            for line in code.strip().splitlines():
                verb, *arguments = shlex.split(line)[1:]
                assert line.startswith("vtok ")
                assert main([verb, *arguments]) == 0
    assert Path("why.html").stat().st_size > 10_000


def test_python_examples_about_reduction_run() -> None:
    text = (README.parent / "docs" / "reduce.md").read_text()
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, "docs/reduce.md", "exec"), names)
    assert names["patches"].shape == (1, 196, 384)


def test_pictures_and_links_exist() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README.read_text()):
        assert target.startswith("https://github.com/") or (README.parent / target).exists(), target
