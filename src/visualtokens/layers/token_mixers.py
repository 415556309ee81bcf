"""Let the tokens ``(B, L, C)`` talk: the transformer of Visual Transformers (Sec. 3.2), and its rivals."""

from __future__ import annotations

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.grouping import Tap
from visualtokens.layers.convolutions import (
    PixelConv,
    TokenConv,
    normalise_tokens,
    pixel_groups,
    to_map,
    to_tokens,
)
from visualtokens.ops import assign_soft, attend, scatter


class TokenTransformer(nn.Module):
    """VT Eq. 3: T' = T + BN(softmax((T K)(T Q)ᵀ / √D) T), softmax over the tokens that are summed,
    Eq. 4: T_out = T' + ReLU(T' F₁) F₂.

    One head, no values; K and Q lead to D = ``attn_dim`` channels in ``groups``. Both branches start as
    nothing.
    """

    # PAPER: Eq. 3 does not scale, and K, Q, F1, F2 have neither groups nor BatchNorm.
    def __init__(
        self, dim: int, *, hidden: int = 1024, attn_dim: int = 512, groups: int = 2, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        self.key = TokenConv(dim, attn_dim, groups=groups)
        self.query = TokenConv(dim, attn_dim, groups=groups)
        self.norm = nn.BatchNorm1d(dim)
        self.ffn1 = TokenConv(dim, hidden)
        self.ffn2 = TokenConv(hidden, dim, zero_init=True)
        self.drop_path = DropPath(drop_path)
        nn.init.zeros_(self.norm.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        # Eq. 3 sums over the index of Q, so K takes the place that queries have elsewhere.
        key, query, value = (t.unsqueeze(1) for t in (self.key(tokens), self.query(tokens), tokens))
        seen = attend(key, query, value).squeeze(1)  # (B, L, C)
        tokens = tokens + self.drop_path(normalise_tokens(self.norm, seen))
        return tokens + self.drop_path(self.ffn2(F.relu(self.ffn1(tokens))))


class TokenGraphConv(nn.Module):
    """VT Table 5, graph convolution: T + ((I − A_g) T) W, with one learned graph A_g ``(L, L)``.

    The number of tokens is fixed. A_g starts at zero: no token sees another.
    """

    def __init__(self, dim: int, *, tokens: int, drop_path: float = 0.0) -> None:
        super().__init__()
        self.graph = nn.Parameter(torch.zeros(tokens, tokens))
        self.conv = TokenConv(dim, dim)
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.drop_path(self.conv(tokens - self.graph @ tokens))


class TokenLinear(nn.Module):
    """VT Table 5, no mixing: T + T W, every token by itself."""

    def __init__(self, dim: int, *, drop_path: float = 0.0) -> None:
        super().__init__()
        self.conv = TokenConv(dim, dim)
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.drop_path(self.conv(tokens))


# From visual tokens back to pixels (Visual Transformers, Sec. 3.3).


class Projector(nn.Module):
    """VT Eq. 5: X_out = X + BN(softmax over tokens of (X W_Q)(T W_K)ᵀ / √C · (T W_V)).

    ``(B, C_in, H, W)`` and tokens ``(B, L, CT)`` give ``(B, C, H, W)``: a convolution first takes X to
    C channels where they differ. W_V is the identity where CT = C. The branch starts as nothing.
    """

    # PAPER: Eq. 5 does not scale and has no W_V, which CT ≠ C needs.
    def __init__(
        self, dim_in: int, dim: int | None = None, *, token_dim: int = 1024, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        dim = dim_in if dim is None else dim
        self.scale = dim**-0.5
        self.widen = nn.Identity() if dim_in == dim else PixelConv(dim_in, dim)
        self.query = PixelConv(dim, dim, groups=pixel_groups(dim))
        self.key = TokenConv(token_dim, dim)
        self.value = nn.Identity() if token_dim == dim else TokenConv(token_dim, dim)
        self.tap = Tap()
        self.norm = nn.BatchNorm2d(dim)
        self.drop_path = DropPath(drop_path)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        x = self.widen(x)
        grid = x.shape[2], x.shape[3]
        key = self.key(tokens) * self.scale  # (B, L, C)
        logits = to_tokens(self.query(x)) @ key.mT  # (B, N, L)
        weights = self.tap(assign_soft(logits, over="groups"), grid)
        answer = to_map(scatter(self.value(tokens), weights), grid)  # (B, C, H, W)
        return x + self.drop_path(self.norm(answer))
