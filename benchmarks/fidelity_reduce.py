"""Cosine similarity of a pretrained model's features with and without token reduction, without any training.

    python benchmarks/fidelity_reduce.py --weights FILE --photos FOLDER --save results/fidelity_reduce.json

FILE holds weights of timm's vit_small_patch14_dinov2 (safetensors), FOLDER photos. The cosine is that between
the features of the reduced and the full model: of the class token, and of every patch, which has the feature
of its token (0 for a dropped patch). A plot is saved next to the JSON file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visualtokens
from visualtokens.bench import machine
from visualtokens.data import Preprocess, read_image
from visualtokens.reduce import macs

SHARES = (0.7, 0.5, 0.3, 0.2, 0.1)  # of the patches after the last block
GRID = 14  # number of costs at which curves are compared
SETTINGS: dict[str, dict[str, Any]] = {
    "weighted_kmedoids": dict(method="weighted_kmedoids"),
    "kmedoids": dict(method="kmedoids"),
    "weighted_kmeans": dict(method="weighted_kmeans"),
    "kmeans": dict(method="kmeans"),
    "merge": dict(method="merge"),
    "weighted_kmedoids from significance": dict(method="weighted_kmedoids", init="significance"),
    "conv": dict(method="conv"),
}
DROPPING = ("power_bert", "importance", "random")  # no sizes to carry: every token is one patch
SETTINGS |= {f"{name}, not carried": given | {"carry": False} for name, given in SETTINGS.items()}
SETTINGS |= {name: dict(method=name) for name in DROPPING}


def load(weights: Path) -> nn.Module:
    model = timm.create_model("vit_small_patch14_dinov2", img_size=224, num_classes=0).eval()
    model.load_state_dict({k: v.float() for k, v in safetensors.torch.load_file(weights).items()})
    return model


def photos(folder: Path, count: int) -> tuple[Tensor, int]:
    """``count`` photos of the folder, evenly spaced in the order of their names, and how many there are."""
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg", ".png"))
    prepare = Preprocess((224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    chosen = [paths[i * len(paths) // count] for i in range(min(count, len(paths)))]
    return torch.stack([prepare(read_image(path)) for path in chosen]), len(paths)


@torch.inference_mode()
def features(model: Any, images: Tensor) -> Tensor:
    torch.manual_seed(0)  # for the methods that sample
    return torch.cat([model.forward_features(part) for part in images.split(16)])


def fidelity(model: nn.Module, images: Tensor, full: Tensor) -> dict[str, float]:
    got = features(model, images)
    return {
        "gmacs": macs(model).total / 1e9,
        "class_token": F.cosine_similarity(got[:, 0], full[:, 0], dim=1).mean().item(),
        "patches": F.cosine_similarity(got[:, 1:], full[:, 1:], dim=2).mean().item(),
    }


def at_equal_macs(curves: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Weighted k-medoids minus each rival at equal multiply-adds (interpolated): mean and worst."""
    ours, out = curves["weighted_kmedoids"], {}
    for rival in ("power_bert", "random", "merge", "weighted_kmedoids, not carried"):
        low = max(min(p["gmacs"] for p in c) for c in (ours, curves[rival]))
        high = min(max(p["gmacs"] for p in c) for c in (ours, curves[rival]))
        where = np.linspace(low, high, GRID)
        for what in ("class_token", "patches"):
            gap = _interpolated(ours, what, where) - _interpolated(curves[rival], what, where)
            out[f"{what} minus {rival}"] = {
                "mean": gap.mean(),
                "worst": gap.min(),
                "at_gmacs": where[gap.argmin()],
            }
    return out


def _interpolated(curve: list[dict[str, float]], what: str, where: Any) -> Any:
    points = sorted((p["gmacs"], p[what]) for p in curve)
    return np.interp(where, *zip(*points, strict=True))


def draw(curves: dict[str, list[dict[str, float]]], full: float, path: Path) -> None:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    carried = [name for name in curves if "not carried" not in name]
    colours = dict(zip(carried, colormaps["tab10"].colors, strict=False))
    figure = Figure(figsize=(14, 5), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True)
    for axis, what, title in zip(axes, ("class_token", "patches"), ("class token", "patches"), strict=True):
        for name, curve in curves.items():
            base = name.partition(", not carried")[0]
            points = sorted((p["gmacs"], 1 - p[what]) for p in curve if p[what] < 1 - 1e-6)
            if not points or (base == "conv" and ", not" in name):
                continue
            dashed = name != base
            axis.plot(
                *zip(*points, strict=True),
                color=colours[base],
                linestyle="--" if dashed else "-",
                marker="" if dashed else "o",
                markersize=4,
                linewidth=1.2 if dashed else 1.8,
                label=None if dashed else base,
            )
        axis.set(title=title, xlabel=f"GMACs (the full model: {full:.1f})", yscale="log")
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("1 − cosine similarity to the full model")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        title="dashed: not carried",
        loc="outside right upper",
        frameon=False,
    )
    figure.suptitle("Token reduction of a pretrained DINOv2 ViT-S/14 without training")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--save", type=Path, help="JSON file for the result; the plot is saved next to it")
    options = parser.parse_args()
    model = load(options.weights)
    images, available = photos(options.photos, options.count)
    full = features(model, images)
    whole = macs(model).total / 1e9
    curves: dict[str, list[dict[str, float]]] = {}
    for name, given in SETTINGS.items():
        for share in SHARES:
            settings = dict(given)
            visualtokens.reduce(model, settings.pop("method"), keep=share, **settings)
            point = {"share": share} | fidelity(model, images, full)
            curves.setdefault(name, []).append(point)
            shown = f"class token {point['class_token']:.4f}  patches {point['patches']:.4f}"
            print(f"{name:48s} {share:.2f} {point['gmacs']:.2f} GMACs  {shown}", flush=True)
    gaps = at_equal_macs(curves)
    for name, gap in gaps.items():
        worst = f"worst {gap['worst']:+.4f} at {gap['at_gmacs']:.2f} GMACs"
        print(f"weighted_kmedoids, {name}: {gap['mean']:+.4f}, {worst}")
    if options.save:
        result = {
            "command": "python benchmarks/fidelity_reduce.py --weights FILE --photos FOLDER "
            f"--count {options.count} --save results/fidelity_reduce.json",
            "machine": machine(),
            "photos": f"{len(images)} of {available}",
            "full_gmacs": whole,
            "curves": curves,
            "weighted_kmedoids_at_equal_macs": gaps,
        }
        options.save.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        draw(curves, whole, options.save.with_suffix(".png"))


if __name__ == "__main__":
    main()
