"""The groupings of a model, layer by layer, as regions of the patch grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from visualtokens.errors import UserError
from visualtokens.grouping import Grouping

Ints = NDArray[np.int64]

# Soft: overlapping maps over all patches (VT, PaCa). Tessellation: each patch is shared by its nearest
# super tokens (STViT). Hard: each patch belongs to one token (pooling, merging), or to none.
Form = Literal["soft", "tessellation", "hard"]

# A row of tokens laid over the image would have cells this many times as tall as wide, or more.
ROW_ASPECT = 4


@dataclass(frozen=True, eq=False)
class Layer:
    """What the tokens of one layer stand for."""

    name: str  # of the tap
    form: Form
    tokens: int
    assignment: Ints  # (h, w): the token that holds most of each patch, -1 for none

    @property
    def dropped(self) -> int:
        """How many patches no token stands for."""
        return int((self.assignment < 0).sum())


def form_of(grouping: Grouping) -> Form:
    if grouping.index is None:
        return "soft"
    return "hard" if grouping.index.shape[2] == 1 else "tessellation"


def compose(first: Grouping, then: Grouping) -> Grouping:
    """Patches → tokens → fewer tokens, as one grouping of the patches.

    ``then`` groups the K tokens of ``first``; both are hard. A patch whose token is dropped has none.
    """
    if form_of(first) != "hard" or form_of(then) != "hard":
        raise UserError(f"cannot compose {form_of(first)} and {form_of(then)} groupings; both must be hard")
    if then.weights.shape[1] != first.tokens:
        raise UserError(
            f"cannot compose groupings: the first makes {first.tokens} tokens, "
            f"the second groups {then.weights.shape[1]}"
        )
    source, onward = first.hard(), then.hard()  # (B, N), (B, K)
    if first.tokens:
        source = torch.where(source < 0, -1, onward.gather(1, source.clamp_min(0)))  # (B, N)
    return Grouping.hard_from(source, then.tokens, first.grid)


def on_patches(groupings: Mapping[str, Grouping], image: tuple[int, int]) -> dict[str, Grouping]:
    """The groupings with every one on a grid of patches of the ``image`` (H, W).

    One that groups the tokens of the layer before it, as a row, is composed with that layer.
    """
    out: dict[str, Grouping] = {}
    before: Grouping | None = None
    for name, grouping in groupings.items():
        if before is not None and _groups_tokens(grouping, before, image):
            grouping = compose(before, grouping)
        out[name] = before = grouping
    return out


def _groups_tokens(grouping: Grouping, before: Grouping, image: tuple[int, int]) -> bool:
    rows, columns = grouping.grid
    aspect = image[0] * columns / max(image[1], 1)  # of the cells, if the row lay over the image
    return (
        rows == 1
        and columns == before.tokens
        and aspect >= ROW_ASPECT
        and form_of(before) == form_of(grouping) == "hard"
    )


def layers_of(groupings: Mapping[str, Grouping]) -> tuple[Layer, ...]:
    """The layers that divide the patches among tokens, each once: one that changes nothing is left out."""
    out: list[Layer] = []
    for name, grouping in groupings.items():
        if form_of(grouping) == "soft":
            continue
        assignment = assignment_of(grouping)
        if not out or not np.array_equal(out[-1].assignment, assignment):
            out.append(Layer(name, form_of(grouping), grouping.tokens, assignment))
    return tuple(out)


def assignment_of(grouping: Grouping) -> Ints:
    """``(h, w)`` of the first image: the token that holds most of each patch, -1 for none."""
    return grouping.hard()[0].unflatten(0, grouping.grid).cpu().numpy()
