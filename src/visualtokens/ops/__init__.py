"""Pure batched tensor functions: no modules, no state.

One alphabet throughout: B batch, N patches, K tokens or clusters, C channels, H×W the patch grid.
"""

from visualtokens.ops.attend import attend, join_heads, split_heads
from visualtokens.ops.checks import set_checks
from visualtokens.ops.hard import group_mean, group_sum, take, ungroup
from visualtokens.ops.kmeans import KMeans, kmeans
from visualtokens.ops.kmedoids import KMedoids, kmedoids
from visualtokens.ops.merge import Merged, bipartite_merge
from visualtokens.ops.seeds import cell_grid, pool_cells
from visualtokens.ops.significance import significance
from visualtokens.ops.soft import assign_soft, gather, scatter
from visualtokens.ops.super_tokens import (
    Cells,
    super_token_association,
    super_token_gather,
    super_token_scatter,
)

__all__ = [
    "Cells",
    "KMeans",
    "KMedoids",
    "Merged",
    "assign_soft",
    "attend",
    "bipartite_merge",
    "cell_grid",
    "gather",
    "group_mean",
    "group_sum",
    "join_heads",
    "kmeans",
    "kmedoids",
    "pool_cells",
    "scatter",
    "set_checks",
    "significance",
    "split_heads",
    "super_token_association",
    "super_token_gather",
    "super_token_scatter",
    "take",
    "ungroup",
]
