"""The groupings of a model, layer by layer, as regions of the patch grid."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

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


# Who attends to whom, read while a model runs.
#
# Fused attention never keeps its matrix, so it is computed beside it, from the same queries and keys. Where
# a model spells its attention out, the matrix is a softmax over the last of four dimensions. Every model
# that does one or the other can be read so, without a change to its code.

SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)


@dataclass(frozen=True)
class Attended:
    """One attention of a forward pass."""

    weights: Tensor  # (B, N, M), the mean over the heads: how N queries attend to M keys
    tap: str | None  # the last grouping that was made before it


class _Recorder(TorchFunctionMode):
    def __init__(self, groupings: dict[str, Grouping], *, square: bool) -> None:
        super().__init__()
        self.groupings = groupings
        self.square = square
        self.found: list[Attended] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self.note_fused(*args, **(kwargs or {}))
        elif func in SOFTMAX and out.ndim == 4 and _dimension(*args, **(kwargs or {})) in (-1, 3):
            self.note(out.detach().float())
        return out

    def note_fused(self, query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> None:
        if self.wants(query.shape[-2], key.shape[-2]):
            self.note(_weights(query, key, *more, **options))

    def note(self, weights: Tensor) -> None:
        """Of ``(B, heads, N, M)``."""
        if self.wants(*weights.shape[2:]):
            self.found.append(Attended(weights.mean(1), next(reversed(self.groupings), None)))

    def wants(self, queries: int, keys: int) -> bool:
        return self.square or queries != keys


@contextlib.contextmanager
def record_attention(groupings: dict[str, Grouping], *, square: bool = True) -> Iterator[list[Attended]]:
    """Collect every attention of the calling thread's forward passes inside the block, in order.

    ``groupings`` is what :func:`~visualtokens.record_groupings` fills meanwhile; an empty one will do.
    Without ``square``, those with as many queries as keys, which take the most memory, are left out.
    """
    recorder = _Recorder(groupings, square=square)
    with recorder:
        yield recorder.found


def _dimension(*args: Any, dim: int | None = None, **options: Any) -> int | None:
    """Over which dimension a softmax goes, from its arguments."""
    return args[1] if len(args) > 1 else dim


def _weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q kᵀ · scale + mask), ``(B, heads, N, M)``; the arguments are those of the fused one."""
    query, key = query.detach().float(), key.detach().float()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)  # (B, heads, N, M)
    if is_causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        logits = logits + attn_mask
    return logits.softmax(-1)
