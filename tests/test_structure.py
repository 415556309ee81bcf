"""The package as a whole: import directions, import cost, and nothing printed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import visualtokens

SOURCE = Path(visualtokens.__file__).parent

# Folder or file: which other parts of the package it may import. What every part may import is not repeated.
COMMON = {"grouping", "errors"}
MAY_IMPORT = {
    "grouping": set(),
    "errors": set(),
    "ops": set(),
    "layers": {"ops"},
    "models": {"layers", "ops"},
    "reduce": {"layers", "ops"},
    "convert": {"models"},
    "fuse": {"models", "layers"},
    "data": set(),
    "explain": {"ops", "data"},
    "tasks": {"models", "layers", "data"},
    "train": {"tasks", "data", "models"},
    "bench": {"models"},
}
# Files that may import more than the rest of their folder; `import visualtokens` needs none of them.
MORE = {
    "reduce/plan.py": {"bench"},
    "reduce/measure.py": {"bench"},
    "reduce/tradeoff.py": {"bench"},
    "reduce/search.py": {"tasks", "train"},
}
SHELLS = {"__init__", "cli", "demo", "export", "studio", "papers"}  # may import everything


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        parts |= {name.split(".")[1] for name in names if name.startswith("visualtokens.")}
    return parts


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(path)
    if part in SHELLS or path.name == "__main__.py":
        return
    assert part in MAY_IMPORT, f"{part} is new: say in this test what it may import"
    more = MORE.get(path.relative_to(SOURCE).as_posix(), set())
    assert imported_parts(path) <= MAY_IMPORT[part] | more | COMMON | {part}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_import_prints_nothing_and_pulls_in_no_extra() -> None:
    heavy = ["matplotlib", "sklearn", "torchmetrics", "jsonargparse", "tqdm.auto", "pandas", "scipy.stats"]
    out = run(
        "import sys, timm; before = set(sys.modules); import visualtokens; "
        f"print([m for m in {heavy} if m in sys.modules and m not in before])"
    )
    assert out == "[]\n"


def test_import_adds_little_to_timm() -> None:
    """By count of modules, not by the clock: timm brings over a thousand."""
    out = run("import sys, timm; n = len(sys.modules); import visualtokens; print(len(sys.modules) - n)")
    assert int(out) < 150
