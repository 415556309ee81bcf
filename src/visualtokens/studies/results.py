"""The result of a study: figures per arm and seed, comparisons with verdicts, as JSON, text and a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from visualtokens.files import json_ready, read_json, write_atomically, write_config
from visualtokens.progress import count
from visualtokens.studies.jobs import arm_jobs
from visualtokens.studies.statistics import CONFIRMED, CONTRADICTED, interval, mean_sd, verdict
from visualtokens.studies.study import BF16, Comparison, Study, needed_paths
from visualtokens.tables import metric_name, table

TRAIN = "train_"  # prefix of the metrics on training images
Result = dict[str, Any]
Records = Mapping[tuple[str, int], dict[str, Any]]


def collect(study: Study, out: Path, *, seeds: int | None = None) -> Result | None:
    """Return the result of the runs that are finished, as JSON values; None if there are none.

    Only seeds of which all arms are finished are compared.
    """
    jobs = arm_jobs(study, range(seeds or study.seeds))
    found = {place: job.record(out) for place, job in jobs.items()}
    records = {place: record for place, record in found.items() if record is not None}
    if not records:
        return None
    whole = [s for s in range(seeds or study.seeds) if all((arm, s) in records for arm in study.arms)]
    score = next(iter(records.values()))["score"]
    stages = {job.key: job for each in jobs.values() for job in each.needs.values()}
    return {
        "study": study.name,
        "claim": study.claim,
        "source": vars(study.source),
        "command": _command(study),
        "score": score,
        "data": study.data,
        "recipe": study.recipe,
        "seeds": whole,
        "runs": [len(records), len(jobs)],
        "stages": {job.label: _figures(record) for job in stages.values() if (record := job.record(out))},
        "arms": {arm: _arm(study, arm, records, score) for arm in study.arms},
        "comparisons": [_compare(each, records, whole, score) for each in study.compare],
        "full_scale": study.full_scale,
        "notes": study.notes,
        "core_minutes": round(sum(record["core_minutes"] for record in records.values()), 1),
        "machine": next(iter(records.values()))["machine"],
    }


def _command(study: Study) -> str:
    paths = {"cifar": "--cifar FILE", "pets": "--pets FOLDER"}
    bf16 = ["--bf16"] if study.recipe.get(BF16) else []
    given = (paths[name] for name in needed_paths([study]))
    return " ".join([f"vtok reproduce {study.name}", *given, *bf16])


def _figures(record: dict[str, Any]) -> Result:
    figures = {name: record[name] for name in ("parameters", "macs", "keep") if name in record}
    return figures | {"metrics": _metrics(record), "core_minutes": record["core_minutes"]}


def _metrics(record: dict[str, Any]) -> dict[str, float]:
    on_training = {TRAIN + name: value for name, value in (record["train"] or {}).items()}
    return record["metrics"] | on_training


def _arm(study: Study, arm: str, records: Records, score: str) -> Result:
    own = {seed: record for (name, seed), record in records.items() if name == arm}
    first = next(iter(own.values()), {"parameters": None, "macs": None})
    result: Result = {
        "options": study.arms[arm],
        **{name: first[name] for name in ("parameters", "macs", "keep") if name in first},
        "seeds": {str(seed): _metrics(record) for seed, record in own.items()},
    }
    for name in (score, TRAIN + score):
        values = [m[name] for record in own.values() if name in (m := _metrics(record))]
        if values:
            result[name] = dict(zip(("mean", "sd"), mean_sd(values), strict=True))
    return result


def _compare(comparison: Comparison, records: Records, seeds: list[int], score: str) -> Result:
    metric = comparison.metric or score
    differences = [_difference(comparison, records, seed, metric) for seed in seeds]
    result = vars(comparison) | {"metric": metric, "differences": differences}
    if not differences:
        return result | {"mean": None, "low": None, "high": None, "verdict": None}
    found = interval(differences)
    decided = verdict(found, expect=comparison.expect, margin=comparison.margin / 100)
    return result | json_ready(vars(found)) | {"verdict": decided}


def _difference(comparison: Comparison, records: Records, seed: int, metric: str) -> float:
    def mean(arms: list[str]) -> float:
        return math.fsum(_metrics(records[arm, seed])[metric] for arm in arms) / len(arms)

    if not comparison.best:
        return mean(comparison.a) - mean(comparison.b)
    budget = max(records[arm, seed]["macs"] for arm in comparison.a)
    affordable = [arm for arm in comparison.b if records[arm, seed]["macs"] <= budget]
    cheapest = min(comparison.b, key=lambda arm: records[arm, seed]["macs"])
    best = max(_metrics(records[arm, seed])[metric] for arm in affordable or [cheapest])
    return mean(comparison.a) - best


def save(result: Result, folder: Path) -> None:
    """Write the result and its plot into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['study']}.json"
    write_atomically(path, lambda file: write_config(file, result))
    figure = draw(result)
    write_atomically(path.with_suffix(".png"), lambda file: figure.savefig(file, format="png", dpi=120))


def load_results(folder: Path) -> dict[str, Result]:
    """Return the results in a folder by the name of their study."""
    return {path.stem: read_json(path) for path in sorted(folder.glob("*.json"))}


# Text and picture.


def text(result: Result) -> str:
    """Return the result as tables of arms and comparisons."""
    score = result["score"]
    rows = [
        (
            name,
            "—" if arm["parameters"] is None else f"{arm['parameters'] / 1e6:.2f} M",
            "—" if arm["macs"] is None else f"{arm['macs'] / 1e6:.1f} M",
            spread(arm.get(score)),
            spread(arm.get(TRAIN + score)),
        )
        for name, arm in result["arms"].items()
    ]
    header = ("arm", "parameters", "multiply-adds", f"{metric_name(score)}, %", "on training images")
    lines = [result["claim"], "", table(rows, header=header, right=(1, 2, 3, 4)), ""]
    for each in result["comparisons"]:
        lines += [each["claim"], f"  {difference(each)}: {each['verdict'] or 'no whole seed yet'}"]
    done, total = result["runs"]
    seeds = count(len(result["seeds"]), "seed")
    lines += ["", f"{done} of {total} runs finished, {seeds} compared, {result['core_minutes']} core-minutes"]
    return "\n".join(lines)


def spread(figure: Mapping[str, float | None] | None) -> str:
    """Return mean ± standard deviation in percent."""
    if figure is None or figure["mean"] is None:
        return "—"
    sd = "" if figure["sd"] is None else f" ± {100 * figure['sd']:.1f}"
    return f"{100 * figure['mean']:.1f}{sd}"


def difference(comparison: Mapping[str, Any]) -> str:
    """Return the difference with its interval in points."""
    if comparison["mean"] is None:
        return "—"
    if comparison["low"] is None:
        return f"{100 * comparison['mean']:+.1f} (one seed: no interval)"
    low, high = 100 * comparison["low"], 100 * comparison["high"]
    return f"{100 * comparison['mean']:+.1f} ({low:+.1f} to {high:+.1f})"


COLOURS = {CONFIRMED: "#2b7a3d", CONTRADICTED: "#c4501b"}


def draw(result: Result) -> Any:
    """Return a figure: the accuracy of each arm on the left, the differences on the right.

    If arms are compared with the best of others at the same cost, a third panel shows accuracy over cost.
    """
    from matplotlib.figure import Figure

    arms, comparisons = result["arms"], result["comparisons"]
    rows = max(len(arms), len(comparisons))
    costs = any(each["best"] for each in comparisons)
    figure = Figure(figsize=(12, 1.9 + 0.32 * rows + 4 * costs), layout="constrained")
    heights = [1.9 + 0.32 * rows, *([4] if costs else [])]
    axes: dict[str, Any] = figure.subplot_mosaic(
        [["arms", "differences"], *([["costs", "costs"]] if costs else [])], height_ratios=heights
    )
    left, right = axes["arms"], axes["differences"]
    _draw_arms(left, result)
    if costs:
        _draw_costs(axes["costs"], result)
    for y, each in enumerate(comparisons):
        if each["mean"] is None:
            continue
        colour = COLOURS.get(each["verdict"], "#62656e")
        low, high = each["low"], each["high"]
        if low is not None:
            right.plot([100 * low, 100 * high], [y, y], color=colour, linewidth=2.5, solid_capstyle="butt")
        right.plot(100 * each["mean"], y, "o", color=colour)
        if each["margin"]:
            right.plot([-each["margin"], each["margin"]], [y, y], "|", color="0.4", markersize=12)
    right.axvline(0, color="0.4", linewidth=1)
    labels = [_short(each) for each in comparisons]
    right.set_yticks(range(len(comparisons)), labels, fontsize=8)
    right.set_ylim(len(comparisons) - 0.5, -0.5)
    right.set(xlabel="difference in points, 95 % interval", title="green confirms, red contradicts the claim")
    for axis in axes.values():
        axis.grid(axis="x", color="0.9")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(9)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(f"{result['study']}: {count(len(result['seeds']), 'seed')}", fontsize=11)
    return figure


def _draw_arms(axis: Any, result: Result) -> None:
    score = result["score"]
    styles = ((score, "#0b4f8a", "o", "validation"), (TRAIN + score, "#b58b00", "D", "training images"))
    for metric, colour, marker, label in styles:
        figures = [(y, arm[metric]) for y, arm in enumerate(result["arms"].values()) if metric in arm]
        if not figures:
            continue
        axis.errorbar(
            [100 * figure["mean"] for _, figure in figures],
            [y for y, _ in figures],
            xerr=[100 * (figure["sd"] or 0) for _, figure in figures],
            fmt=marker,
            color=colour,
            label=label,
            capsize=3,
        )
    axis.set_yticks(range(len(result["arms"])), list(result["arms"]), fontsize=8)
    axis.set_ylim(len(result["arms"]) - 0.5, -0.5)
    axis.set(xlabel=f"{metric_name(score)}, %", title="mean ± standard deviation over seeds")


def _draw_costs(axis: Any, result: Result) -> None:
    """Draw accuracy over multiply-adds: the arms of which the best is taken, their front, and the others."""
    score, arms = result["score"], result["arms"]
    chosen = [each for each in result["comparisons"] if each["best"]]
    names = {side: list(dict.fromkeys(arm for each in chosen for arm in each[side])) for side in ("a", "b")}
    points = {
        side: {
            name: (arms[name]["macs"] / 1e6, 100 * arms[name][score]["mean"])
            for name in names[side]
            if score in arms[name]
        }
        for side in names
    }
    axis.plot(*_columns(points["b"].values()), "o", color="0.6", markersize=4)
    best = pareto_front(points["b"])
    axis.step(*_columns(points["b"][name] for name in best), where="post", color="0.4", linewidth=1)
    axis.plot(*_columns(points["a"].values()), "D", color="#0b4f8a")
    for name, at in [*((name, points["b"][name]) for name in best), *points["a"].items()]:
        axis.annotate(name, at, xytext=(4, 4), textcoords="offset points", fontsize=7)
    title = "accuracy over cost; the line joins the best of the grey arms at each cost"
    axis.set(xlabel="million multiply-adds", ylabel=f"{metric_name(score)}, %", title=title)


def _columns(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    known = list(points)
    return [x for x, _ in known], [y for _, y in known]


def pareto_front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the names of the points (cost, score) than which no cheaper one is as good, by cost."""
    front: list[str] = []
    for name in sorted(points, key=lambda name: (points[name][0], -points[name][1])):
        if not front or points[name][1] > points[front[-1]][1]:
            front.append(name)
    return front


def _short(comparison: Mapping[str, Any]) -> str:
    def names(arms: list[str]) -> str:
        return arms[0] if len(arms) == 1 else f"{arms[0]} … ({len(arms)})"

    measured = f"\n{metric_name(comparison['metric'])}" if comparison["metric"].startswith(TRAIN) else ""
    other = ("best of " if comparison["best"] else "") + names(comparison["b"])
    return f"{names(comparison['a'])} − {other}{measured}"
