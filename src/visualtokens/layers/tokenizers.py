"""From pixels to visual tokens (Visual Transformers, Sec. 3.1 and appendix C).

Each takes a feature map ``(B, C, H, W)`` of any size and gives ``(B, L, CT)``: L tokens of CT channels.
In the equations X is the map as ``(N, C)`` pixels. All but pooling weigh the pixels by A ``(N, L)``,
softmax over pixels, and a 1×1 convolution with BatchNorm takes the weighted means to CT channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.errors import UserError
from visualtokens.grouping import Tap
from visualtokens.layers.convolutions import PixelConv, TokenConv, pixel_groups, to_tokens
from visualtokens.ops import assign_soft, cell_grid, gather, kmeans, pool_cells


def _grid(x: Tensor) -> tuple[int, int]:
    return x.shape[2], x.shape[3]


def _value(dim: int, wanted: bool) -> nn.Module:
    return PixelConv(dim, dim, groups=pixel_groups(dim)) if wanted else nn.Identity()


def _check_tokens(tokens: int) -> int:
    if tokens < 1:
        raise UserError(f"tokens={tokens}; give at least 1")
    return tokens


class _SoftTokenizer(nn.Module):
    """T = conv(Aᵀ V), A = softmax over pixels of the logits."""

    def __init__(self, dim: int, token_dim: int) -> None:
        super().__init__()
        # PAPER: Eq. 1, 2 and 6 do not scale the logits.
        self.scale = dim**-0.5
        self.tap = Tap()
        self.embed = TokenConv(dim, token_dim)

    def pool(self, logits: Tensor, value: Tensor) -> Tensor:
        """``logits (B, N, L)``, already scaled, and ``value (B, C, H, W)`` give ``(B, L, CT)``."""
        weights = self.tap(assign_soft(logits, over="patches"), _grid(value))  # (B, N, L)
        return self.embed(gather(to_tokens(value), weights))


class FilterTokenizer(_SoftTokenizer):
    """VT Eq. 1: A = softmax over pixels of X W_A / √C, T = conv(Aᵀ V).

    W_A is a learned filter per token. V = X, or a grouped convolution of it with ``value=True``.
    """

    def __init__(self, dim: int, *, tokens: int = 16, token_dim: int = 1024, value: bool = False) -> None:
        super().__init__(dim, token_dim)
        self.filter = PixelConv(dim, _check_tokens(tokens))
        self.value = _value(dim, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(to_tokens(self.filter(x)) * self.scale, self.value(x))


class RecurrentTokenizer(_SoftTokenizer):
    """VT Eq. 2: W_R = T_in W_{T→R}, A = softmax over pixels of Key(X) W_Rᵀ / √C, T = conv(Aᵀ Val(X)).

    The previous tokens ``(B, L, CT)`` say what to look for; as many come out.
    """

    # PAPER: Eq. 2 has neither Key nor Val.
    def __init__(self, dim: int, *, token_dim: int = 1024) -> None:
        super().__init__(dim, token_dim)
        self.query = TokenConv(token_dim, dim)
        self.key = PixelConv(dim, dim, groups=pixel_groups(dim))
        self.value = PixelConv(dim, dim, groups=pixel_groups(dim))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        query = self.query(tokens) * self.scale  # (B, L, C)
        return self.pool(to_tokens(self.key(x)) @ query.mT, self.value(x))


class Centroids(nn.Module):
    """W_K of VT Eq. 6: L unit vectors ``(B, L, C)``, the centres of cosine k-means over the pixels.

    Starts from the means of L cells of the map, so it is deterministic. Treats the centres as given:
    no gradient reaches the map through them. A map of fewer than L pixels repeats its pixels in turn.
    """

    # PAPER: Listing 1 takes a tuple from `min`, assigns ties twice and divides 0 by 0 for an empty cluster.
    def __init__(self, tokens: int, *, iterations: int = 5) -> None:
        super().__init__()
        self.tokens = _check_tokens(tokens)
        self.iterations = iterations

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            found = kmeans(
                to_tokens(x), self.tokens, init=_grid(x), iterations=self.iterations, metric="cosine"
            ).centres  # (B, min(L, N), C)
            if found.shape[1] == self.tokens:
                return found
            return found[:, torch.arange(self.tokens, device=x.device) % found.shape[1]]  # (B, L, C)


class ClusterTokenizer(_SoftTokenizer):
    """VT Eq. 6: W_K = kmeans(X), A = softmax over pixels of X W_K / √C, T = conv(Aᵀ V).

    The pixels of the image itself say what to look for. W_K are unit vectors, X is not normalised.
    V = X, or a grouped convolution of it with ``value=True``.
    """

    def __init__(
        self, dim: int, *, tokens: int = 16, token_dim: int = 1024, value: bool = False, iterations: int = 5
    ) -> None:
        super().__init__(dim, token_dim)
        self.centroids = Centroids(tokens, iterations=iterations)
        self.value = _value(dim, value)

    def forward(self, x: Tensor) -> Tensor:
        centroids = self.centroids(x) * self.scale  # (B, L, C)
        return self.pool(to_tokens(x) @ centroids.mT, self.value(x))


class PoolTokenizer(nn.Module):
    """The baseline of VT Table 3: T = conv(means of V over L cells of the map), whatever they show.

    The cells are shaped most like the map: 16 on a square are 4×4, 8 are 2×4. V = X, or a grouped
    convolution of it with ``value=True``.
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
        """``(N, L)``: what each pixel contributes to each mean; rows and columns are averaged apart."""
        down, across = (
            F.adaptive_avg_pool1d(torch.eye(size, device=like.device), cells)  # (size, cells)
            for size, cells in zip(grid, cell_grid(self.tokens, grid), strict=True)
        )
        return torch.kron(down, across)
