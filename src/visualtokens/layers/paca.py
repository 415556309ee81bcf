"""How PaCa-ViT assigns patches to clusters: features of a patch, a linear layer, softmax over patches."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.errors import UserError, unknown
from visualtokens.grouping import Grouping, Tap
from visualtokens.layers.convolutions import to_map, to_tokens
from visualtokens.ops import assign_soft, attend, gather, join_heads, split_heads

ClusteringKind = Literal["squeeze", "conv", "mlp", "linear"]


class Clustering(nn.Module):
    """PaCa Eq. 7: C = softmax over patches of Linear(U), ``(B, N, K)``. What U is, a subclass says."""

    assign: nn.Linear  # a row per cluster; the softmax takes its bias, where it has one, away again

    @property
    def clusters(self) -> int:
        return self.assign.out_features

    def features(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """U, ``(B, N, width)``."""
        raise NotImplementedError

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        # With the patches last, the softmax sums along memory in several partial sums: at 160,000 patches
        # that rounds 15 times less than summing them one after the other.
        logits = self.assign(self.features(x, grid)).mT  # (B, K, N)
        return assign_soft(logits, over="groups").mT  # over the last axis; (B, N, K)

    def init_clusters(self) -> None:
        """Start the clusters apart: logits of unit scale. From near-zero weights all maps start uniform,
        get the same gradient, and end up alike."""
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
    """As released: U = GELU(Linear(GELU(depth-wise conv7×7(X))))."""

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
    """As released: U = GELU(Linear(X)) with 4 C channels."""

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
    """As released: U = X."""

    def __init__(self, dim: int, *, clusters: int) -> None:
        super().__init__()
        self.assign = nn.Linear(dim, clusters, bias=False)

    def features(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return x


def _init_before_gelu(linear: nn.Linear) -> None:
    """Keep the scale of the signal: GELU takes about half of its variance."""
    nn.init.normal_(linear.weight, std=(2 / linear.in_features) ** 0.5)


def make_clustering(kind: str, dim: int, *, clusters: int, reduction: int = 4) -> Clustering:
    """``"squeeze"`` is the paper's; ``"conv"``, ``"mlp"`` and ``"linear"`` are those of the released models.

    ``reduction`` is of ``"squeeze"`` only.
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


# Patch-to-cluster attention (PaCa-ViT, Sec. 3.3).


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
