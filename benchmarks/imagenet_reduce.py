"""Accuracy of a pretrained ImageNet classifier with fewer tokens, without training: all methods and budgets.

    python benchmarks/imagenet_reduce.py --weights vit.safetensors --photos imagenet_val/ \
        [--save results/imagenet_reduce.json] [--only 'weighted_*'] [--speed | --schedules]

``--weights`` holds ``vit_base_patch16_224`` in timm's names (int8 tensors with ``.scale`` and ``.zero`` are
dequantised). ``--photos`` holds one photo per class, named by its number. Even numbers are for tuning and
calibration, the odd ones are reported: all of them for the settings in MAIN, every second one for the others.
Results are saved after every setting; the same command continues. ``--speed`` measures images/s instead: all
settings of a budget interleaved with the whole model, which needs a quiet machine. ``--schedules`` compares
schedules of the default method instead, in float32, on all photos but the 64 that one of them is calibrated
on.

Top-1 is compared with that of token merging at the same budget and on the same photos: the interval is that
of the paired difference over 10,000 bootstrap samples of the photos.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm

from visualtokens.bench import interleave, machine
from visualtokens.data import Preprocess, read_image
from visualtokens.files import write_atomically
from visualtokens.reduce import macs, reduce, restore
from visualtokens.reduce.methods import DEFAULT_METHOD
from visualtokens.tune.calibration import Profile, output_change, plain_copy
from visualtokens.tune.planning import plan

MODEL = "vit_base_patch16_224"
BUDGETS = (0.5, 0.3, 0.4, 0.7)  # of the multiply-adds
RIVAL = "merge"
MAIN = {"weighted_merge": (*BUDGETS, 0.36), RIVAL: (*BUDGETS, 0.36)}  # on all reported photos
# name: method, options of reduce; k-medoids makes one update by default, k-means three
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "weighted_merge": ("weighted_merge", {}),
    "merge": ("merge", {}),
    "weighted_kmedoids": ("weighted_kmedoids", {}),
    "weighted_kmedoids, 3 updates": ("weighted_kmedoids", {"iterations": 3}),
    "weighted_kmedoids, start by significance": ("weighted_kmedoids", {"init": "significance"}),
    "weighted_kmedoids, random start": ("weighted_kmedoids", {"init": "random"}),
    "weighted_kmedoids, sizes not carried": ("weighted_kmedoids", {"carry": False}),
    "weighted_kmeans": ("weighted_kmeans", {}),
    "weighted_kmeans, 1 update": ("weighted_kmeans", {"iterations": 1}),
    "weighted_kmeans, start by significance": ("weighted_kmeans", {"init": "significance"}),
    "weighted_kmeans, no update": ("weighted_kmeans", {"iterations": 0}),
    "weighted_kmeans, start by significance, no update": (
        "weighted_kmeans",
        {"init": "significance", "iterations": 0},
    ),
    "weighted_kmeans, start by significance, 1 update": (
        "weighted_kmeans",
        {"init": "significance", "iterations": 1},
    ),
    "weighted_kmeans, random start": ("weighted_kmeans", {"init": "random"}),
    "weighted_kmeans, random start, no update": ("weighted_kmeans", {"init": "random", "iterations": 0}),
    "weighted_kmeans, random start, 1 update": ("weighted_kmeans", {"init": "random", "iterations": 1}),
    "weighted_kmeans, sizes not carried": ("weighted_kmeans", {"carry": False}),
    "kmedoids": ("kmedoids", {}),
    "kmedoids, start by significance": ("kmedoids", {"init": "significance"}),
    "kmeans": ("kmeans", {}),
    "kmeans, start by significance": ("kmeans", {"init": "significance"}),
    "power_bert": ("power_bert", {}),
    "importance": ("importance", {}),
    "random": ("random", {}),
    "weighted_merge, sizes not carried": ("weighted_merge", {"carry": False}),
    "merge, sizes not carried": ("merge", {"carry": False}),
}
CALIBRATION_PHOTOS = 64
SCHEDULE_BUDGET = 0.4
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


def read_photos(files: Sequence[Path]) -> Tensor:
    """Returns the preprocessed photos ``(n, 3, 224, 224)``."""
    preprocess = Preprocess((224, 224), (0.5,) * 3, (0.5,) * 3, crop=0.9)
    return torch.stack([preprocess(read_image(file)) for file in tqdm(files, desc="photos")])


def numbered(folder: Path, remainder: int) -> list[Path]:
    """Returns the photos with even (0) or odd (1) numbers."""
    return [file for file in sorted(folder.glob("*.jpg")) if int(file.stem) % 2 == remainder]


@torch.inference_mode()
def logits(model: nn.Module, images: Tensor, batch: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    return torch.cat([model(part.to(dtype)) for part in tqdm(images.split(batch), desc="batches")])


def predictions(model: nn.Module, images: Tensor, batch: int) -> Tensor:
    return logits(model, images, batch).argmax(1)


def interval(ours: np.ndarray, theirs: np.ndarray) -> list[float]:
    """Returns the 95 % interval of the difference of two accuracies in points, over the same photos."""
    rng = np.random.default_rng(0)
    difference = ours.astype(float) - theirs
    means = difference[rng.integers(len(difference), size=(SAMPLES, len(difference)))].mean(1)
    return [round(100 * value, 2) for value in np.quantile(means, (0.025, 0.975))]


def add_intervals(rows: list[dict[str, Any]], full: list[int]) -> None:
    """Adds the differences from the whole model and from token merging at the same budget."""
    rivals = {row["budget"]: row["correct"] for row in rows if row["setting"] == RIVAL}
    for row in rows:
        correct = np.array(row["correct"])
        step = len(full) // len(correct)
        whole = np.array(full)[::step]
        row["photos"] = len(correct)
        row["top1"] = round(100 * correct.mean(), 2)
        row["against_whole"] = round(100 * (correct.mean() - whole.mean()), 2)
        row["against_whole_95"] = interval(correct, whole)
        if row["budget"] in rivals and row["setting"] != RIVAL:
            theirs = np.array(rivals[row["budget"]])[::step]
            row["against_merge"] = round(100 * (correct.mean() - theirs.mean()), 2)
            row["against_merge_95"] = interval(correct, theirs)


# name, colour and marker of a method in the picture; the variants of a method are dots of its colour
STYLES = {
    "weighted_merge": ("#0b4f8a", "o"),
    "merge": ("#c4501b", "s"),
    "weighted_kmedoids": ("#2b7a3d", "D"),
    "weighted_kmeans": ("#7a4fa3", "^"),
    "kmedoids": ("#8fbf9a", "D"),
    "kmeans": ("#bda6d6", "^"),
    "power_bert": ("#b8860b", "v"),
    "importance": ("#888888", "x"),
    "random": ("#bbbbbb", "+"),
}


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws the loss against the whole model on the same photos, in points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5.5), layout="constrained")
    ax = figure.subplots()
    names = list(dict.fromkeys(row["setting"] for row in result["rows"]))
    for name in names:
        rows = sorted((row for row in result["rows"] if row["setting"] == name), key=lambda row: row["gmacs"])
        method = rows[0]["method"]
        color, marker = STYLES[method]
        x, y = [row["gmacs"] for row in rows], [row["against_whole"] for row in rows]
        line = "-" if len(rows) > 3 else "none"  # few points are no curve
        if name == method:
            width = 3 if name in MAIN else 1.6
            ax.plot(
                x,
                y,
                linestyle=line,
                color=color,
                marker=marker,
                linewidth=width,
                markersize=7,
                label=name,
                zorder=3,
            )
        else:
            ax.plot(x, y, linestyle=line, color=color, marker=".", markersize=5, linewidth=0.7, alpha=0.6)
    ax.axhline(0, color="0.4", linestyle=":", label=f"whole model, {result['whole']['gmacs']:.1f} GMACs")
    ax.set(
        xlabel="GMACs per image",
        ylabel="top-1 lost, points",
        ylim=(-45, 3),
        title="ViT-B/16 with fewer tokens, without training (dots: other starts, updates, sizes)",
    )
    ax.grid(color="0.9")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False, loc="lower right")
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150, format="png"))


def table(result: dict[str, Any]) -> str:
    lines = [f"whole model: {result['whole']['top1']:.1f} % at {result['whole']['gmacs']:.2f} GMACs"]
    for row in sorted(result["rows"], key=lambda row: (-row["budget"], -row["top1"])):
        low, high = row["against_whole_95"]
        text = f"{row['budget']:.2f}  {row['gmacs']:5.2f} GMACs  {row['setting']:42s} {row['top1']:5.1f} %  "
        text += f"whole {row['against_whole']:+.1f} ({low:+.1f} to {high:+.1f})"
        if "against_merge" in row:
            text += "  merge {:+.1f} ({:+.1f} to {:+.1f})".format(
                row["against_merge"], *row["against_merge_95"]
            )
        if "speedup" in row:
            text += f"  {row['speedup']:.2f} times as fast"
        lines.append(text)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--save", type=Path, default=Path("results/imagenet_reduce.json"))
    parser.add_argument("--only", default="*", help="pattern of settings to measure")
    parser.add_argument("--budgets", type=float, nargs="*", default=(*BUDGETS, 0.36), help="to measure at")
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--speed", action="store_true", help="measure images/s of the finished settings")
    other.add_argument("--schedules", action="store_true", help="compare schedules of the default method")
    options = parser.parse_args()
    torch.manual_seed(0)
    result: dict[str, Any] = json.loads(options.save.read_text()) if options.save.exists() else {}
    if options.speed:
        add_speed(load_model(options.weights, torch.float32), result, options.save)
    elif options.schedules:
        compare_schedules(load_model(options.weights, torch.float32), result, options)
    else:
        measure(load_model(options.weights, getattr(torch, options.dtype)), result, options)
    print(table(result))
    plot(result, options.save.with_suffix(".png"))


def save(result: dict[str, Any], path: Path) -> None:
    text = json.dumps(result, ensure_ascii=False).replace('{"setting"', '\n{"setting"') + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def measure(model: nn.Module, result: dict[str, Any], options: argparse.Namespace) -> None:
    """Adds the settings that are not in the result yet."""
    files = numbered(options.photos, 1)
    images, labels = read_photos(files), torch.tensor([int(file.stem) for file in files])
    if not result:
        whole = predictions(model, images, options.batch)
        result |= {
            "command": "python benchmarks/imagenet_reduce.py --weights FILE --photos FOLDER",
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
    todo = [(name, budget) for name in MAIN for budget in MAIN[name]]
    todo += [(name, budget) for budget in BUDGETS for name in SETTINGS if name not in MAIN]
    todo = [each for each in todo if each not in done and each[1] in options.budgets]
    todo = [each for each in todo if fnmatch.fnmatch(each[0], options.only)]
    for name, budget in tqdm(todo, desc="settings"):
        method, chosen = SETTINGS[name]
        keep = plan(model, macs=budget, method=method).keep
        step = 1 if name in MAIN else 2
        reduce(model, method, keep=keep, **chosen)
        torch.manual_seed(0)
        found = predictions(model, images[::step], options.batch)
        row = {"setting": name, "method": method, "options": chosen, "budget": budget, "keep": list(keep)}
        row["gmacs"] = round(macs(model).total / 1e9, 3)
        same = found == torch.tensor(result["whole"]["predicted"])[::step]
        row["agreement"] = round(100 * same.float().mean().item(), 2)
        row["correct"] = (found == labels[::step]).int().tolist()
        restore(model)
        result["rows"].append(row)
        add_intervals(result["rows"], result["whole"]["correct"])
        save(result, options.save)


def compare_schedules(model: nn.Module, result: dict[str, Any], options: argparse.Namespace) -> None:
    """Adds the schedules of the default method that are not in the result yet."""
    even = numbered(options.photos, 0)
    chosen = even[:: len(even) // CALIBRATION_PHOTOS][:CALIBRATION_PHOTOS]
    files = [file for file in sorted(options.photos.glob("*.jpg")) if file not in chosen]
    images, labels = read_photos(files), np.array([int(file.stem) for file in files])
    cache = options.save.with_suffix(".whole.npy")  # logits of the whole model
    if not cache.exists():
        np.save(cache, logits(model, images, options.batch).numpy())
    whole = torch.from_numpy(np.load(cache))
    found = result.setdefault("schedules", {"budget": SCHEDULE_BUDGET, "dtype": "float32", "rows": {}})
    found |= {"photos": len(files), "whole": round(100 * np.mean(whole.argmax(1).numpy() == labels), 2)}
    rows = found["rows"]
    for name, make in SCHEDULES.items():
        if name in rows:
            continue
        began = time.perf_counter()
        keep = make(model, chosen)
        seconds = time.perf_counter() - began
        reduce(model, DEFAULT_METHOD, keep=keep)
        gmacs, answers = macs(model).total / 1e9, logits(model, images, options.batch)
        restore(model)
        same = answers.argmax(1) == whole.argmax(1)
        rows[name] = {
            "keep": list(keep),
            "gmacs": round(gmacs, 3),
            "seconds_to_find": round(seconds, 1),
            "agree": same.int().tolist(),
            "correct": (answers.argmax(1).numpy() == labels).astype(int).tolist(),
            "change": [round(value, 5) for value in output_change(whole, answers).tolist()],
        }
        save(result, options.save)
    reference = rows["constant rate"]
    for name, row in rows.items():
        for key in ("correct", "agree", "change"):
            row[f"mean_{key}"] = round(100 * float(np.mean(row[key])), 2)
            if name != "constant rate":
                row[f"{key}_against_constant_95"] = interval(np.array(row[key]), np.array(reference[key]))
    save(result, options.save)


def constant_rate(model: nn.Module, photos: Sequence[Path]) -> Sequence[int]:
    """Returns the schedule in which every block drops the same share of its tokens."""
    constant = Profile((*(1.0,) * (len(model.blocks) - 1), 0.0))

    def cost(keep: Sequence[int]) -> float:
        return macs(reduced, keep=keep).total

    reduced = reduce(plain_copy(model), DEFAULT_METHOD, keep=0.5)
    scale = constant.scaled(cost, SCHEDULE_BUDGET * macs(model).total, 196, 0)
    return constant.keep(scale, 196, fewest=0)


SCHEDULES: dict[str, Callable[[nn.Module, Sequence[Path]], Sequence[int]]] = {
    "constant rate": constant_rate,
    "calibrated": lambda model, photos: plan(model, macs=SCHEDULE_BUDGET, images=read_photos(photos)).keep,
    "default": lambda model, photos: plan(model, macs=SCHEDULE_BUDGET).keep,
}


def add_speed(model: nn.Module, result: dict[str, Any], path: Path) -> None:
    """Adds the speed-up of every setting at batch 8, measured budget by budget with the whole model."""
    images = torch.randn(8, 3, 224, 224)
    for budget in BUDGETS:
        rows = [row for row in result["rows"] if row["budget"] == budget and "speedup" not in row]
        if not rows:
            continue
        models = {"whole": model}
        for row in rows:
            models[row["setting"]] = reduce(
                plain_copy(model), row["method"], keep=row["keep"], **row["options"]
            )
        with torch.inference_mode():
            found = interleave({name: partial(each, images) for name, each in models.items()}, rounds=3)
        for row in rows:
            spread = found.ratio(row["setting"])
            row["speedup"] = round(spread.median, 3)
            row["speedup_spread"] = [round(spread.low, 3), round(spread.high, 3)]
            row["images_per_second"] = round(found.rate(row["setting"], 8).median, 2)
            row["quiet"] = found.quiet
        result["speed"] = {"batch": 8, "dtype": "float32", "machine": machine()}
        save(result, path)


if __name__ == "__main__":
    main()
