"""Memory to train Mask R-CNN on one image of 800×1216, with PaCa-ViT and PVTv2 as backbones.

    python benchmarks/memory_mask_rcnn.py [--save results/memory_mask_rcnn.json]

A step is forward, losses and backward. Memory is the peak of allocated bytes without the weights:
activations, gradients and temporaries. PVTv2's attention runs fused (timm's default today, never storing the
attention matrix) and materialised (as in 2022, when the paper was written). PaCa-ViT's feed-forward network
runs in strips (the default on a CPU) and whole (as on a GPU, and as PVTv2's always does).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from visualtokens.bench import count_parameters, machine, peak_memory
from visualtokens.layers import convolutions
from visualtokens.papers.figures import published
from visualtokens.tasks.detect import create

SIZE = (800, 1216)
OBJECTS = 7  # average of an image of COCO
SIZES = ("b0", "b1", "b2")
ADAMW = 2  # moments per weight

Row = dict[str, Any]


@contextlib.contextmanager
def as_is() -> Iterator[None]:
    yield


@contextlib.contextmanager
def whole_ffn() -> Iterator[None]:
    before, convolutions.STRIP_BYTES = convolutions.STRIP_BYTES, 2**60
    try:
        yield
    finally:
        convolutions.STRIP_BYTES = before


@contextlib.contextmanager
def whole_and_materialised() -> Iterator[None]:
    with whole_ffn(), sdpa_kernel(SDPBackend.MATH):
        yield


VARIANTS = {
    "paca_vit": {
        "in strips": as_is,
        "whole": whole_ffn,
        "whole, attention materialised": whole_and_materialised,
    },
    "pvt_v2": {"attention fused": as_is, "attention materialised": as_is},
}


def materialise(model: nn.Module) -> None:
    """Switch timm's attention from fused to materialised."""
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # type: ignore[assignment]


def example(size: tuple[int, int]) -> tuple[Tensor, dict[str, Tensor]]:
    """A noise image with objects of different sizes."""
    rng = torch.Generator().manual_seed(0)
    image = torch.rand(3, *size, generator=rng)
    height, width = size
    sides = torch.tensor([0.08, 0.12, 0.16, 0.24, 0.32, 0.48, 0.64])[:OBJECTS]
    corner = torch.rand(OBJECTS, 2, generator=rng) * (1 - sides[:, None])
    scale = torch.tensor([width, height])
    boxes = torch.cat([corner * scale, (corner + sides[:, None]) * scale], dim=1)
    masks = torch.zeros(OBJECTS, *size, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    return image, {"boxes": boxes, "labels": torch.arange(1, OBJECTS + 1), "masks": masks}


def measure(family: str, size: str, variant: str, pixels: tuple[int, int]) -> Row:
    torch.manual_seed(0)
    model = create("mask_rcnn", backbone=f"{family}_{size}", classes=80).train()
    if family == "pvt_v2" and variant.endswith("materialised"):
        materialise(model)
    regions = []
    model.roi_heads.mask_head.register_forward_pre_hook(lambda _, inputs: regions.append(len(inputs[0])))

    def step(image: Tensor, target: dict[str, Tensor]) -> None:
        torch.manual_seed(0)
        sum(model([image], [target]).values()).backward()
        model.zero_grad(set_to_none=True)

    with VARIANTS[family][variant]():
        step(*example((128, 160)))  # warm up
        given = example(pixels)
        peak = peak_memory(lambda: step(*given))
    weights = count_parameters(model) * 4
    return {
        "model": f"{family}_{size}",
        "variant": variant,
        "peak_gb": peak / 1e9,
        "with_weights_and_adamw_gb": (peak + weights * (1 + ADAMW)) / 1e9,
        "regions_with_a_mask": regions[-1],
        "published_gb": published_gb(f"{family}_{size}"),
    }


def published_gb(model: str) -> float:
    figures = published("paca-vit", "4", model=model, metric="train_gb_per_image")
    return figures[0].number


def text(row: Row) -> str:
    return (
        f"{row['model']:12s} {row['variant']:30s} {row['peak_gb']:6.2f} GB, with weights and AdamW "
        f"{row['with_weights_and_adamw_gb']:6.2f} GB (published {row['published_gb']:.2f})"
    )


def ratios(rows: list[Row]) -> list[Row]:
    """Memory of PVTv2 divided by that of PaCa-ViT in comparable settings, with the published ratio."""
    peaks = {(row["model"], row["variant"]): row["with_weights_and_adamw_gb"] for row in rows}
    pairs = {
        "materialised against materialised": ("attention materialised", "whole, attention materialised"),
        "fused against fused, whole": ("attention fused", "whole"),
        "fused against strips": ("attention fused", "in strips"),
    }
    found = []
    for size in SIZES:
        theirs, ours = f"pvt_v2_{size}", f"paca_vit_{size}"
        for name, (pvt, paca) in pairs.items():
            if (theirs, pvt) in peaks and (ours, paca) in peaks:
                measured = peaks[theirs, pvt] / peaks[ours, paca]
                expected = published_gb(theirs) / published_gb(ours)
                found.append({"size": size, "pair": name, "ratio": measured, "published": expected})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--pixels", type=int, nargs=2, default=SIZE, help="height and width of the image")
    parser.add_argument(
        "--minutes",
        type=float,
        help="measure no new row after this many minutes; run the same command to resume",
    )
    parser.add_argument(
        "--save", type=Path, help="JSON file for the result; rows in it are not measured again"
    )
    options = parser.parse_args()
    began, saved = time.monotonic(), options.save is not None and options.save.exists()
    rows = json.loads(options.save.read_text())["rows"] if saved else []
    known = {(row["model"], row["variant"]) for row in rows}
    wanted = [(size, f, v) for size in options.sizes for f, variants in VARIANTS.items() for v in variants]
    for size, family, variant in wanted:
        if (f"{family}_{size}", variant) in known:
            continue
        if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
            break
        rows.append(measure(family, size, variant, tuple(options.pixels)))
        print(text(rows[-1]), flush=True)
        if options.save:
            save(options.save, rows, options.pixels)
    for ratio in ratios(rows):
        value = f"{ratio['ratio']:.2f} times (published {ratio['published']:.2f})"
        print(f"{ratio['size']} {ratio['pair']:35s} {value}")


def save(file: Path, rows: list[Row], pixels: tuple[int, int]) -> None:
    result = {
        "command": "python benchmarks/memory_mask_rcnn.py --save results/memory_mask_rcnn.json",
        "pixels": pixels,
        "machine": machine(),
        "ratios": ratios(rows),
        "rows": rows,
    }
    file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
