"""Token mixers and the projector of Visual Transformers (Sec. 3.2 and 3.3).

A mixer maps tokens ``(B, K, C)`` to tokens of the same shape; the projector writes them back to the pixels.
"""

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
    """VT Eq. 3: T' = T + BN(softmax((T W_K)(T W_Q)ᵀ / √D) T), Eq. 4: T_out = T' + ReLU(T' F₁) F₂.

    One head without values; W_K and W_Q map to D = ``attn_dim`` channels in ``groups``. Both branches start
    as the identity.
    """

    # PAPER: Eq. 3 does not scale, and W_K, W_Q, F₁, F₂ have neither groups nor BatchNorm.
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
        # Eq. 3 sums over the index of W_Q, so the keys are what other papers call queries.
        key, query, value = (t.unsqueeze(1) for t in (self.key(tokens), self.query(tokens), tokens))
        attended = attend(key, query, value).squeeze(1)  # (B, K, C)
        tokens = tokens + self.drop_path(normalise_tokens(self.norm, attended))
        return tokens + self.drop_path(self.ffn2(F.relu(self.ffn1(tokens))))


class TokenGraphConv(nn.Module):
    """VT Table 5, graph convolution: T + ((I − A_g) T) W, with one learned graph A_g ``(K, K)``.

    The number of tokens is fixed. A_g starts at zero, without an edge between tokens.
    """

    def __init__(self, dim: int, *, tokens: int, drop_path: float = 0.0) -> None:
        super().__init__()
        self.graph = nn.Parameter(torch.zeros(tokens, tokens))
        self.conv = TokenConv(dim, dim)
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.drop_path(self.conv(tokens - self.graph @ tokens))


class TokenLinear(nn.Module):
    """VT Table 5, no mixing: T + T W, each token separately."""

    def __init__(self, dim: int, *, drop_path: float = 0.0) -> None:
        super().__init__()
        self.conv = TokenConv(dim, dim)
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.drop_path(self.conv(tokens))


class Projector(nn.Module):
    """VT Eq. 5: X_out = X + BN(softmax over tokens of (X W_Q)(T W_K)ᵀ / √C · (T W_V)).

    Maps ``x (B, C_in, H, W)`` and ``tokens (B, K, CT)`` to ``(B, C, H, W)``. If C_in ≠ C, a convolution first
    maps X to C channels; W_V is the identity if CT = C. The branch starts as the identity.
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
        x = self.widen(x)  # (B, C, H, W)
        grid = x.shape[2], x.shape[3]
        key = self.key(tokens) * self.scale  # (B, K, C)
        logits = to_tokens(self.query(x)) @ key.mT  # (B, N, K)
        weights = self.tap(assign_soft(logits, over="groups"), grid)
        update = to_map(scatter(self.value(tokens), weights), grid)  # (B, C, H, W)
        return x + self.drop_path(self.norm(update))
