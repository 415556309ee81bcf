"""What a forward pass records: the groupings as regions of the patch grid, and the attention weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from visualtokens.explain.importance import normalise
from visualtokens.grouping import Grouping

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

MAP_SIDE = 28  # cells of the longer side of a stored map, at most: smooth maps lose nothing that is seen

# Soft: overlapping maps over all patches (VT, PaCa). Tessellation: each patch is shared by its nearest
# super tokens (STViT). Hard: each patch belongs to at most one token (pooling, merging).
Form = Literal["soft", "tessellation", "hard"]


@dataclass(frozen=True, eq=False)
class Layer:
    """The tokens of one layer and the patches that each represents."""

    name: str  # of the tap
    form: Form
    tokens: int
    assignment: Ints  # (h, w): the token with the largest weight on each patch, -1 for none
    maps: Bytes | None = None  # soft: (K, h', w'), the weights of each token, 0 to its largest as 0 to 255

    @property
    def dropped(self) -> int:
        """The number of patches that no token represents."""
        return int((self.assignment < 0).sum())


def form_of(grouping: Grouping) -> Form:
    """Whether a grouping is soft, a tessellation or hard."""
    if grouping.index is None:
        return "soft"
    return "hard" if grouping.index.shape[2] == 1 else "tessellation"


def assignment_of(grouping: Grouping) -> Ints:
    """``(h, w)`` of the first image: the token with the largest weight on each patch, -1 for none."""
    return grouping.hard()[0].unflatten(0, grouping.grid).cpu().numpy()


def layers_of(groupings: Mapping[str, Grouping]) -> tuple[Layer, ...]:
    """The layers with their tokens, without those that repeat the previous one."""
    out: list[Layer] = []
    for name, grouping in groupings.items():
        form = form_of(grouping)
        maps = quantise(grouping.maps()[0]) if form == "soft" else None
        layer = Layer(name, form, grouping.tokens, assignment_of(grouping), maps)
        if not out or not _same(out[-1], layer):
            out.append(layer)
    return tuple(out)


def quantise(maps: Tensor) -> Bytes:
    """``(K, h', w')``: maps ``(K, h, w)`` of at most ``MAP_SIDE`` cells a side, each from 0 to 255."""
    h, w = maps.shape[1:]
    shrink = min(MAP_SIDE / max(h, w), 1.0)
    size = max(round(h * shrink), 1), max(round(w * shrink), 1)
    pooled = F.interpolate(maps.float().unsqueeze(1), size=size, mode="area").squeeze(1)
    return (normalise(pooled) * 255).round().byte().cpu().numpy()


def _same(a: Layer, b: Layer) -> bool:
    """Whether two layers divide the patches in the same way, and with the same weights if they are soft."""
    if (a.maps is None) != (b.maps is None) or not np.array_equal(a.assignment, b.assignment):
        return False
    return a.maps is None or b.maps is None or np.array_equal(a.maps, b.maps)


# Attention weights of any model. Fused attention does not store them, so they are recomputed from the same
# queries and keys. Unfused attention is recognised as a softmax over the last of four dimensions.

SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)


@dataclass(frozen=True)
class Attention:
    """The weights of one attention call."""

    weights: Tensor  # (B, N, M) of N queries over M keys, mean over the heads; (B, heads, N, M) with a graph
    tap: str | None  # the last tap reached before the call


@contextlib.contextmanager
def record_attention(
    groupings: dict[str, Grouping], *, square: bool = True, graph: bool = False
) -> Iterator[list[Attention]]:
    """Collect the attention weights of the calling thread's forward passes inside the block, in order.

    ``groupings`` is the dictionary that :func:`~visualtokens.record_groupings` is filling, or an empty one.
    ``square=False`` leaves out calls with as many queries as keys, which need the most memory. ``graph=True``
    keeps the weights of every head, as the part of the autograd graph through which the output is computed.
    """
    recorder = _AttentionRecorder(groupings, square=square, graph=graph)
    with recorder:
        yield recorder.recorded


class _AttentionRecorder(TorchFunctionMode):
    def __init__(self, groupings: dict[str, Grouping], *, square: bool, graph: bool) -> None:
        super().__init__()
        self.groupings = groupings
        self.square = square
        self.graph = graph
        self.recorded: list[Attention] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._fused(func, *args, **kwargs)
        out = func(*args, **kwargs)
        if func in SOFTMAX and out.ndim == 4 and _softmax_dim(*args, **kwargs) in (-1, 3):
            self._record(out if self.graph else out.detach().float())
        return out

    def _fused(
        self,
        func: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        wanted = self._wanted(query.shape[-2], key.shape[-2])
        if wanted and not (is_causal or enable_gqa):  # those are of language models only
            if self.graph:
                weights = _weights(query, key, attn_mask, scale)
                self._record(weights)
                return weights.to(value.dtype) @ value
            self._record(_weights(query.detach(), key.detach(), attn_mask, scale))
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    def _record(self, weights: Tensor) -> None:
        """Store ``weights (B, heads, N, M)``."""
        if self._wanted(*weights.shape[2:]):
            kept = weights if self.graph else weights.mean(1)
            self.recorded.append(Attention(kept, next(reversed(self.groupings), None)))

    def _wanted(self, queries: int, keys: int) -> bool:
        return self.square or queries != keys


def _softmax_dim(*args: Any, dim: int | None = None, **kwargs: Any) -> int | None:
    """The ``dim`` argument of a softmax call."""
    return args[1] if len(args) > 1 else dim


def _weights(query: Tensor, key: Tensor, attn_mask: Tensor | None, scale: float | None) -> Tensor:
    """softmax(q kᵀ · scale + mask) ``(B, heads, N, M)``, as fused attention computes it."""
    query, key = query.float(), key.float()  # (B, heads, N, D), (B, heads, M, D)
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)  # (B, heads, N, M)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        logits = logits + attn_mask
    return logits.softmax(-1)


def patch_attention(recorded: Sequence[Attention], tap: str, grouping: Grouping) -> Tensor | None:
    """``(K, h, w)``: how the patches attend to each cluster of a tap's ``grouping``, None if they do not.

    The last call after the tap whose weights are ``(N, K)``. Record with ``square=False``: where K = N, that
    shape could also be clusters attending to each other.
    """
    shape = (grouping.grid[0] * grouping.grid[1], grouping.tokens)
    for attention in reversed(recorded):
        if attention.tap == tap and attention.weights.shape[1:] == shape:
            return attention.weights[0].T.unflatten(1, grouping.grid)  # (K, h, w)
    return None


def attention_channels(recorded: Sequence[Attention], size: tuple[int, int]) -> list[Tensor]:
    """``(M, h, w)`` of each attention of patches: how they attend to each of M keys, such as PVTv2's.

    ``size`` (H, W) is that of the image. Calls whose queries are not the patches of its grid are left out:
    a class token is among them, or they are those of a window.
    """
    found = []
    for attention in recorded:
        queries = attention.weights.shape[1]
        h = round((queries * size[0] / size[1]) ** 0.5)
        if len(attention.weights) == 1 and h and h * (queries // h) == queries and size[0] % h == 0:
            w = queries // h
            if size[0] * w == size[1] * h:
                found.append(attention.weights[0].T.unflatten(1, (h, w)))
    return found
