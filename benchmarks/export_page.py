"""The page of the documentation about the rows of export_table.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

FORMATS = ("onnx", "pt2", "aoti")
SPEEDS = ("eager", "compiled", *FORMATS)
Row = dict[str, Any]

HEAD = """# Exported models

<!-- Written by `python benchmarks/export_table.py --page`; do not edit. -->

Every registered model, and DeiT-S with every reduction method (schedule `deit_small/3`), in every
[format](guides/export.md#formats). The first row of a model is its own size with a dynamic batch, the second
another, non-square size with dynamic batch, height and width (for PaCa-ViT and
STViT multiples of 32, or of 16 for models of 32×32 images).

- The first table of a family has the **largest difference** between the answers of the file and of the model,
  in float32, on random images in batches of 1, 2 and 5, with a dynamic size in three sizes. Files above 1e-4
  are not written.
- The second has **images/s**: medians of one interleaved run of the model, the model under `torch.compile`
  and the three files, {threads} threads, one image at a time. Compare within a row: rows come from several
  machines. Weights are random; the speed does not depend on them.
"""


MISSING = "What is missing is not measured yet: compiling takes 2 to 10 minutes for each row.\n"


def page(found: dict[str, Any]) -> str:
    """Return the page in Markdown: the rows of which at least one file was tried."""
    rows: list[Row] = [row for row in found["rows"] if row["formats"]]
    parts = [
        HEAD.format(threads=found["threads"]),
        *([] if all(map(_is_whole, rows)) else [MISSING]),
        *_summary(rows),
    ]
    for family in dict.fromkeys(row["family"] for row in rows):
        parts += ["", f"## {family}", *_family([row for row in rows if row["family"] == family])]
    return "\n".join(parts) + "\n"


def _is_whole(row: Row) -> bool:
    """Whether every format was tried, and every file timed."""
    written = [format for format in FORMATS if "refused" not in row["formats"].get(format, {})]
    return not written or set(written) <= set(row.get("images_per_second", ()))


def _summary(rows: list[Row]) -> Iterator[str]:
    yield "## Summary"
    cells = {
        format: [row["formats"][format] for row in rows if format in row["formats"]] for format in FORMATS
    }
    written = {format: [cell for cell in cells[format] if "refused" not in cell] for format in FORMATS}
    lines = {
        "files written": [str(len(written[format])) for format in FORMATS],
        "refused": [str(len(cells[format]) - len(written[format])) for format in FORMATS],
        "largest difference": [
            _scientific(max((cell["difference"] for cell in written[format]), default=0))
            for format in FORMATS
        ],
        "images/s relative to the eager model": [_relative(rows, format, "eager") for format in FORMATS],
        "images/s relative to the compiled model": [
            _relative(rows, format, "compiled") for format in FORMATS
        ],
    }
    header = ("", *(f"`{format}`" for format in FORMATS))
    yield from _table(header, [(name, *values) for name, values in lines.items()], text=1)
    yield ""
    timed = sum("images_per_second" in row for row in rows)
    yield (
        f"{timed} rows are timed; relative speeds are geometric means over those that have both. The "
        f"compiled model has {_relative(rows, 'compiled', 'eager')} times the images/s of the eager one."
    )
    disturbed = sum(not row.get("quiet", True) for row in rows)
    if disturbed:
        yield (
            f"\nIn {disturbed} rows, marked with *, threads waited for a processor during some turns: those "
            "of torch and onnxruntime share the process, or something else ran."
        )


def _relative(rows: list[Row], name: str, reference: str) -> str:
    """Return the geometric mean of the speed of a candidate relative to another."""
    known = [row.get("images_per_second", {}) for row in rows]
    speeds = [speed for speed in known if name in speed and reference in speed]
    return f"{statistics.geometric_mean(s[name] / s[reference] for s in speeds):.2f}" if speeds else "–"


def _family(rows: list[Row]) -> Iterator[str]:
    """Yield the tables of a family, files and speeds, and the reasons of its refusals."""
    reasons: dict[str, int] = {}
    cells = [(*_name(row), *_differences(row, reasons), *_megabytes(row)) for row in rows]
    yield from _table(
        ("model", "size", *(f"`{f}`" for f in FORMATS), *(f"MB: `{f}`" for f in FORMATS)), cells
    )
    for reason, number in reasons.items():
        yield f"\n({number}) {reason}"
    timed = [row for row in rows if "images_per_second" in row]
    if timed:
        yield ""
        cells = [(*_name(row, mark="" if row["quiet"] else "*"), *_rates(row)) for row in timed]
        yield from _table(("model", "images/s at", *SPEEDS), cells)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, text: int = 2) -> Iterator[str]:
    """Yield a table in Markdown whose first ``text`` columns are text and the others numbers."""
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * text + "---:|" * (len(header) - text)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _name(row: Row, mark: str = "") -> tuple[str, str]:
    pixels = next((cell["pixels"] for cell in row["formats"].values() if "pixels" in cell), None)
    name = f"`{row['model']}`" if row["method"] is None else row["method"]
    return name + mark, "×".join(map(str, pixels)) if pixels else row["size"]


def _differences(row: Row, reasons: dict[str, int]) -> Iterator[str]:
    for format in FORMATS:
        cell = row["formats"].get(format, {})
        if "refused" in cell:
            number = reasons.setdefault(_escaped(cell["refused"]), len(reasons) + 1)
            yield f"refused ({number})"
        else:
            yield _scientific(cell["difference"]) if "difference" in cell else ""


def _megabytes(row: Row) -> Iterator[str]:
    for format in FORMATS:
        cell = row["formats"].get(format, {})
        yield f"{cell['bytes'] / 1e6:.1f}" if "bytes" in cell else ""


def _rates(row: Row) -> Iterator[str]:
    speeds = row["images_per_second"]
    return (f"{speeds[each]:.3g}" if each in speeds else "" for each in SPEEDS)


def _scientific(value: float) -> str:
    """Return a number such as 2e‑7, which is not broken at its hyphen."""
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    return "0" if value == 0 else f"{mantissa}e{int(exponent)}".replace("-", "\N{NON-BREAKING HYPHEN}")


def _escaped(text: str) -> str:
    return (
        " ".join(text.split())
        .replace("|", "\\|")
        .replace("*", "\\*")
        .replace("_", "\\_")
        .replace("<", "&lt;")
    )
