"""Patch-to-cluster attention (PaCa-ViT, Sec. 3.3)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.grouping import Tap
from visualtokens.layers.maps import to_map, to_tokens
from visualtokens.ops import assign_soft, attend, gather, join_heads, split_heads


class ConvClustering(nn.Module):
    """PaCa Eq. 6, 7: C = softmax over patches of Linear(GELU(conv3×3(X))), ``(B, N, K)``."""

    def __init__(self, dim: int, *, clusters: int, reduction: int = 4) -> None:
        super().__init__()
        hidden = dim // reduction
        self.conv = nn.Conv2d(dim, hidden, 3, padding=1)
        self.assign = nn.Linear(hidden, clusters)

    def init_clusters(self) -> None:
        """Start the clusters apart: logits of unit scale. From near-zero weights all maps start uniform,
        get the same gradient, and end up alike."""
        nn.init.normal_(self.assign.weight, std=self.assign.in_features**-0.5)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        u = to_tokens(F.gelu(self.conv(to_map(x, grid))))  # (B, N, C / reduction)
        return assign_soft(self.assign(u), over="patches")  # (B, N, K)


class PaCaAttention(nn.Module):
    """PaCa Eq. 5, 8: every patch attends to K clusters, z = LayerNorm(Cᵀ X).

    Linear in the number of patches, for any grid. ``clusters=0`` is plain self-attention: z = X.
    """

    def __init__(self, dim: int, *, heads: int, clusters: int = 49, reduction: int = 4) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim={dim} cannot be split over heads={heads}; give a divisor of {dim}")
        self.heads = heads
        if clusters:
            self.clustering: nn.Module | None = ConvClustering(dim, clusters=clusters, reduction=reduction)
            self.tap = Tap()
            self.norm = nn.LayerNorm(dim, eps=1e-6)
        else:
            self.clustering = None
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        z = x
        if self.clustering is not None:
            weights = self.tap(self.clustering(x, grid), grid)  # (B, N, K)
            z = self.norm(gather(x, weights))  # (B, K, C)
        q = split_heads(self.q(x), self.heads)  # (B, heads, N, D)
        k, v = (split_heads(part, self.heads) for part in self.kv(z).chunk(2, dim=2))  # (B, heads, K, D)
        return self.proj(join_heads(attend(q, k, v)))  # (B, N, C)
