"""Patch-to-cluster attention (PaCa-ViT, Sec. 3.3)."""

from __future__ import annotations

from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.grouping import Grouping, Tap
from visualtokens.layers.clustering import ClusteringKind, make_clustering
from visualtokens.ops import attend, gather, join_heads, split_heads


class PaCaAttention(nn.Module):
    """PaCa Eq. 5, 8: every patch attends to K clusters, z = LayerNorm(Cᵀ X).

    Linear in the number of patches, for any grid. ``clusters=0`` is plain self-attention: z = X.
    ``clustering`` says how patches are assigned (see :func:`~visualtokens.layers.make_clustering`);
    ``None`` leaves that to somebody else, whose assignment then goes into :meth:`forward`.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        clusters: int = 49,
        clustering: ClusteringKind | None = "squeeze",
        reduction: int = 4,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise UserError(f"dim={dim} cannot be split over heads={heads}; give a divisor of {dim}")
        self.heads = heads
        if clusters and clustering is not None:
            self.clustering: nn.Module | None = make_clustering(
                clustering, dim, clusters=clusters, reduction=reduction
            )
            self.tap = Tap()
        else:
            self.clustering = None
        self.norm = nn.LayerNorm(dim, eps=1e-6) if clusters else None
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def assign(self, x: Tensor, grid: tuple[int, int]) -> Tensor | None:
        """The weight of each patch in each cluster, ``(B, N, K)``; None if no clusters are made here."""
        if self.clustering is None:
            return None
        if x.shape[1] != grid[0] * grid[1]:
            raise UserError(f"x has {x.shape[1]} patches, not {grid[0]}×{grid[1]}; give the grid of x")
        return self.tap(self.clustering(x, grid), grid)

    def grouping(self, x: Tensor, grid: tuple[int, int]) -> Grouping:
        """Which patches belong to which cluster."""
        weights = self.assign(x, grid)
        if weights is None:
            raise UserError("this attention makes no clusters; create it with clusters and a clustering")
        return Grouping.soft(weights, grid)

    def forward(self, x: Tensor, grid: tuple[int, int], weights: Tensor | None = None) -> Tensor:
        """``x (B, N, C)`` on its grid (H, W); ``weights (B, N, K)`` take the place of its own assignment."""
        if self.norm is None:
            z = x
        else:
            weights = self.assign(x, grid) if weights is None else weights
            if weights is None:
                raise UserError("this attention makes no clusters itself; give it weights (B, N, K)")
            z = self.norm(gather(x, weights))  # (B, K, C)
        q = split_heads(self.q(x), self.heads)  # (B, heads, N, D)
        k, v = (split_heads(part, self.heads) for part in self.kv(z).chunk(2, dim=2))  # (B, heads, K, D)
        return self.proj(join_heads(attend(q, k, v)))  # (B, N, C)
