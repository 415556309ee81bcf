"""Pure batched tensor functions: no modules, no state.

B images, N patches, K tokens or clusters, C channels, H×W the patch grid.
"""

from visualtokens.ops.attention import attend, join_heads, significance, split_heads
from visualtokens.ops.clustering import KMeans, KMedoids, kmeans, kmedoids
from visualtokens.ops.groups import assign_soft, gather, group_mean, group_sum, scatter, take, ungroup
from visualtokens.ops.matching import Merged, bipartite_merge, nearest_merge
from visualtokens.ops.numerics import set_checks
from visualtokens.ops.seeds import cell_grid, pool_cells
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
    "nearest_merge",
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
