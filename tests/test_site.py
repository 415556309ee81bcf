"""The site of the documentation: pages made from other files, generated tables, and the built pages."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urldefrag

import pytest

import visualtokens

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def script(name: str) -> ModuleType:
    """A script of docs/."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# Tables that are computed from the code.


def test_the_page_of_the_models_is_up_to_date() -> None:
    """tests/cli/test_models.py compares the list that it is made from with the models."""
    text = (DOCS / "models.md").read_text("utf-8")
    assert script("model_table").page() == text, "run: python docs/model_table.py"
    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == visualtokens.list_models()


def test_the_measured_faithfulness_is_up_to_date() -> None:
    faithfulness = script("faithfulness")
    assert faithfulness.PAGE.read_text("utf-8") == faithfulness.page(), "run: python docs/faithfulness.py"


@pytest.fixture(scope="module")
def support() -> ModuleType:
    return script("reduce_support")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vit_tiny_patch16_224", ""),
        ("vit_pwee_patch16_reg1_gap_256", "the ParallelScalingBlock of block 0 runs attention and MLP in"),
        ("eva02_tiny_patch14_224", ""),
        ("beit_base_patch16_224", ""),
        ("samvit_base_patch16", "the Block of block 0 attends within windows of 14"),
        ("resnet18", "it is not a vision transformer of a supported kind"),
    ],
)
def test_rows_of_the_support_table(support: ModuleType, name: str, reason: str) -> None:
    """The page has the family of the model where it says what happens to the model."""
    found = support.attempt(name)
    assert found.reason.startswith(reason)
    assert bool(found.reason) == bool(reason)
    text = (DOCS / "reduce_support.md").read_text("utf-8").partition("## timm")[2]
    works, refused, others = re.split(r"^### .*\n", text, flags=re.M)
    if not found.is_vit:
        assert f"`{found.module}`" in others
        return
    rows = [line for line in (refused if reason else works).splitlines() if found.reason in line]
    assert any(row.startswith(f"| {found.family} |") for row in rows), "run: python docs/reduce_support.py"


def test_support_table_of_other_libraries(support: ModuleType) -> None:
    text = (DOCS / "reduce_support.md").read_text("utf-8")
    rows = support.other_rows()
    assert sum(row.endswith("| yes |") for row in rows) >= 15
    assert all(row in text for row in rows), "run: python docs/reduce_support.py"


# Links and docstrings.


@pytest.mark.parametrize(
    ("origin", "page", "before", "after"),
    [
        ("docs/explain.md", "explain.md", "[x](reduce.md#a)", "[x](reduce.md#a)"),
        ("docs/explain.md", "explain.md", "[x](../CONTRIBUTING.md#a)", "[x](contributing.md#a)"),
        ("docs/guides/a.md", "guides/a.md", "[x](../../results/README.md)", "[x](../measurements.md)"),
        ("docs/guides/a.md", "guides/a.md", "[x](../reduce.md)", "[x](../reduce.md)"),
        ("CONTRIBUTING.md", "contributing.md", "![x](docs/imports.svg)", "![x](imports.svg)"),
        ("docs/training.md", "training.md", "[`x`](../src/visualtokens/recipes)", "[`x`](recipes.md)"),
        ("docs/training.md", "training.md", "[`x`](../Makefile), [y](#z)", "`x`, [y](#z)"),
        ("docs/index.md", "index.md", "[x](notebooks/a.ipynb)", "[x](notebooks/a.md)"),
        ("docs/notebooks/a.md", "notebooks/a.md", "[x](a.ipynb)", "[x](a.ipynb)"),
        ("CHANGELOG.md", "changelog.md", "[x](https://example.org/a)", "[x](https://example.org/a)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(
    origin: str, page: str, before: str, after: str
) -> None:
    assert script("site").redirect(before, origin=origin, page=page) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<code>--val_share 0.2</code>", '<code class="short">--val_share 0.2</code>'),
        (
            "<code>vtok train --model paca_vit_nano --out run</code>",
            '<code>vtok train <span class="option">--model</span> paca_vit_nano '
            '<span class="option">--out</span> run</code>',
        ),
        (
            '<div class="language-sh x"><span id="__span-0-1">vtok x --a-b 1\n</span></div> --c',
            '<div class="language-sh x"><span id="__span-0-1">vtok x <span class="option">--a-b</span> 1\n'
            "</span></div> --c",
        ),
    ],
)
def test_options_and_short_names_are_not_broken(before: str, after: str) -> None:
    site = script("site")
    assert site.on_page_content(before, page=None, config=None, files=None) == after


@pytest.mark.slow  # griffe is installed by `make test-all`
def test_docstrings_become_markdown() -> None:
    text = (
        "See :func:`restore`, :class:`~visualtokens.reduce.Pool`,\n"
        ":meth:`Schedule.of <visualtokens.reduce.Schedule.of>` and :mod:`visualtokens.ops`.\n"
        "\n>>> a = 1\n>>> b\n\n"
        "=====  ======\n``a``  first\n``b``  second one\n=====  ======\n\nend"
    )
    assert script("docstrings").to_markdown(text) == (
        "See `restore`, [`Pool`][visualtokens.reduce.Pool],\n"
        "[`Schedule.of`][visualtokens.reduce.Schedule.of] and `visualtokens.ops`.\n"
        "\n\n```python\na = 1\nb\n```\n\n"
        "| | |\n|---|---|\n| ``a`` | first |\n| ``b`` | second one |\n\nend"
    )


# The built site.


class References(HTMLParser):
    """What a page loads and what it links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if "src" in given:
            self.loaded.append(given["src"])
        if "href" in given:
            (self.linked if tag == "a" else self.loaded).append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, References]:
    """All pages of the site, built in strict mode."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path: References(path.read_text("utf-8")) for path in sorted(folder.rglob("*.html"))}


def is_remote(address: str) -> bool:
    return bool(re.match(r"(\w+:)?//", address))


@pytest.mark.slow
def test_pages_load_nothing_from_other_hosts(site: dict[Path, References]) -> None:
    assert len(site) > 30
    remote = {address for page in site.values() for address in page.loaded if is_remote(address)}
    assert not remote
    (folder,) = {path.parent for path in site if path.name == "index.html" and path.parent.name != "guides"}
    styles = "".join(path.read_text("utf-8") for path in folder.rglob("*.css"))
    assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", styles)


@pytest.mark.slow
def test_links_of_the_site_lead_somewhere(site: dict[Path, References]) -> None:
    """Pages, files and anchors; MkDocs checks those in Markdown only."""
    for path, page in site.items():
        if path.name == "404.html":  # its addresses are those of the root of a host
            continue
        for address in {*page.linked, *page.loaded}:
            if is_remote(address) or re.match(r"(data|mailto|javascript):", address):
                continue
            file, anchor = urldefrag(address)
            target = (path.parent / unquote(file)).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.name}: {address}"
            if anchor and target in site:
                assert unquote(anchor) in site[target].ids, f"{path.name}: {address}"


PACKAGES = ("reduce", "ops", "layers", "models", "explain", "data", "tasks", "train", "predict", "bench")


@pytest.mark.slow
@pytest.mark.parametrize("package", ["", *PACKAGES])
def test_every_public_name_is_documented(site: dict[Path, References], package: str) -> None:
    module = importlib.import_module(f"visualtokens.{package}".removesuffix("."))
    (page,) = (
        page
        for path, page in site.items()
        if path.name == f"{package or 'visualtokens'}.html" and path.parent.name == "api"
    )
    elsewhere = {"": {"create_model", "detect", "explain", "reduce", "segment"}, "data": {"Split"}}
    missing = {name for name in module.__all__ if f"{module.__name__}.{name}" not in page.ids}
    assert missing == elsewhere.get(package, set())


# Notebooks.


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run(path: Path) -> None:
    """And the outputs in the repository are of the same kind and small."""
    notebooks = script("run_notebooks")
    saved = notebooks.nbformat.read(path, as_version=4)
    found = notebooks.clean(notebooks.run(path))
    assert [cell.source for cell in found.cells] == [cell.source for cell in saved.cells]
    kinds = [
        [[o.output_type for o in cell.get("outputs", [])] for cell in each.cells] for each in (found, saved)
    ]
    assert kinds[0] == kinds[1], "run: make notebooks"
    assert path.stat().st_size < 500_000
