"""Draw the import directions of the package: ``python docs/import_graph.py`` writes docs/imports.svg.

A part is a folder or file of src/visualtokens. An arrow points from a part to a part that it imports. Arrows
that follow from others are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "visualtokens"
SVG = ROOT / "docs" / "imports.svg"

SHELLS = ("cli", "demo", "papers")  # may import every part

# Column and caption of each box. Rows follow from the imports.
BOXES: Mapping[str, tuple[float, str]] = {
    "studies": (3, "claims put to the test"),
    "studio": (5, "models in the browser"),
    "tune": (3, "plans, searches, trade-offs"),
    "hub": (6, "repositories, model cards"),
    "train": (4, "the training engine"),
    "checkpoint": (4, "saved runs: load"),
    "predict": (5, "many images, result files"),
    "export": (1, "ONNX and other files"),
    "tasks": (4, "classify, segment, detect"),
    "surgery": (0, "fuse, set_clusters"),
    "converters": (1, "released checkpoints"),
    "bench": (2, "speed, memory, MACs"),
    "models": (1, "one file per family"),
    "reduce": (3, "fewer tokens for ViTs"),
    "report": (6, "page of a training run"),
    "layers": (1, "modules"),
    "explain": (5, "maps and importance"),
    "ops": (2, "tensor functions"),
    "data": (4, "datasets and loaders"),
}

Imports = dict[str, set[str]]
Point = tuple[float, float]
Curve = tuple[Point, Point, Point, Point]


def part_of(path: Path) -> str:
    """The folder or file of the package that ``path`` belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """The other parts that a file imports, at any depth; imports for type checkers only do not count.

    ``__init__`` stands for names that the package itself exports.
    """
    parts = {part_of(p) for p in (*SOURCE.glob("*.py"), *SOURCE.glob("*/__init__.py"))}
    found = set()
    for node in _run_time_nodes(ast.parse(path.read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path}: relative import in line {node.lineno}; imports are absolute")
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            if top == "visualtokens" and rest:
                part = rest.partition(".")[0]
                found.add(part if part in parts else "__init__")
    return found - {part_of(path)}


def _run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for child in node.orelse:
                yield from (child, *_run_time_nodes(child))
            continue
        yield from (node, *_run_time_nodes(node))


def imports() -> Imports:
    """The parts that each part imports. ``__main__.py`` files are entry points and do not count."""
    found: Imports = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name != "__main__.py":
            found.setdefault(part_of(path), set()).update(imports_of(path))
    return found


def arrows(graph: Mapping[str, Set[str]]) -> list[tuple[str, str]]:
    """The imports between boxes without those that follow from others."""
    below = {part: {p for p in BOXES if p != part and _reaches(graph, part, p)} for part in BOXES}
    return [
        (part, imported)
        for part in BOXES
        for imported in BOXES
        if imported in graph.get(part, ()) and not any(imported in below[p] for p in below[part])
    ]


def _reaches(graph: Mapping[str, Set[str]], start: str, goal: str) -> bool:
    seen, stack = set(), [start]
    while stack:
        for part in graph.get(stack.pop(), set()) & BOXES.keys() - seen:
            seen.add(part)
            stack.append(part)
    return goal in seen


def rows(edges: list[tuple[str, str]]) -> dict[str, int]:
    """The row of each box: one above the highest box that it imports."""
    row = dict.fromkeys(BOXES, 0)
    for _ in BOXES:
        for part, imported in edges:
            row[part] = max(row[part], row[imported] + 1)
    if max(row.values()) >= len(BOXES):
        raise ValueError("the imports have a cycle")
    return row


WIDTH, HEIGHT = 148, 46  # of a box
COLUMN, ROW = 166, 88
MARGIN, BAR = 24, 46
PORT = 24  # between arrows at the same edge of a box


def centres(edges: list[tuple[str, str]]) -> dict[str, Point]:
    """The centre of each box."""
    row = rows(edges)
    top = MARGIN + BAR + ROW - HEIGHT / 2
    return {
        part: (
            MARGIN + WIDTH / 2 + column * COLUMN,
            top + (max(row.values()) - row[part]) * ROW,
        )
        for part, (column, _) in BOXES.items()
    }


def curves(edges: list[tuple[str, str]]) -> dict[tuple[str, str], Curve]:
    """Control points of each arrow, from the lower edge of a box to the upper edge of the imported one."""
    places = centres(edges)
    found = {}
    for edge in edges:
        part, imported = edge
        leaving = sorted((e for e in edges if e[0] == part), key=lambda e: places[e[1]][0])
        arriving = sorted((e for e in edges if e[1] == imported), key=lambda e: places[e[0]][0])
        x0 = places[part][0] + PORT * (leaving.index(edge) - (len(leaving) - 1) / 2)
        x1 = places[imported][0] + PORT * (arriving.index(edge) - (len(arriving) - 1) / 2)
        y0, y1 = places[part][1] + HEIGHT / 2, places[imported][1] - HEIGHT / 2 - 2
        bend = min(ROW, y1 - y0) * 0.6
        found[edge] = (x0, y0), (x0, y0 + bend), (x1, y1 - bend), (x1, y1)
    return found


def points(control: Curve, count: int = 60) -> list[Point]:
    """Points along the cubic Bézier curve."""
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = control
    steps = (i / count for i in range(count + 1))
    return [
        (
            (1 - t) ** 3 * x0 + 3 * (1 - t) ** 2 * t * x1 + 3 * (1 - t) * t**2 * x2 + t**3 * x3,
            (1 - t) ** 3 * y0 + 3 * (1 - t) ** 2 * t * y1 + 3 * (1 - t) * t**2 * y2 + t**3 * y3,
        )
        for t in steps
    ]


def crossed_boxes(edges: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """(part, imported, box) for each arrow that runs through the box of a third part."""
    return [
        (part, imported, box)
        for (part, imported), control in curves(edges).items()
        for box, (x, y) in centres(edges).items()
        if box not in (part, imported)
        and any(abs(px - x) <= WIDTH / 2 and abs(py - y) <= HEIGHT / 2 for px, py in points(control))
    ]


def svg(graph: Mapping[str, Set[str]]) -> str:
    """The picture of the imports."""
    edges = arrows(graph)
    places = centres(edges)
    common = sorted(set(graph) - set(BOXES) - set(SHELLS) - {"__init__"})
    width = max(x for x, _ in places.values()) + WIDTH / 2 + MARGIN
    bottom = max(y for _, y in places.values()) + ROW - HEIGHT / 2
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {bottom + BAR + MARGIN:g}" '
        'font-family="Helvetica, Arial, sans-serif" text-anchor="middle">',
        "<title>Import directions of visualtokens</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L8 4L0 8z" fill="#5b6b7b"/></marker></defs>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for (x0, y0), (x1, y1), (x2, y2), (x3, y3) in curves(edges).values():
        out.append(
            f'<path d="M{x0:g} {y0:g}C{x1:g} {y1:g} {x2:g} {y2:g} {x3:g} {y3:g}" fill="none" '
            'stroke="#5b6b7b" stroke-width="1.6" marker-end="url(#head)"/>'
        )
    for part, (x, y) in places.items():
        out += _box(x, y, WIDTH, HEIGHT, part, BOXES[part][1], "#e8f0fa")
    bar = width - 2 * MARGIN
    out += _box(width / 2, MARGIN + BAR / 2, bar, BAR, "   ".join(SHELLS), "may import every part", "#fdf1dc")
    out += _box(
        width / 2, bottom + BAR / 2, bar, BAR, "   ".join(common), "every part may import these", "#e9f5e9"
    )
    return "\n".join([*out, "</svg>", ""])


def _box(x: float, y: float, width: float, height: float, name: str, caption: str, fill: str) -> list[str]:
    return [
        f'<rect x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width:g}" height="{height:g}" rx="6" '
        f'fill="{fill}" stroke="#8fa3b8"/>',
        f'<text x="{x:g}" y="{y - 4:g}" font-size="15" font-weight="bold" fill="#1d2733" '
        f'xml:space="preserve">{escape(name)}</text>',
        f'<text x="{x:g}" y="{y + 14:g}" font-size="11.5" fill="#44525f">{escape(caption)}</text>',
    ]


if __name__ == "__main__":
    SVG.write_text(svg(imports()), "utf-8")
