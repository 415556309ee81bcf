"""Code blocks of the documents: Python is executed, commands are parsed, the README's also executed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.digits import save_digits
from tests.journeys.guide import blocks, commands
from visualtokens.cli import main
from visualtokens.cli.app import VERBS
from visualtokens.cli.parse import RECIPES, parse
from visualtokens.data import open_dataset
from visualtokens.train import TrainConfig, train

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# What makes an example short or independent of the network, without changing the code that runs.
SHORTER = {"epochs=10": "epochs=1", "pretrained=True": "pretrained=False"}


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def python_of(document: Path) -> str:
    """All Python blocks, with long examples shortened."""
    code = "\n".join(text for language, text in blocks(document) if language == "python")
    for long, short in SHORTER.items():
        code = code.replace(long, short)
    return code


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained for one epoch."""
    folder = tmp_path_factory.mktemp("docs")
    save_digits(folder / "few.npz", train=64, val=30)
    data = f"npz:{folder / 'few.npz'}"
    train(TrainConfig(model="paca_vit_nano", data=data, out=str(folder / "run"), epochs=1, device="cpu"))
    return folder / "run"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_languages(document: Path) -> None:
    """A block in another language would not be tested."""
    assert {language for language, _ in blocks(document)} <= {"python", "sh", "text"}


@pytest.mark.parametrize("document", [d for d in DOCUMENTS[2:] if python_of(d)], ids=name_of)
def test_python_runs(
    document: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examples find a checkpoint in ``run`` and two photos, one of them damaged."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    Path("run").symlink_to(checkpoint)
    Path("new").mkdir()
    for name in ("photo.jpg", "new/photo.jpg"):
        open_dataset("digits", "val")[0][0].save(name)
    Path("other.jpg").write_bytes(b"no picture")
    # timm registers a model in the module of its function
    exec(compile(python_of(document), name_of(document), "exec"), {"__name__": "__main__"})


def test_extensions_run() -> None:
    """The examples of CONTRIBUTING.md register names, so they run in a process of their own."""
    code = python_of(ROOT / "CONTRIBUTING.md")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples run in order, in one folder; training a detector is only parsed."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    open_dataset("digits", "val")[0][0].save("digit.png")
    namespace: dict[str, Any] = {}
    executed = []
    for language, text in blocks(ROOT / "README.md"):
        if language == "python":
            exec(compile(text, "README.md", "exec"), namespace)
            continue
        for program, *arguments in commands(text):
            if program == "vtok" and "scenes/" not in arguments:
                assert main(arguments) == 0
                executed.append(arguments[0])
    assert executed == ["train", "eval", "predict"]
    assert Path("why.html").stat().st_size > 10_000


def check_vtok(verb: str, *arguments: str) -> None:
    assert verb in VERBS
    module = importlib.import_module(f"visualtokens.cli.{verb}")
    config, _ = parse(verb, "", module.VERB, list(arguments))
    assert isinstance(config, module.VERB.config)


def check_torchrun(*arguments: str) -> None:
    at = arguments.index("-m")
    module, *rest = arguments[at + 1 :]
    assert module in ("visualtokens.train", "vtok")
    check_vtok(*(("train", *rest) if module == "visualtokens.train" else rest))


def check_make(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


def check_pip(install: str, package: str) -> None:
    assert install == "install"
    extras = re.fullmatch(r"(?:visualtokens|\.)(?:\[(.*)\])?", package)
    assert extras
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(filter(None, (extras[1] or "").split(","))) <= set(project["optional-dependencies"])


def check_python(script: str, *arguments: str) -> None:
    found = importlib.util.find_spec(arguments[0]) if script == "-m" else (ROOT / script).is_file()
    assert found, (script, *arguments)


CHECKS = {
    "vtok": check_vtok,
    "torchrun": check_torchrun,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_parse(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks, all of a command; in running text, the program and its verb, target, script or extra."""
    monkeypatch.chdir(ROOT)
    for language, text in blocks(document):
        for program, *arguments in commands(text) if language == "sh" else []:
            CHECKS[program](*arguments)
    prose = re.sub(r"^```.*?^```", "", document.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for text in re.findall(r"`((?:vtok|make|pip|python) [^`]+)`", prose):
        ((program, *arguments),) = commands(text)
        if program != "vtok":
            CHECKS[program](*arguments)
        elif not arguments[0].startswith("-"):
            assert arguments[0] in VERBS, text


def test_results_name_existing_files_and_scripts() -> None:
    table = (ROOT / "results/README.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w.]+)`.*?\| `.*?(benchmarks/\w+\.py).*?`", table, re.MULTILINE)
    assert rows
    for file, script in rows:
        assert (ROOT / "results" / file).is_file()
        assert (ROOT / script).is_file()


def test_dense_recipes_exist() -> None:
    recipes = (ROOT / "docs/dense.md").read_text("utf-8").partition("## Recipes")[2]
    recipes = recipes.partition("\n## ")[0]
    for name in re.findall(r"^\| (`.*?) \|", recipes, re.MULTILINE):
        for recipe in re.findall(r"`(\w+)`", name):
            assert (RECIPES / f"{recipe}.yaml").is_file(), recipe


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "results/README.md"], ids=name_of)
def test_links_exist(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text("utf-8")):
        file = target.partition("#")[0]
        assert target.startswith("https://") or (document.parent / file).exists(), target


def test_every_page_is_in_the_navigation() -> None:
    """And every entry is a page, or made from another file by docs/site.py."""
    made = {"contributing.md", "changelog.md", "measurements.md", "recipes.md"}
    made |= {f"notebooks/{path.stem}.md" for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
    text = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"([\w/]+\.md)$", text, re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(pages | made)


def templates() -> set[str]:
    """All texts in the source, with ``…`` for the values in them."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values]
                found.add("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_messages_of_the_faq_are_those_of_the_source() -> None:
    """A message may be the beginning of a longer one, and ``…`` may stand for several values."""
    quoted = [text.strip() for language, text in blocks(ROOT / "docs/faq.md") if language == "text"]
    assert len(quoted) > 20
    known = templates()
    for message in quoted:
        pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)
        assert any(pattern.match(text) for text in known if len(text) >= len(message) / 2), message
