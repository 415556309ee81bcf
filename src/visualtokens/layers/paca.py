"""Patch-to-cluster attention (PaCa-ViT, Sec. 3.3) and the clusterings that assign patches to clusters."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.errors import UserError, unknown
from visualtokens.grouping import Tap
from visualtokens.layers.convolutions import to_map, to_tokens
from visualtokens.ops import assign_soft, attend, gather, join_heads, split_heads

ClusteringKind = Literal["squeeze", "conv", "mlp", "linear"]


class PaCaAttention(nn.Module):
    """PaCa Eq. 5, 8: each patch attends to K clusters, z = LayerNorm(Cᵀ X).

    Its cost is linear in the number of patches. ``clusters=0`` is plain self-attention, z = X.
    ``clustering`` selects the assignment C (see :func:`~visualtokens.layers.make_clustering`); with None,
    the assignment is an argument of :meth:`forward`.
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

    def forward(self, x: Tensor, grid: tuple[int, int], weights: Tensor | None = None) -> Tensor:
        """``x (B, N, C)`` on its grid (H, W); ``weights (B, N, K)`` replace the layer's own assignment."""
        if self.norm is None:
            z = x
        else:
            weights = self.assign(x, grid) if weights is None else weights
            if weights is None:
                raise UserError("this attention has no clustering of its own; give it weights (B, N, K)")
            z = self.norm(gather(x, weights))  # (B, K, C)
        q = split_heads(self.q(x), self.heads)  # (B, heads, N, D)
        k, v = (split_heads(part, self.heads) for part in self.kv(z).chunk(2, dim=2))  # (B, heads, K, D)
        return self.proj(join_heads(attend(q, k, v)))  # (B, N, C)

    def assign(self, x: Tensor, grid: tuple[int, int]) -> Tensor | None:
        """Returns the weight of each patch in each cluster, ``(B, N, K)``; None without a clustering."""
        if self.clustering is None:
            return None
        if x.shape[1] != grid[0] * grid[1]:
            raise UserError(f"x has {x.shape[1]} patches, not {grid[0]}×{grid[1]}; give the grid of x")
        return self.tap(self.clustering(x, grid), grid)


class Clustering(nn.Module):
    """PaCa Eq. 7: C = softmax over patches of Linear(U), ``(B, N, K)``. Subclasses compute U."""

    assign: nn.Linear  # one row per cluster; a bias cancels in the softmax over patches

    @property
    def clusters(self) -> int:
        return self.assign.out_features

    def features(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Returns U for ``x (B, N, C)``: ``(B, N, width)``."""
        raise NotImplementedError

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        # With the patches last, the softmax adds contiguous values in several partial sums: at 160,000
        # patches its rounding error is 15 times smaller than that of one running sum.
        logits = self.assign(self.features(x, grid)).mT  # (B, K, N)
        return assign_soft(logits, over="groups").mT  # over the last axis; (B, N, K)

    def init_clusters(self) -> None:
        """Initialises the clusters to logits of unit scale.

        With near-zero weights all assignments start uniform, get the same gradient and end up alike.
        """
        nn.init.normal_(self.assign.weight, std=self.assign.in_features**-0.5)


class ConvClustering(Clustering):
    """PaCa Eq. 6: U = GELU(conv3×3(X)) with C / ``reduction`` channels."""

    def __init__(self, dim: int, *, clusters: int, reduction: int = 4) -> None:
        super().__init__()
        hidden = dim // reduction
        self.conv = nn.Conv2d(dim, hidden, 3, padding=1)
        self.assign = nn.Linear(hidden, clusters)

    def features(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return to_tokens(F.gelu(self.conv(to_map(x, grid))))


class DepthwiseClustering(Clustering):
    """Of the released models: U = GELU(Linear(GELU(dwconv7×7(X))))."""

    def __init__(self, dim: int, *, clusters: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.mix = nn.Linear(dim, dim)
        self.assign = nn.Linear(dim, clusters, bias=False)

    def features(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        u = to_tokens(F.gelu(self.conv(to_map(x, grid))))  # (B, N, C)
        return F.gelu(self.mix(u))

    def init_clusters(self) -> None:
        super().init_clusters()
        _init_before_gelu(self.mix)


class MLPClustering(Clustering):
    """Of the released models: U = GELU(Linear(X)) with 4 C channels."""

    def __init__(self, dim: int, *, clusters: int) -> None:
        super().__init__()
        self.fc = nn.Linear(dim, 4 * dim)
        self.assign = nn.Linear(4 * dim, clusters)

    def features(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return F.gelu(self.fc(x))

    def init_clusters(self) -> None:
        super().init_clusters()
        _init_before_gelu(self.fc)


class LinearClustering(Clustering):
    """Of the released models: U = X."""

    def __init__(self, dim: int, *, clusters: int) -> None:
        super().__init__()
        self.assign = nn.Linear(dim, clusters, bias=False)

    def features(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return x


def _init_before_gelu(linear: nn.Linear) -> None:
    """Initialises a layer so that GELU, which halves the variance, returns unit scale."""
    nn.init.normal_(linear.weight, std=(2 / linear.in_features) ** 0.5)


def make_clustering(kind: str, dim: int, *, clusters: int, reduction: int = 4) -> Clustering:
    """Creates a clustering: the paper's ``"squeeze"``, or the released ``"conv"``, ``"mlp"``, ``"linear"``.

    ``reduction`` applies to ``"squeeze"`` only.
    """
    if clusters < 1:
        raise UserError(f"clusters={clusters}; give at least 1")
    if kind == "squeeze":
        return ConvClustering(dim, clusters=clusters, reduction=reduction)
    released: dict[str, type[DepthwiseClustering | MLPClustering | LinearClustering]] = {
        "conv": DepthwiseClustering,
        "mlp": MLPClustering,
        "linear": LinearClustering,
    }
    if kind not in released:
        raise unknown("clustering", kind, ["squeeze", *released])
    return released[kind](dim, clusters=clusters)
