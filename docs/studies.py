"""Write the results of ``vtok reproduce``: ``python docs/studies.py``.

Writes a part of docs/papers.md, and verdicts.csv for `vtok papers`, from results/studies/.
A study that did not run is listed as such.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from visualtokens.explain.faithfulness import bootstrap_interval
from visualtokens.papers.figures import Published, published
from visualtokens.papers.verdicts import FILE
from visualtokens.progress import count
from visualtokens.studies.results import TRAIN, difference, load_results, spread
from visualtokens.studies.statistics import CONFIRMED, CONTRADICTED, UNDECIDED, Interval, verdict
from visualtokens.studies.study import Study, find_study, study_names
from visualtokens.tables import metric_name

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "papers.md"
RESULTS = ROOT / "results" / "studies"
PRETRAINED = ROOT / "results" / "imagenet_reduce.json"  # a ViT-B/16 with pooling inserted
VERDICTS = ROOT / "src" / "visualtokens" / "papers" / FILE
BEGIN = "<!-- Written by `python docs/studies.py`; do not edit. -->"
END = "<!-- End of the written part. -->"
METRICS = {"accuracy": "top1", "train_accuracy": "train_top1", "miou": "miou"}  # as in published.csv
COLUMNS = ("paper", "table", "rows", "metric", "study", "claim", "verdict", "difference", "seeds")
INTRODUCTION = " ".join(
    line or "\n\n"
    for line in """## Claims tested at small scale

`vtok reproduce` tests claims of the papers by trainings that take minutes on one core: small models on
small images, the same recipe for all arms, several seeds. It asks whether a claim holds here too, not
whether the paper is right: a claim about ImageNet may be true there and not here.

The verdict follows from the 95 % interval of the paired difference over seeds alone (Student's t):
*confirmed at small scale* if all of it is on the claimed side of zero, *contradicted at small scale* if all
of it is on the other side, else *undecided*. For a claim that two are the same, all of the interval must be
within the stated margin, or outside of it. With three seeds the interval is the mean ± 2.5 standard
deviations of the difference, so only large differences are decided. No correction is made for the number of
comparisons: of 20 intervals, one is expected to miss the true difference.

Accuracies are those of the last epoch (of the EMA weights, where the recipe has them) on the validation
images; "on training images" is the same model on the first 4,000 training images without augmentation.
""".splitlines()
).replace(" \n\n ", "\n\n")


def part(results: dict[str, dict[str, Any]]) -> str:
    """Return the written part of the page."""
    verdicts = Counter(each["verdict"] for found in results.values() for each in found["comparisons"])
    total = ", ".join(f"{verdicts[name]} {name}" for name in (CONFIRMED, CONTRADICTED, UNDECIDED))
    lines = [INTRODUCTION, "", f"In total: {total}.", ""]
    for name in study_names():
        study = find_study(name)
        lines += [f"### {name}", *(_ran(results[name]) if name in results else _not_run(study))]
        if name == "pooling-init":
            lines += _inserted_starts()
    return "\n".join(lines)


def _ran(result: dict[str, Any]) -> list[str]:
    score, source = result["score"], result["source"]
    (done, total), minutes = result["runs"], result["core_minutes"]
    seeds = count(len(result["seeds"]), "seed")
    partial = "" if done == total else f" So far {done} of {total} runs are finished."
    lines = [
        f"{result['claim']} ({_place(source)})",
        "",
        f"{seeds} on {result['data']}, {minutes:.0f} core-minutes.{partial} {result['notes']}".strip(),
        "",
        "| claim | table | published | here, points | verdict |",
        "|---|---|---|---|---|",
        *(_comparison(source["paper"], each) for each in result["comparisons"]),
        "",
        f"| arm | parameters | multiply-adds | {metric_name(score)}, % | on training images |",
        "|---|---|---|---|---|",
        *(_arm(name, arm, score) for name, arm in result["arms"].items()),
        "",
        f"Here: `{result['command']}` ([plot](../results/studies/{result['study']}.png)). "
        f"Full scale: `{result['full_scale']}`",
        "",
    ]
    return lines


def _place(source: dict[str, Any]) -> str:
    tables = ", ".join(each if each.startswith("Fig") else f"Table {each}" for each in source["tables"])
    section = source["section"]
    return f"{source['paper']}, {tables}, {section if section[0].islower() else 'Section ' + section}"


def _comparison(paper: str, each: dict[str, Any]) -> str:
    margin = f" (± {each['margin']:g})" if each["margin"] else ""
    figures = printed(paper, each)
    shown = "—"
    if figures:
        a, b = figures
        shown = f"{a.value} and {b.value} ({a.number - b.number:+.1f})"
    decided = (
        f"**{each['verdict']}**" if each["verdict"] in (CONFIRMED, CONTRADICTED) else each["verdict"] or "—"
    )
    return f"| {each['claim']}{margin} | {each['table']} | {shown} | {difference(each)} | {decided} |"


def printed(paper: str, each: dict[str, Any]) -> list[Published]:
    """Return the published figures of both sides of a comparison; none if the paper prints none."""
    found = []
    for row in each["published"]:
        metric = METRICS[each["metric"]]
        rows = [f for f in published(paper, each["table"]) if f"{f.model} {f.variant}" == row]
        found += [f for f in rows if f.metric == metric]
    return found


def _arm(name: str, arm: dict[str, Any], score: str) -> str:
    parameters = "—" if arm["parameters"] is None else f"{arm['parameters'] / 1e6:.2f} M"
    macs = "—" if arm["macs"] is None else f"{arm['macs'] / 1e6:.1f} M"
    return f"| {name} | {parameters} | {macs} | {spread(arm.get(score))} | {spread(arm.get(TRAIN + score))} |"


def _not_run(study: Study) -> list[str]:
    return [
        f"{study.claim} ({_place(vars(study.source))})",
        "",
        f"Not run yet: `vtok reproduce {study.name}`, about {study.price:.0f} core-minutes. "
        f"Full scale: `{study.full_scale}`",
        "",
    ]


# Initial centres of k-means in a pretrained ViT-B/16, without training.

STARTS, UPDATES, BUDGETS = ("significance", "random", "distinct"), (0, 1, 3), (0.5, 0.3)
MARGIN = 0.01  # as in the study


def _inserted_starts() -> list[str]:
    """The top-1 accuracies, and the verdict on the paper's claim by an interval over photos."""
    rows = json.loads(PRETRAINED.read_text("utf-8"))["rows"]
    found = {
        (row["options"].get("init", "distinct"), row["options"].get("iterations", 3), row["budget"]): row
        for row in rows
        if row["method"] == "weighted_kmeans" and set(row["options"]) <= {"init", "iterations"}
    }
    photos = found[STARTS[0], 3, BUDGETS[0]]["photos"]
    lines = [
        f"Inserted into a pretrained ViT-B/16 without training: top-1 on {photos} ImageNet photos, with the "
        "numbers of tokens that "
        + " / ".join(f"{budget:g}" for budget in BUDGETS)
        + " of the multiply-adds allow with 3 updates "
        "(`python benchmarks/imagenet_reduce.py --weights FILE --photos FOLDER`):",
        "",
        "| initial centres | " + " | ".join(count(n, "update") for n in UPDATES) + " |",
        "|---|" + "---|" * len(UPDATES),
    ]
    for start in STARTS:
        cells = (" / ".join(f"{found[start, n, b]['top1']:.1f}" for b in BUDGETS) for n in UPDATES)
        lines.append(f"| {start} | {' | '.join(cells)} |")
    for budget in BUDGETS:
        ours, theirs = (np.array(found[start, 3, budget]["correct"]) for start in STARTS[:2])
        gap = Interval(float((ours - theirs).mean()), *bootstrap_interval(ours - theirs))
        decided = verdict(gap, expect="same", margin=MARGIN)
        shown = difference(vars(gap))
        lines += [
            "",
            "The same within a point? Significance minus random, 3 updates, "
            f"{budget:g} of the multiply-adds: {shown}, {decided}.",
        ]
    return [*lines, ""]


def verdicts_csv(results: dict[str, dict[str, Any]]) -> str:
    """Return the verdicts as csv."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for name, result in results.items():
        for each in result["comparisons"]:
            if each["verdict"] is not None:
                writer.writerow(
                    {
                        **{key: each[key] for key in ("table", "claim", "metric", "verdict")},
                        "paper": result["source"]["paper"],
                        "rows": ";".join(each["published"]),
                        "study": name,
                        "difference": difference(each),
                        "seeds": len(result["seeds"]),
                    }
                )
    return text.getvalue()


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return docs/papers.md with the part between the marks replaced."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{part(results)}\n{END}{after}"


def main() -> None:
    results = load_results(RESULTS)
    PAGE.write_text(page(results), "utf-8")
    VERDICTS.write_text(verdicts_csv(results), "utf-8")


if __name__ == "__main__":
    main()
