"""Hooks of MkDocs: pages that are made from files outside of docs/, and links to them.

The same Markdown reads well in the repository and on the site: links between files of the repository become
links between pages, and links to files that the site does not have become plain text.
"""

from __future__ import annotations

import base64
import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
RECIPES = "src/visualtokens/recipes"
# Files and folders of the repository, and their pages.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "results/README.md": "measurements.md",
    RECIPES: "recipes.md",
}
SHORT = 26  # characters that fit on one line of a phone
LINK = re.compile(r"\]\(([^)#\s]+)((?:#[^)]*)?)\)")
LABELLED = re.compile(r"\[([^]\n]+)\]\(([^)#\s]+)(?:#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        if page in files.src_uris:
            continue
        text = _recipes() if source == RECIPES else (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=text))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        for name, content in notebook_files(notebook):
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirect the links of a page to other pages, and write each command as one line, which is wrapped."""
    uri = page.file.src_uri
    markdown = re.sub(
        r"^```sh\n.*?^```$",
        lambda block: re.sub(r" *\\\n *", " ", block[0]),
        markdown,
        flags=re.DOTALL | re.MULTILINE,
    )
    origins = {page: source for source, page in PAGES.items() if source not in ("README.md", RECIPES)}
    return redirect(markdown, origin=origins.get(uri, f"docs/{uri}"), page=uri)


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Any) -> dict[str, Any]:
    """Give pages that are alone in their tab the width of the navigation."""
    if page.parent is None:
        page.meta["hide"] = ["navigation"]
    return context


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark what is not to be broken at its hyphens: short names in running text, and options in commands."""
    html = re.sub(rf"<code>([^<]{{1,{SHORT}}})</code>", r'<code class="short">\1</code>', html)
    return re.sub(
        r'<div class="language-sh .*?</div>|<code>[^<]*</code>',
        lambda code: re.sub(r"(?<=[\s>])--?[a-z][\w.-]*", r'<span class="option">\g<0></span>', code[0]),
        html,
        flags=re.DOTALL,
    )


def redirect(markdown: str, *, origin: str, page: str) -> str:
    """The Markdown of the file ``origin`` of the repository with the links it has as ``page`` of the site."""

    def target_of(link: str) -> str | None:
        """The linked page or file, as a path of the site; None if the site does not have it."""
        target = os.path.normpath(PurePosixPath(origin).parent / link)
        if target in PAGES:
            return PAGES[target]
        if not target.startswith("docs/"):
            return None
        target = target.removeprefix("docs/")
        shown = target.removesuffix(".ipynb") + ".md"  # the page of a notebook, which links to the file
        return shown if target.endswith(".ipynb") and shown != page else target

    def moved(found: re.Match[str]) -> str:
        if re.match(r"\w+:", found[1]) or (target := target_of(found[1])) is None:
            return found[0]
        return f"]({os.path.relpath(target, PurePosixPath(page).parent)}{found[2]})"

    def plain(found: re.Match[str]) -> str:
        outside = not re.match(r"\w+:", found[2]) and target_of(found[2]) is None
        return found[1] if outside and not found[2].startswith("#") else found[0]

    return LINK.sub(moved, LABELLED.sub(plain, markdown))


def _recipes() -> str:
    """The page of all recipes."""
    text = (
        "# Recipes\n\nThe included settings of `vtok train --config NAME` and `vtok reduce … --config NAME`."
    )
    text += " [Training](training.md#recipes) states what each is for.\n"
    for file in sorted((ROOT / RECIPES).glob("*.yaml")):
        text += f"\n## {file.stem}\n\n```yaml\n{file.read_text('utf-8').strip()}\n```\n"
    return text


# Notebooks.


def notebook_files(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """The Markdown page of a notebook and the pictures in it, each with its name."""
    parts: list[str] = []
    pictures: list[tuple[str, bytes]] = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            shown = _shown(output)
            if isinstance(shown, bytes):
                pictures.append((f"{path.stem}_{len(pictures) + 1}.png", shown))
                wide = "{ .wide }" if _aspect(shown) > 2 else ""
                parts.append(f"![Output of the cell above]({pictures[-1][0]}){wide}")
            elif shown:
                parts.append(f"```text\n{shown}\n```")
    parts.append(f"[Download this notebook]({path.name})")
    yield f"{path.stem}.md", "\n\n".join(parts) + "\n"
    yield from pictures


def _aspect(png: bytes) -> float:
    """The width of a picture divided by its height."""
    width, height = struct.unpack(">II", png[16:24])
    return width / height


def _shown(output: dict[str, Any]) -> str | bytes:
    """The picture or the text of an output; what a cell writes to stderr, such as a log, is left out."""
    if output["output_type"] == "stream":
        return "" if output["name"] == "stderr" else "".join(output["text"]).rstrip()
    data = output.get("data", {})
    if "image/png" in data:
        return base64.b64decode("".join(data["image/png"]))
    return "".join(data.get("text/plain", "")).rstrip()
