"""The curves of deletion and insertion, told apart by dashes and markers as well as by colour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from visualtokens.explain.faithfulness import Faithfulness

# Okabe and Ito's colours, which colour-blind eyes tell apart; ours is the only thick solid line.
STYLES: dict[str, dict[str, Any]] = {
    "clusters": dict(color="#0072B2", linestyle="-", linewidth=3.0),
    "grad-cam": dict(color="#D55E00", linestyle="--", marker="o"),
    "integrated gradients": dict(color="#009E73", linestyle="-.", marker="s"),
    "rollout": dict(color="#CC79A7", linestyle=(0, (5, 1, 1, 1, 1, 1)), marker="^"),
    "random": dict(color="#595959", linestyle=":"),
}
TITLES = {
    "deletion": "Deletion: the hottest pixels go grey first\nfalling early is faithful",
    "insertion": "Insertion: the hottest pixels come back first\nrising early is faithful",
}


def figure(faithfulness: Faithfulness) -> Figure:
    from matplotlib.figure import Figure  # not pyplot, which keeps figures alive and is not for threads

    fig = Figure(figsize=(10, 4.6), layout="constrained")
    axes = fig.subplots(1, 2, sharey=True)
    for ax, which in zip(axes, TITLES, strict=True):
        _curves(ax, faithfulness, which)
    axes[0].set_ylabel(f"probability of the predicted class\nmean of {faithfulness.images} images")
    return fig


def _curves(ax: Axes, faithfulness: Faithfulness, which: str) -> None:
    for method in faithfulness.scores:
        curve = faithfulness.curve(method, which)
        mean = faithfulness.means(method)[which]
        share = np.linspace(0, 1, len(curve))
        style = dict(linewidth=1.8, markersize=5, markevery=max(len(curve) // 8, 1)) | STYLES[method]
        ax.plot(share, curve, label=f"{method} {mean.value:.3f}", **style)
    ax.set_title(TITLES[which], fontsize=11)
    ax.set_xlabel("share of the pixels")
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1.02)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(title="area under the curve", fontsize=9, title_fontsize=9, frameon=False)
