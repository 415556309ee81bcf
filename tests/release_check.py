"""``make release-check``: build the packages, check them, and try the wheel as a user would.

``python -m tests.release_check`` uses the dependencies that are installed here; ``--empty`` installs all of
them from the package index into an empty environment.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

from tests.wheel import ROOT, build, description, environment, run

DIST = ROOT / "dist"
OURS = ("visualtokens/", "vtok.py")


def check_wheel(wheel: Path) -> None:
    """All modules and data files of src/ are in the wheel, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    kept = [path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.relative_to(source).as_posix() for path in kept if ".egg-info" not in str(path)}
    assert packed == expected, f"missing {sorted(expected - packed)}, too much {sorted(packed - expected)}"
    assert all(name.startswith(OURS) for name in packed)
    for needed in (
        "visualtokens/py.typed",
        "visualtokens/papers/published.csv",
        "visualtokens/papers/verdicts.csv",
        "visualtokens/recipes/deit.yaml",
        "visualtokens/recipes/studies/stages.yaml",
    ):
        assert needed in packed, needed


def check_sdist(sdist: Path) -> None:
    """The source package can be built, and holds no tests, benchmarks or results."""
    with tarfile.open(sdist) as archive:
        parts = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 1}
    assert {"src", "pyproject.toml", "setup.py", "README.md", "LICENSE", "CHANGELOG.md"} <= parts, parts
    assert not parts & {"tests", "benchmarks", "results", "docs", "recipes"}, parts


def check_description(wheel: Path) -> None:
    """The description has no links or pictures that only work in the repository, and renders."""
    found = description(wheel)
    text = found.get_payload(decode=True).decode()
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links
    assert all(link.startswith(("https://", "#")) for link in links), links
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert (found["Name"], found["Version"]) == (project["name"], project["version"])


def main() -> None:
    """Run all checks; the first that fails raises an error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--empty", action="store_true", help="install the dependencies from the index")
    options = parser.parse_args()
    sdist, wheel = build(DIST)
    print(f"built {sdist.name} and {wheel.name}")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], check=True)
    check_wheel(wheel)
    check_sdist(sdist)
    check_description(wheel)
    print("the packages hold what they should")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        python = environment(folder / "venv", wheel, extras=["detect"], empty=options.empty)
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        where = run(python, "-c", "import visualtokens; print(visualtokens.__file__)", cwd=elsewhere)
        assert where.startswith(str(folder)), where
        print("the wheel is installed; README's examples follow", flush=True)
        print(run(python, ROOT / "tests" / "journeys" / "readme.py", cwd=elsewhere))
        print(run(python, "-m", "vtok", "demo", "--out", "demo", cwd=elsewhere))
        assert (elsewhere / "demo" / "report.html").stat().st_size > 100_000
    print("release check passed")


if __name__ == "__main__":
    main()
