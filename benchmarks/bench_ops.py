"""K-means and k-medoids against scikit-learn and against straightforward torch, in one interleaved run.

    python benchmarks/bench_ops.py [--save results/bench_ops.json]

All candidates make the same number of updates, and all but "k-means++" start from the same tokens.
"Straightforward" follows the equations literally: new distances in each iteration, one-hot products for the
sums. Its k-medoids breaks ties by the rounding of ``torch.cdist``, ours by the lowest index. In clusters of
two tokens every choice is a tie, so the two reach different optima. "Exact" is the straightforward form with
exact distances (slow, so not timed); it must reach the objective of ours.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from visualtokens.bench import interleave, machine, peak_memory
from visualtokens.ops import kmeans, kmedoids

ITERATIONS = 3
CDIST = "use_mm_for_euclid_dist_if_necessary"  # torch's default: fast, with rounding errors
SETTINGS = [  # batch, N, K, C
    (32, 196, 98, 384),
    (2, 3136, 196, 384),
]


def sklearn_loop(x: Tensor, k: int) -> Tensor:
    """scikit-learn's Lloyd iterations, image by image, from the given initial centres."""
    return torch.stack([_sklearn(image, k, image[:k]) for image in x.numpy()])


def sklearn_plus_plus(x: Tensor, k: int) -> Tensor:
    """The same from scikit-learn's default initial centres."""
    return torch.stack([_sklearn(image, k, "k-means++") for image in x.numpy()])


def _sklearn(image: NDArray[np.float32], k: int, init: NDArray[np.float32] | str) -> Tensor:
    model = KMeans(k, init=init, n_init=1, max_iter=ITERATIONS, tol=0, algorithm="lloyd", random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # three updates need not converge
        return torch.from_numpy(model.fit(image).cluster_centers_)


def straightforward_kmeans(x: Tensor, k: int) -> Tensor:
    centres = x[:, :k]
    for _ in range(ITERATIONS):
        members = F.one_hot(torch.cdist(x, centres).argmin(2), k).to(x.dtype)  # (B, N, K)
        count = members.sum(1).unsqueeze(2)  # (B, K, 1)
        centres = torch.where(count > 0, members.mT @ x / count.clamp_min(1), centres)
    torch.cdist(x, centres).argmin(2)
    return centres


def straightforward_kmedoids(x: Tensor, k: int, mode: str = CDIST) -> Tensor:
    medoids = torch.arange(k).expand(len(x), k)  # (B, K)
    for _ in range(ITERATIONS):
        centres = x.gather(1, medoids.unsqueeze(2).expand(-1, -1, x.shape[2]))
        nearest = torch.cdist(x, centres, compute_mode=mode).argmin(2)  # (B, N)
        members = F.one_hot(nearest, k).to(x.dtype)  # (B, N, K)
        distance = torch.cdist(x, x, compute_mode=mode).square()  # (B, N, N)
        cost = distance @ members  # (B, N, K): cost of token i as the medoid of cluster j
        medoids = cost.masked_fill(members == 0, torch.inf).argmin(1)  # (B, K)
    centres = x.gather(1, medoids.unsqueeze(2).expand(-1, -1, x.shape[2]))
    torch.cdist(x, centres).argmin(2)
    return centres


def exact_kmedoids(x: Tensor, k: int) -> Tensor:
    return straightforward_kmedoids(x.double(), k, mode="donot_use_mm_for_euclid_dist")


def our_kmeans(x: Tensor, k: int) -> Tensor:
    return kmeans(x, k, init=torch.arange(k), iterations=ITERATIONS).centres


def our_kmedoids(x: Tensor, k: int) -> Tensor:
    indices = kmedoids(x, k, init=torch.arange(k), iterations=ITERATIONS).indices
    return x.gather(1, indices.unsqueeze(2).expand(-1, -1, x.shape[2]))


METHODS = {
    "kmeans, scikit-learn loop": sklearn_loop,
    "kmeans++, scikit-learn loop": sklearn_plus_plus,
    "kmeans, straightforward": straightforward_kmeans,
    "kmeans, visualtokens": our_kmeans,
    "kmedoids, straightforward": straightforward_kmedoids,
    "kmedoids, visualtokens": our_kmedoids,
}


def tokens(batch: int, n: int, c: int) -> Tensor:
    """Clustered tokens, as in a network: noise around 64 prototypes, ``(B, N, C)``."""
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.randn(64, c, generator=generator)
    kind = torch.randint(0, 64, (batch, n), generator=generator)
    return prototypes[kind] + 0.7 * torch.randn(batch, n, c, generator=generator)


def objective(x: Tensor, centres: Tensor) -> float:
    """Token Pooling Eq. 13 without weights, summed over the batch."""
    return torch.cdist(x.double(), centres.double()).square().amin(2).sum().item()


def measure(batch: int, n: int, k: int, c: int, rounds: int) -> dict[str, object]:
    x = tokens(batch, n, c)
    objectives = {name: objective(x, method(x, k)) for name, method in METHODS.items()}
    timings = interleave(
        {name: (lambda method=method: method(x, k)) for name, method in METHODS.items()}, rounds=rounds
    )
    rows = {}
    for name in METHODS:
        row = {
            "milliseconds": 1e3 / timings.rate(name).median,
            "objective": objectives[name],
            "peak_mb": peak_memory(lambda name=name: METHODS[name](x, k)) / 1e6,
        }
        if "visualtokens" in name:
            kind = name.split(",")[0]
            for rival in [other for other in METHODS if "visualtokens" not in other]:
                if rival.startswith(kind) or "scikit" in rival:
                    ratios = [
                        a / b for a, b in zip(timings.seconds(rival), timings.seconds(name), strict=True)
                    ]
                    row[f"times as fast as {rival}"] = sorted(ratios)[len(ratios) // 2]
                    row[f"range against {rival}"] = [min(ratios), max(ratios)]
        rows[name] = row
    rows["kmedoids, straightforward"]["objective, exact"] = objective(x, exact_kmedoids(x, k))
    return {"batch": batch, "N": n, "K": k, "C": c, "quiet": timings.quiet, "methods": rows}


def memory_growth() -> dict[str, list[float]]:
    """Peak bytes per B·N² of our k-medoids and k-means, for growing N."""
    sizes = [196, 392, 784, 1568]
    growth: dict[str, list[float]] = {
        "N": list(map(float, sizes)),
        "kmedoids / (B N²)": [],
        "kmeans / (B N²)": [],
    }
    for n in sizes:
        x = tokens(2, n, 384)
        growth["kmedoids / (B N²)"].append(
            peak_memory(lambda x=x, n=n: our_kmedoids(x, n // 2)) / (2 * n * n)
        )
        growth["kmeans / (B N²)"].append(peak_memory(lambda x=x, n=n: our_kmeans(x, n // 2)) / (2 * n * n))
    return growth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, help="JSON file for the results")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    result = {
        "command": "python benchmarks/bench_ops.py --save results/bench_ops.json",
        "machine": machine(),
        "iterations": ITERATIONS,
        "settings": [measure(*setting, rounds=options.rounds) for setting in SETTINGS],
        "peak_bytes": memory_growth(),
    }
    for setting in result["settings"]:
        print(f"\nB={setting['batch']} N={setting['N']} K={setting['K']} C={setting['C']}")
        for name, row in setting["methods"].items():
            ratios = [f"exact {v:.5g}" for key, v in row.items() if key.endswith("exact")]
            ratios += [f"{v:.1f}× {key[17:]}" for key, v in row.items() if key.startswith("times")]
            print(
                f"  {name:28s} {row['milliseconds']:9.2f} ms  objective {row['objective']:.5g}"
                f"  peak {row['peak_mb']:7.1f} MB  {', '.join(ratios)}"
            )
    print("\npeak bytes", json.dumps(result["peak_bytes"]))
    if options.save:
        options.save.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
