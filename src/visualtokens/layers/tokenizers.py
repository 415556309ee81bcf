"""The tokenizers of Visual Transformers (Sec. 3.1 and appendix C), and how to register another one.

A tokenizer maps a feature map ``(B, C, H, W)`` of any size to K tokens ``(B, K, CT)``. In the equations X is
the map as pixels ``(N, C)``. All but pooling weight the pixels by A ``(N, K)``, a softmax over pixels; a 1×1
convolution with BatchNorm then maps the weighted means to CT channels.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.errors import UserError, unknown
from visualtokens.grouping import Tap
from visualtokens.layers.convolutions import PixelConv, TokenConv, pixel_groups, to_tokens
from visualtokens.ops import assign_soft, cell_grid, gather, kmeans, pool_cells


class TokenizerFactory(Protocol):
    """Creates a module that maps ``(B, dim, H, W)`` to ``(B, tokens, token_dim)``.

    ``value`` asks for a learned convolution of the pixels before they are averaged.
    """

    def __call__(self, dim: int, *, tokens: int, token_dim: int, value: bool) -> nn.Module: ...


_factories: dict[str, TokenizerFactory] = {}


def register_tokenizer(name: str, factory: TokenizerFactory) -> None:
    """Makes a tokenizer available by name: ``tokenizer=name`` of VT-ResNets and of ``add_vt_stage``.

    >>> register_tokenizer("mine", MyTokenizer)
    >>> model = timm.create_model("vt_resnet18", tokenizer="mine")

    ``factory(dim, tokens=…, token_dim=…, value=…)`` returns a module that maps ``(B, dim, H, W)`` to
    ``(B, tokens, token_dim)``; a class with this constructor is a factory. Options of the command line
    (``--model_args.tokenizer mine``) and checkpoints refer to it by the same name, so register it before
    they are used.
    """
    if name in _factories:
        raise UserError(f"a tokenizer named {name!r} is already registered; choose another name")
    _factories[name] = factory


def make_tokenizer(name: str, dim: int, *, tokens: int, token_dim: int, value: bool = False) -> nn.Module:
    """Creates the registered tokenizer ``name`` for maps of ``dim`` channels."""
    if name not in _factories:
        raise unknown("tokenizer", name, _factories)
    return _factories[name](dim, tokens=tokens, token_dim=token_dim, value=value)


class _SoftTokenizer(nn.Module):
    """T = conv(Aᵀ V) with A = softmax over pixels of the logits that a subclass computes."""

    def __init__(self, dim: int, token_dim: int) -> None:
        super().__init__()
        # PAPER: Eq. 1, 2 and 6 do not scale the logits.
        self.scale = dim**-0.5
        self.tap = Tap()
        self.embed = TokenConv(dim, token_dim)

    def pool(self, logits: Tensor, value: Tensor) -> Tensor:
        """Returns the tokens ``(B, K, CT)`` for scaled ``logits (B, N, K)`` and ``value (B, C, H, W)``."""
        weights = self.tap(assign_soft(logits, over="patches"), _grid(value))  # (B, N, K)
        return self.embed(gather(to_tokens(value), weights))


class FilterTokenizer(_SoftTokenizer):
    """VT Eq. 1: A = softmax over pixels of X W_A / √C, T = conv(Aᵀ V).

    W_A is one learned filter per token. V = X, or a grouped convolution of X with ``value=True``.
    """

    def __init__(self, dim: int, *, tokens: int = 16, token_dim: int = 1024, value: bool = False) -> None:
        super().__init__(dim, token_dim)
        self.filter = PixelConv(dim, _check_tokens(tokens))
        self.value = _value(dim, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(to_tokens(self.filter(x)) * self.scale, self.value(x))


class RecurrentTokenizer(_SoftTokenizer):
    """VT Eq. 2: W_R = T_in W_{T→R}, A = softmax over pixels of Key(X) W_Rᵀ / √C, T = conv(Aᵀ Val(X)).

    The previous tokens ``(B, K, CT)`` are the queries; the result has the same shape.
    """

    # PAPER: Eq. 2 has neither Key nor Val.
    def __init__(self, dim: int, *, token_dim: int = 1024) -> None:
        super().__init__(dim, token_dim)
        self.query = TokenConv(token_dim, dim)
        self.key = PixelConv(dim, dim, groups=pixel_groups(dim))
        self.value = _value(dim, True)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        query = self.query(tokens) * self.scale  # (B, K, C)
        return self.pool(to_tokens(self.key(x)) @ query.mT, self.value(x))


class ClusterTokenizer(_SoftTokenizer):
    """VT Eq. 6: W_K = kmeans(X), A = softmax over pixels of X W_K / √C, T = conv(Aᵀ V).

    The queries are the cluster centres of the image itself. They are unit vectors; X is not normalised.
    V = X, or a grouped convolution of X with ``value=True``.
    """

    def __init__(
        self, dim: int, *, tokens: int = 16, token_dim: int = 1024, value: bool = False, iterations: int = 5
    ) -> None:
        super().__init__(dim, token_dim)
        self.centroids = Centroids(tokens, iterations=iterations)
        self.value = _value(dim, value)

    def forward(self, x: Tensor) -> Tensor:
        centroids = self.centroids(x) * self.scale  # (B, K, C)
        return self.pool(to_tokens(x) @ centroids.mT, self.value(x))


class Centroids(nn.Module):
    """W_K of VT Eq. 6: K unit vectors ``(B, K, C)``, the centres of cosine k-means over the pixels.

    Deterministic: k-means starts from the means of K cells of the map. The centres are constants, without a
    gradient to the map. A map of fewer than K pixels repeats its pixels in turn.
    """

    # PAPER: Listing 1 takes a tuple from `min`, assigns ties twice and divides 0 by 0 for an empty cluster.
    def __init__(self, tokens: int, *, iterations: int = 5) -> None:
        super().__init__()
        self.tokens = _check_tokens(tokens)
        self.iterations = iterations

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        pixels = to_tokens(x)  # (B, N, C)
        start: Tensor | None = None
        if self.tokens < pixels.shape[1]:
            # Listing 1 averages the pixels before it normalises: long vectors weigh more than short ones
            start = pool_cells(pixels.float(), _grid(x), self.tokens)  # (B, K, C)
        centres = kmeans(
            pixels, self.tokens, init=start, iterations=self.iterations, metric="cosine"
        ).centres  # (B, min(K, N), C)
        if centres.shape[1] == self.tokens:
            return centres
        return centres[:, torch.arange(self.tokens, device=x.device) % centres.shape[1]]  # (B, K, C)


class PoolTokenizer(nn.Module):
    """The baseline of VT Table 3: T = conv(means of V over K cells of the map), independent of the content.

    The cells are as close to the map's aspect ratio as possible: 16 on a square are 4×4, 8 are 2×4. V = X,
    or a grouped convolution of X with ``value=True``.
    """

    def __init__(self, dim: int, *, tokens: int = 16, token_dim: int = 1024, value: bool = False) -> None:
        super().__init__()
        self.tokens = _check_tokens(tokens)
        self.value = _value(dim, value)
        self.tap = Tap()
        self.embed = TokenConv(dim, token_dim)

    def forward(self, x: Tensor) -> Tensor:
        grid = _grid(x)
        if self.tap.wanted():
            self.tap(self._weights(grid, x).expand(x.shape[0], -1, -1), grid)
        return self.embed(pool_cells(to_tokens(self.value(x)), grid, self.tokens))

    def _weights(self, grid: tuple[int, int], like: Tensor) -> Tensor:
        """Returns the weight of each pixel in each mean, ``(N, K)``: the product of rows and columns."""
        down, across = (
            F.adaptive_avg_pool1d(torch.eye(size, device=like.device), cells)  # (size, cells)
            for size, cells in zip(grid, cell_grid(self.tokens, grid), strict=True)
        )
        return torch.kron(down, across)


register_tokenizer("filter", FilterTokenizer)
register_tokenizer("cluster", ClusterTokenizer)
register_tokenizer("pool", PoolTokenizer)


def _grid(x: Tensor) -> tuple[int, int]:
    return x.shape[2], x.shape[3]


def _value(dim: int, learned: bool) -> nn.Module:
    return PixelConv(dim, dim, groups=pixel_groups(dim)) if learned else nn.Identity()


def _check_tokens(tokens: int) -> int:
    if tokens < 1:
        raise UserError(f"tokens={tokens}; give at least 1")
    return tokens
