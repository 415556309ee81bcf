"""The packages of this repository, and environments with nothing but the wheel and what it requires."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def build(out: Path, *, isolated: bool = True) -> tuple[Path, Path]:
    """Build sdist and wheel into the folder ``out``, which is emptied first, and return them.

    An isolated build downloads what ``build-system.requires`` names; the other uses what is installed.
    """
    shutil.rmtree(out, ignore_errors=True)
    options = [] if isolated else ["--no-isolation", "--skip-dependency-check"]
    _call(sys.executable, "-m", "build", "--outdir", str(out), *options, str(ROOT), cwd=ROOT)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def environment(folder: Path, wheel: Path, *, extras: Iterable[str] = (), empty: bool = False) -> Path:
    """Create a virtual environment with the wheel, and return its Python.

    It sees the packages of this environment that the wheel requires, directly or not, and no others. With
    ``empty`` they are installed from the package index, which takes gigabytes.
    """
    venv.create(folder, clear=True, with_pip=False)
    python = folder / "bin" / "python"
    target = f"{wheel}[{','.join(extras)}]" if (extras := list(extras)) else str(wheel)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    if empty:
        _call(*pip, target)
        return python
    _call(*pip, "--no-deps", "--no-index", str(wheel))
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", scheme="venv", vars=paths))
    for name in required(wheel, extras):
        for part in _top_level(metadata.distribution(name)):
            if not (site / part.name).exists():
                (site / part.name).symlink_to(part)
    return python


def required(wheel: Path, extras: Iterable[str] = ()) -> set[str]:
    """The names of all packages that the wheel needs here, with these extras."""
    found: set[str] = set()
    todo = _applying(description(wheel).get_all("Requires-Dist", []), extras)
    while todo:
        each = todo.pop()
        key = f"{each.name}[{','.join(sorted(each.extras))}]"
        if key not in found:
            found.add(key)
            todo += _applying(metadata.distribution(each.name).requires or [], each.extras)
    return {key.partition("[")[0] for key in found}


def description(wheel: Path) -> email.message.Message:
    """The metadata of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def _applying(lines: Iterable[str], extras: Iterable[str]) -> list[Requirement]:
    """The requirements whose markers hold here, with these extras."""
    wanted = [*extras] or [""]
    parsed = map(Requirement, lines)
    return [r for r in parsed if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in wanted)]


def _top_level(package: metadata.Distribution) -> set[Path]:
    """The files and folders of a package in site-packages."""
    names = {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__")}
    return {Path(str(package.locate_file(name))) for name in names}


def run(python: Path, *arguments: str | Path, cwd: Path) -> str:
    """The output of a program of an environment, in another folder and without our import path."""
    return _call(str(python), *map(str, arguments), cwd=cwd)


def _call(*command: str, cwd: Path | None = None) -> str:
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=settings)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout
