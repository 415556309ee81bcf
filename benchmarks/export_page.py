"""The page of the documentation about the rows of export_table.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

FORMATS = ("onnx", "pt2", "aoti")
SPEEDS = ("eager", "compiled", *FORMATS)
Row = dict[str, Any]

HEAD = """# Exported models

<!-- Written by `python benchmarks/export_table.py page`; do not edit. -->

Every registered model, and DeiT-S with every reduction method (schedule `deit_small/3`), in every
[format](guides/export.md#formats). The first row of a model is its own size with a dynamic batch, the second
another, non-square size with dynamic batch, height and width.

- **difference**: the largest between the answers of the file and of the model, in float32, on random images
  in batches of 1, 2 and 5, with a dynamic size in three sizes. Files above 1e-4 are not written.
- **images/s**: medians of one interleaved run of the model, the model under `torch.compile` and the three
  files, {threads} threads, one image at a time ({machine}). Weights are random; the speed does not depend on
  them.

An empty cell is not measured yet: compiling takes minutes for each row.
"""


def page(found: dict[str, Any]) -> str:
    """Return the page in Markdown: the rows of which at least one file was tried."""
    rows: list[Row] = [row for row in found["rows"] if row["formats"]]
    parts = [
        HEAD.format(threads=found["threads"], machine=found["machine"].get("cpu", "CPU")),
        *_summary(rows),
    ]
    for family in dict.fromkeys(row["family"] for row in rows):
        parts += ["", f"## {family}", *_family([row for row in rows if row["family"] == family])]
    return "\n".join(parts) + "\n"


def _summary(rows: list[Row]) -> Iterator[str]:
    yield "## Summary"
    yield "| | " + " | ".join(f"`{format}`" for format in FORMATS) + " |"
    yield "|---|" + "---:|" * len(FORMATS)
    cells = {
        format: [row["formats"][format] for row in rows if format in row["formats"]] for format in FORMATS
    }
    written = {format: [cell for cell in cells[format] if "refused" not in cell] for format in FORMATS}
    lines = {
        "files written": [str(len(written[format])) for format in FORMATS],
        "refused": [str(len(cells[format]) - len(written[format])) for format in FORMATS],
        "largest difference": [
            f"{max((cell['difference'] for cell in written[format]), default=0):.1e}" for format in FORMATS
        ],
        "images/s relative to the eager model": [_relative(rows, format, "eager") for format in FORMATS],
        "images/s relative to the compiled model": [
            _relative(rows, format, "compiled") for format in FORMATS
        ],
    }
    for name, values in lines.items():
        yield f"| {name} | {' | '.join(values)} |"
    yield ""
    timed = sum("images_per_second" in row for row in rows)
    yield (
        f"Relative speeds are geometric means over the {timed} rows that are timed. The compiled model has "
        f"{_relative(rows, 'compiled', 'eager')} times the images/s of the eager one."
    )
    disturbed = sum(not row.get("quiet", True) for row in rows)
    if disturbed:
        yield (
            f"\nIn {disturbed} rows, marked with *, threads waited for a processor during some turns: those "
            "of torch and onnxruntime share the process, or something else ran."
        )


def _relative(rows: list[Row], name: str, reference: str) -> str:
    """Return the geometric mean of the speed of a candidate relative to another."""
    speeds = [row["images_per_second"] for row in rows if name in row.get("images_per_second", {})]
    return f"{statistics.geometric_mean(s[name] / s[reference] for s in speeds):.2f}" if speeds else "–"


def _family(rows: list[Row]) -> Iterator[str]:
    """Yield the table of a family and the reasons of its refusals."""
    yield "| model | size | difference: onnx | pt2 | aoti | MB: onnx | pt2 | aoti | images/s: " + (
        " | ".join(SPEEDS) + " |"
    )
    yield "|---|---|" + "---:|" * (2 * len(FORMATS) + len(SPEEDS))
    reasons: dict[str, int] = {}
    for row in rows:
        yield _line(row, reasons)
    for reason, number in reasons.items():
        yield f"\n({number}) {reason}"


def _line(row: Row, reasons: dict[str, int]) -> str:
    name = f"`{row['model']}`" if row["method"] is None else row["method"]
    pixels = next((cell["pixels"] for cell in row["formats"].values() if "pixels" in cell), None)
    size = "×".join(map(str, pixels)) if pixels else row["size"]
    differences, sizes = [], []
    for format in FORMATS:
        cell = row["formats"].get(format, {})
        if "refused" in cell:
            number = reasons.setdefault(_escaped(cell["refused"]), len(reasons) + 1)
            differences.append(f"refused ({number})")
        elif "difference" in cell:
            differences.append("0" if cell["difference"] == 0 else f"{cell['difference']:.0e}")
        else:
            differences.append("")
        sizes.append(f"{cell['bytes'] / 1e6:.1f}" if "bytes" in cell else "")
    speeds = row.get("images_per_second", {})
    rates = [f"{speeds[each]:.3g}" if each in speeds else "" for each in SPEEDS]
    mark = "" if row.get("quiet", True) else "*"
    return f"| {name}{mark} | {size} | " + " | ".join([*differences, *sizes, *rates]) + " |"


def _escaped(text: str) -> str:
    return (
        " ".join(text.split())
        .replace("|", "\\|")
        .replace("*", "\\*")
        .replace("_", "\\_")
        .replace("<", "&lt;")
    )
