"""Pure batched tensor functions: no modules, no state."""

from visualtokens.ops.attend import attend, join_heads, split_heads
from visualtokens.ops.checks import set_checks
from visualtokens.ops.soft import assign_soft, gather, scatter

__all__ = ["assign_soft", "attend", "gather", "join_heads", "scatter", "set_checks", "split_heads"]
