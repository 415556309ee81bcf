"""The guides of the documentation, followed with the wheel in an environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wheel import build, environment, run

HERE = Path(__file__).parent
JOURNEYS = ("start", "finetune", "speedup", "segment", "detect", "explain", "predict", "machines")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and its required packages, COCO's included."""
    folder = tmp_path_factory.mktemp("wheel")
    _, wheel = build(folder / "dist", isolated=False)
    return environment(folder / "venv", wheel, extras=["detect"])


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
