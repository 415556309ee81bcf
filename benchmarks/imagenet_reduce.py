"""Accuracy of a pretrained ImageNet classifier with fewer tokens, without training: all methods and budgets.

    python benchmarks/imagenet_reduce.py --weights vit.safetensors --photos imagenet_val/ \
        [--save results/imagenet_reduce.json] [--only weighted_merge] [--speed]

``--weights`` holds ``vit_base_patch16_224`` in timm's names (int8 tensors with ``.scale`` and ``.zero`` are
dequantised). ``--photos`` holds one photo per class, named by its number. Even numbers are for tuning, the
odd ones are reported. Results are saved after every setting; the same command continues. ``--speed`` measures
images/s as well, interleaved with the whole model, and needs a quiet machine.

Top-1 is compared with that of token merging at the same budget: the interval is that of the paired difference
over 10,000 bootstrap samples of the photos.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm

from visualtokens.bench import machine
from visualtokens.data import Preprocess, read_image
from visualtokens.files import write_atomically
from visualtokens.reduce import macs, reduce, restore
from visualtokens.tune.planning import plan
from visualtokens.tune.tradeoff import tradeoff

MODEL = "vit_base_patch16_224"
BUDGETS = (0.5, 0.36, 0.4, 0.3, 0.7)  # of the multiply-adds
RIVAL = "merge"
# name: method, options of reduce
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "weighted_merge": ("weighted_merge", {}),
    "merge": ("merge", {}),
    "weighted_kmedoids": ("weighted_kmedoids", {}),
    "weighted_kmedoids, paper's start": ("weighted_kmedoids", {"init": "significance"}),
    "weighted_kmeans": ("weighted_kmeans", {}),
    "power_bert": ("power_bert", {}),
    "random": ("random", {}),
    "kmedoids": ("kmedoids", {}),
    "kmeans": ("kmeans", {}),
    "importance": ("importance", {}),
    "weighted_merge, sizes not carried": ("weighted_merge", {"carry": False}),
    "merge, sizes not carried": ("merge", {"carry": False}),
}
SAMPLES = 10_000


def load_model(weights: Path, dtype: torch.dtype) -> nn.Module:
    tensors = load_file(weights)
    state = {
        name: (w.float() - tensors[f"{name}.zero"]) * tensors[f"{name}.scale"]
        if f"{name}.scale" in tensors
        else w
        for name, w in tensors.items()
        if not name.endswith((".zero", ".scale"))
    }
    model = timm.create_model(MODEL).eval()
    model.load_state_dict({name: w.float() for name, w in state.items()})
    return model.to(dtype)


def read_photos(folder: Path) -> tuple[Tensor, Tensor]:
    """Returns the photos with odd numbers, ``(n, 3, 224, 224)``, and their classes ``(n,)``."""
    preprocess = Preprocess((224, 224), (0.5,) * 3, (0.5,) * 3, crop=0.9)
    files = [file for file in sorted(folder.glob("*.jpg")) if int(file.stem) % 2]
    images = torch.stack([preprocess(read_image(file)) for file in tqdm(files, desc="photos")])
    return images, torch.tensor([int(file.stem) for file in files])


@torch.inference_mode()
def predictions(model: nn.Module, images: Tensor, batch: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    return torch.cat([model(part.to(dtype)).argmax(1) for part in images.split(batch)])


def interval(ours: np.ndarray, theirs: np.ndarray) -> list[float]:
    """Returns the 95 % interval of the difference of two accuracies in points, over the same photos."""
    rng = np.random.default_rng(0)
    difference = ours.astype(float) - theirs
    means = difference[rng.integers(len(difference), size=(SAMPLES, len(difference)))].mean(1)
    return [round(100 * value, 2) for value in np.quantile(means, (0.025, 0.975))]


def add_intervals(rows: list[dict[str, Any]], full: list[int]) -> None:
    """Adds the differences from the whole model and from token merging at the same budget."""
    rival = {row["budget"]: row["correct"] for row in rows if row["setting"] == RIVAL}
    for row in rows:
        correct = np.array(row["correct"])
        row["top1"] = round(100 * correct.mean(), 2)
        row["against_whole"] = round(100 * (correct.mean() - np.mean(full)), 2)
        row["against_whole_95"] = interval(correct, np.array(full))
        if row["budget"] in rival and row["setting"] != RIVAL:
            theirs = np.array(rival[row["budget"]])
            row["against_merge"] = round(100 * (correct.mean() - theirs.mean()), 2)
            row["against_merge_95"] = interval(correct, theirs)


def plot(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.subplots()
    names = list(dict.fromkeys(row["setting"] for row in result["rows"]))
    for name in names:
        rows = sorted((row for row in result["rows"] if row["setting"] == name), key=lambda row: row["gmacs"])
        style = dict(linewidth=3, zorder=5) if name == names[0] else dict(linewidth=1.3)
        ax.plot([row["gmacs"] for row in rows], [row["top1"] for row in rows], "o-", label=name, **style)
    ax.axhline(result["whole"]["top1"], color="0.4", linestyle=":", label="whole model")
    ax.set(
        xlabel="GMACs per image",
        ylabel="top-1, %",
        title=f"{MODEL} without training, {result['photos']} photos",
    )
    ax.grid(color="0.9")
    ax.legend(fontsize=8)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150, format="png"))


def table(result: dict[str, Any]) -> str:
    lines = [f"whole model: {result['whole']['top1']:.1f} % at {result['whole']['gmacs']:.2f} GMACs"]
    for row in sorted(result["rows"], key=lambda row: (-row["budget"], -row["top1"])):
        low, high = row["against_whole_95"]
        text = f"{row['budget']:.2f}  {row['gmacs']:5.2f} GMACs  {row['setting']:34s} {row['top1']:5.1f} %  "
        text += f"whole {row['against_whole']:+.1f} ({low:+.1f} to {high:+.1f})"
        if "against_merge" in row:
            text += "  merge {:+.1f} ({:+.1f} to {:+.1f})".format(
                row["against_merge"], *row["against_merge_95"]
            )
        if "speedup" in row:
            text += "  speed " + ", ".join(f"{v:.2f}× at batch {b}" for b, v in row["speedup"].items())
        lines.append(text)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--save", type=Path, default=Path("results/imagenet_reduce.json"))
    parser.add_argument("--only", nargs="*", help="settings to measure; by default all")
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--speed", action="store_true", help="measure images/s of the default method")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = load_model(options.weights, getattr(torch, options.dtype))
    result: dict[str, Any] = json.loads(options.save.read_text()) if options.save.exists() else {}
    if options.speed:
        add_speed(load_model(options.weights, torch.float32), result)
    else:
        measure(model, result, options)
    print(table(result))
    options.save.write_text(
        json.dumps(result, ensure_ascii=False).replace('{"setting"', '\n{"setting"') + "\n"
    )
    plot(result, options.save.with_suffix(".png"))


def measure(model: nn.Module, result: dict[str, Any], options: argparse.Namespace) -> None:
    """Adds the settings that are not in the result yet."""
    images, labels = read_photos(options.photos)
    if not result:
        whole = predictions(model, images, options.batch)
        result |= {
            "command": "python benchmarks/imagenet_reduce.py --weights … --photos …",
            "machine": machine(),
            "model": MODEL,
            "dtype": options.dtype,
            "photos": len(labels),
            "whole": {
                "gmacs": round(macs(model).total / 1e9, 3),
                "top1": round(100 * (whole == labels).float().mean().item(), 2),
                "correct": (whole == labels).int().tolist(),
                "predicted": whole.tolist(),
            },
            "rows": [],
        }
    done = {(row["setting"], row["budget"]) for row in result["rows"]}
    todo = [(name, b) for name in options.only or SETTINGS for b in BUDGETS if (name, b) not in done]
    for name, budget in tqdm(todo, desc="settings"):
        method, chosen = SETTINGS[name]
        keep = plan(model, macs=budget, method=method).keep
        reduce(model, method, keep=keep, **chosen)
        torch.manual_seed(0)
        found = predictions(model, images, options.batch)
        row = {"setting": name, "method": method, "options": chosen, "budget": budget, "keep": keep}
        row["gmacs"] = round(macs(model).total / 1e9, 3)
        row["agreement"] = round(
            100 * (found == torch.tensor(result["whole"]["predicted"])).float().mean().item(), 2
        )
        row["correct"] = (found == labels).int().tolist()
        restore(model)
        result["rows"].append(row)
        add_intervals(result["rows"], result["whole"]["correct"])
        options.save.write_text(json.dumps(result, ensure_ascii=False))


def add_speed(model: nn.Module, result: dict[str, Any]) -> None:
    """Measures the speed-up of the schedules of the first setting and of merging, at batch 8 and 1."""
    for batch in (8, 1):
        for name in ("weighted_merge", RIVAL):
            rows = {f"{row['budget']}": row for row in result["rows"] if row["setting"] == name}
            found = tradeoff(model, {b: row["keep"] for b, row in rows.items()}, method=name, batch=batch)
            for measured in found.rows[1:]:
                row = rows[measured.name]
                row.setdefault("speedup", {})[str(batch)] = round(measured.speedup.median, 3)
                row.setdefault("speedup_95", {})[str(batch)] = [
                    round(measured.speedup.low, 3),
                    round(measured.speedup.high, 3),
                ]
                row["quiet"] = found.quiet
    result["speed_machine"] = machine()


if __name__ == "__main__":
    main()
