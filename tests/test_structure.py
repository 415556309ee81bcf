"""The package as a whole: import directions and their picture, exported names, what an import loads."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import visualtokens

REPOSITORY = Path(__file__).parents[1]
SOURCE = Path(visualtokens.__file__).parent

# Which parts (folders or files of the package) each part may import, besides the common ones.
COMMON = {"callable_package", "errors", "files", "grouping", "lazy", "modes", "progress", "tables"}
COMMON |= {"processes", "yaml_files"}
MAY_IMPORT: dict[str, set[str]] = {
    "ops": set(),
    "layers": {"ops"},
    "models": {"layers", "ops"},
    "reduce": {"layers", "ops"},
    "surgery": {"models", "layers", "ops"},
    "converters": {"models"},
    "data": set(),
    "explain": {"ops", "data", "reduce"},
    "tasks": {"converters", "models", "layers", "explain", "data"},
    "checkpoint": {"tasks", "data"},
    "export": {"tasks", "data"},
    "predict": {"tasks", "data"},
    "train": {"tasks", "checkpoint", "data", "models"},
    "bench": {"models"},
    "tune": {"reduce", "bench", "train", "tasks", "checkpoint", "converters", "data"},
    "studies": {"reduce", "bench", "train", "tune", "tasks", "checkpoint"},
    "studio": {"explain", "reduce", "tune", "tasks", "data"},
    "report": {"explain", "data"},
    "hub": {"train", "checkpoint", "tasks", "explain", "data"},
}
SHELLS = {"__init__", "cli", "demo", "papers"}  # may import every part


@pytest.fixture(scope="module")
def graph() -> ModuleType:
    """docs/import_graph.py."""
    spec = importlib.util.spec_from_file_location("import_graph", REPOSITORY / "docs" / "import_graph.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_imports_point_one_way(graph: ModuleType) -> None:
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        part = graph.part_of(path)
        if part in SHELLS or path.name == "__main__.py":
            continue
        allowed = COMMON | MAY_IMPORT.get(part, set())
        wrong += [f"{path.relative_to(SOURCE)} imports {p}" for p in sorted(graph.imports_of(path) - allowed)]
    assert not wrong


def test_every_part_is_in_the_table(graph: ModuleType) -> None:
    assert set(graph.imports()) == COMMON | set(MAY_IMPORT) | SHELLS


# What reads image files; ``data/decode.py`` is the only module that may, because it sets the limits.
READERS = ("PIL.Image.open", "PIL.ImageFile", "torchvision.io", "torchvision.datasets", "cv2", "imageio")
READERS += ("skimage.io", "matplotlib.image", "tifffile", "rawpy")
PLUGIN = re.compile(r"PIL\.\w+Plugin")


def image_readers(source: str) -> set[str]:
    """The functions and modules that read image files and that a module names, under whatever alias."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found |= set(names.values())
    for node in ast.walk(tree):
        parts, end = [], node
        while isinstance(end, ast.Attribute):
            parts, end = [end.attr, *parts], end.value
        if parts and isinstance(end, ast.Name):
            found.add(".".join([names.get(end.id, end.id), *parts]))
    return {
        name
        for name in found
        if any(f"{name}.".startswith(f"{reader}.") for reader in READERS)
        or PLUGIN.match(name)
        or name.split(".")[-1] == "imread"
    }


def test_one_module_reads_image_files() -> None:
    readers = {path for path in SOURCE.rglob("*.py") if image_readers(path.read_text("utf-8"))}
    assert readers == {SOURCE / "data" / "decode.py"}


@pytest.mark.parametrize(
    "code",
    [
        "from PIL import Image\nImage.open(x)",
        "from PIL import Image as I\nread = I.open",
        "import PIL.Image\nPIL.Image.open(x)",
        "from PIL.Image import open as read",
        "from PIL.PngImagePlugin import PngImageFile",
        "from torchvision.io import decode_jpeg",
        "import torchvision\ntorchvision.io.read_image(x)",
        "import torchvision.io as io",
        "def f():\n    import cv2",
        "import matplotlib.pyplot as plt\nplt.imread(x)",
        "from matplotlib.pyplot import imread",
        "import imageio.v3 as iio",
    ],
)
def test_image_readers_are_recognised(code: str) -> None:
    assert image_readers(code)
    assert not image_readers("from PIL import Image\nImage.fromarray(x)\nopen(x)\nfrom a import decode_image")


def test_type_checking_imports_do_not_count(
    graph: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "SOURCE", tmp_path)
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "a.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from visualtokens.b import x\n"
        "else:\n    from visualtokens import c\n"
        "def f():\n    import visualtokens.b.d\n    from visualtokens import load\n"
    )
    assert graph.imports_of(tmp_path / "a.py") == {"b", "c", "__init__"}


def test_picture_of_the_imports_is_up_to_date(graph: ModuleType) -> None:
    found = graph.imports()
    assert graph.SVG.read_text("utf-8") == graph.svg(found), "run: python docs/import_graph.py"
    assert graph.crossed_boxes(graph.arrows(found)) == []


def test_no_export_hides_a_submodule() -> None:
    """A name that ``__init__.py`` imports from elsewhere must not be the name of one of its modules."""
    hidden = []
    for init in sorted(SOURCE.rglob("__init__.py")):
        package = ".".join(["visualtokens", *init.parent.relative_to(SOURCE).parts])
        modules = {p.stem for p in init.parent.iterdir() if p.is_dir() or p.suffix == ".py"}
        for node in ast.walk(ast.parse(init.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module != package:
                names = {alias.asname or alias.name for alias in node.names}
                hidden += [f"{package}.{name}" for name in sorted(names & modules)]
    # packages that are also functions
    assert set(hidden) <= {"visualtokens.explain", "visualtokens.export", "visualtokens.reduce"}


def test_lazy_names_are_listed_and_work() -> None:
    assert {"detect", "segment", "load", "plan"} <= set(dir(visualtokens))
    assert all(getattr(visualtokens, name) is not None for name in visualtokens.__all__)
    assert visualtokens.reduce.plan is visualtokens.plan
    assert callable(visualtokens.plan)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_import_is_silent_and_light() -> None:
    """No heavy dependency, and few modules compared with the thousand of timm."""
    heavy = ["matplotlib", "sklearn", "torchmetrics", "jsonargparse", "tqdm.auto", "pandas", "scipy.stats"]
    out = run(
        "import sys, timm; before = set(sys.modules); import visualtokens; "
        "added = set(sys.modules) - before; "
        f"print([m for m in {heavy} if m in added], len(added) < 150)"
    )
    assert out == "[] True\n"
