"""Files of a release: versions, citation, description on the package index, templates and workflows."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

import visualtokens

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture(scope="module")
def citation() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))


def test_one_version(project: dict[str, Any], citation: dict[str, Any]) -> None:
    assert project["version"] == visualtokens.__version__ == citation["version"]


def test_the_changelog_starts_with_what_is_next(project: dict[str, Any]) -> None:
    """Unreleased changes, or the version of the package once it is released."""
    titles = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert titles[0] in ("Unreleased", project["version"])


def test_every_verb_is_in_the_changelog() -> None:
    from visualtokens.cli.app import VERBS

    line = re.search(r"\*\*Command line\*\*.*", (ROOT / "CHANGELOG.md").read_text("utf-8"))
    assert line is not None
    assert all(verb in line[0] for verb in VERBS)


def test_citation(project: dict[str, Any], citation: dict[str, Any]) -> None:
    """The fields that the format requires, and the papers and authors of the page about them."""
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["license"] == project["license"]
    page, _, _ = (ROOT / "docs/papers.md").read_text("utf-8").partition("\n## ")
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", page, re.MULTILINE)[1:]
    cited = [
        (paper["title"], ", ".join(f"{a['given-names']} {a['family-names']}" for a in paper["authors"]))
        for paper in citation["references"]
    ]
    assert cited == rows
    assert len(cited) == 4


def test_description_without_what_works_in_the_repository_only() -> None:
    with mock.patch("setuptools.setup") as setup:
        described = runpy.run_path(str(ROOT / "setup.py"))["description"]
    given = setup.call_args.kwargs["long_description"]
    assert given == described((ROOT / "README.md").read_text("utf-8"))
    assert "](docs" not in given
    assert "![" not in given
    assert "[timm](https://github.com/" in given
    text = "# A\n\n![p](docs/p.png)\n\nSee [b](docs/b.md) and [c](https://c.org) ([more](d.md)).\n"
    assert described(text) == "# A\n\nSee b and [c](https://c.org).\n"


@pytest.mark.parametrize("path", sorted(GITHUB.rglob("*.yml")), ids=lambda path: path.name)
def test_github_files_are_yaml(path: Path) -> None:
    content = yaml.safe_load(path.read_text("utf-8"))
    if path.parent.name == "ISSUE_TEMPLATE" and path.name != "config.yml":
        assert {"name", "description", "body"} <= content.keys()
        assert all(part["type"] == "textarea" and part["attributes"]["label"] for part in content["body"])


@pytest.mark.parametrize("path", sorted((GITHUB / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_run_targets_of_the_makefile(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = re.findall(r"run: make ([\w-]+)", path.read_text("utf-8"))
    assert targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
