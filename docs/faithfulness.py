"""Write the measured faithfulness into the page on explanations: ``python docs/faithfulness.py``.

The tables come from results/faithful_imagenet.json and results/faithful_pets.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explain.md"
RESULTS = ROOT / "results"
BEGIN = "<!-- Written by `python docs/faithfulness.py`; do not edit. -->"
END = "<!-- End of the written part. -->"
OURS = "pixels"
# metric: its name, and 1 if a high value is better, -1 if a low one is
METRICS = {
    "deletion": ("deletion ↓", -1),
    "insertion": ("insertion ↑", 1),
    "saco": ("SaCo ↑", 1),
    "pointing": ("pointing ↑", 1),
    "auroc": ("foreground AUROC ↑", 1),
}
COMPARED = ("deletion", "insertion", "saco")


def part(imagenet: dict[str, Any], pets: dict[str, Any]) -> str:
    """The written part of the page."""
    return "\n".join(
        [
            *_section(
                f"**ViT-B/16, {imagenet['photos']} ImageNet photos** that were not used for tuning, "
                f"{imagenet['budget']} forward passes a method, {imagenet['dtype']} "
                f"(`{imagenet['command']}`, [curves](../results/faithful_imagenet.png)):",
                imagenet,
                ("deletion", "insertion", "saco"),
            ),
            *_section(
                f"**PaCa-ViT of {pets['parameters'] / 1e6:.1f} M parameters, pet or background** "
                f"({pets['accuracy_on_pieces']:.1%} of unseen crops), {pets['photos']} whole photos, "
                f"{pets['budget']} forward passes a method "
                f"(`{pets['command']}`, [curves](../results/faithful_pets.png), "
                "[maps](../results/faithful_pets_examples.jpg)):",
                pets,
                tuple(METRICS),
            ),
        ]
    )


def _section(title: str, result: dict[str, Any], metrics: tuple[str, ...]) -> list[str]:
    """The means with their 95 % intervals, and the paired differences of our method from the others."""
    methods, kept = result["methods"], result["correlation_after_randomisation"]
    names = [METRICS[metric][0] for metric in metrics]
    lines = [title, "", "| method | " + " | ".join([*names, f"randomised, {kept['photos']} photos"]) + " |"]
    lines.append("|---|" + "--:|" * (len(metrics) + 1))
    for method, means in methods.items():
        cells = [_mean(means[metric]) for metric in metrics]
        lines.append(f"| `{method}` | " + " | ".join([*cells, f"{kept[method]['mean']:+.2f}"]) + " |")
    lines += ["", "| `pixels` minus | " + " | ".join(METRICS[metric][0] for metric in COMPARED) + " |"]
    lines.append("|---|" + "--:|" * len(COMPARED))
    for method, means in methods.items():
        if method != OURS:
            cells = [_difference(means["ours_minus_this"][metric], METRICS[metric][1]) for metric in COMPARED]
            lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _mean(mean: dict[str, Any]) -> str:
    low, high = mean["interval"]
    return f"{mean['mean']:.3f} ({low:.3f}–{high:.3f})"


def _difference(mean: dict[str, Any], sign: int) -> str:
    """The difference with its interval; bold if our method is better beyond it."""
    low, high = mean["interval"]
    text = f"{mean['mean']:+.3f} ({low:+.3f} to {high:+.3f})"
    return f"**{text}**" if min(sign * low, sign * high) > 0 else text


def page() -> str:
    """The page with its written part."""
    imagenet, pets = (
        json.loads((RESULTS / f"faithful_{name}.json").read_text("utf-8")) for name in ("imagenet", "pets")
    )
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{part(imagenet, pets)}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
