"""The guides of the documentation, followed with the wheel in an environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.release_check import check_description, check_sdist, check_wheel
from tests.wheel import build, environment, run

HERE = Path(__file__).parent
JOURNEYS = ("start", "finetune", "speedup", "segment", "detect", "explain", "predict", "machines", "share")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel."""
    return build(tmp_path_factory.mktemp("packages") / "dist", isolated=False)


@pytest.fixture(scope="session")
def python(packages: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and its required packages, COCO's included."""
    return environment(tmp_path_factory.mktemp("wheel") / "venv", packages[1], extras=["detect"])


def test_packages_hold_what_they_should(packages: tuple[Path, Path]) -> None:
    sdist, wheel = packages
    check_sdist(sdist)
    check_wheel(wheel)
    check_description(wheel)


@pytest.mark.parametrize("name", JOURNEYS)
def test_journey(name: str, python: Path, tmp_path: Path) -> None:
    run(python, HERE / f"{name}.py", cwd=tmp_path)


def test_every_guide_has_a_journey() -> None:
    guides = {path.stem for path in (HERE.parents[1] / "docs" / "guides").glob("*.md")} - {"index"}
    assert guides | {"start"} == set(JOURNEYS)


def test_only_required_packages_are_seen(python: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.util as u; print([m for m in ('pytest', 'hypothesis', 'mkdocs') if u.find_spec(m)])"
    )
    assert run(python, "-c", code, cwd=tmp_path) == "[]\n"
    where = run(python, "-c", "import visualtokens; print(visualtokens.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(python.parents[1])
