"""From visual tokens back to pixels (Visual Transformers, Sec. 3.3)."""

from __future__ import annotations

from timm.layers import DropPath
from torch import Tensor, nn

from visualtokens.grouping import Tap
from visualtokens.layers.conv_norm import PixelConv, TokenConv, pixel_groups
from visualtokens.layers.maps import to_map, to_tokens
from visualtokens.ops import assign_soft, scatter


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
