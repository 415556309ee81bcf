"""The reduction methods: modules that reduce the n tokens of a block to K, and their registry."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visualtokens.errors import UserError, unknown
from visualtokens.ops import bipartite_merge, group_mean, kmeans, kmedoids
from visualtokens.ops.matching import mean_direction, merge_count, nearest_groups
from visualtokens.ops.numerics import upcast
from visualtokens.ops.seeds import top_k
from visualtokens.reduce.attention import Evidence

Init = Literal["distinct", "significance", "random"]
NOTHING: frozenset[Evidence] = frozenset()
SIGNIFICANCE: frozenset[Evidence] = frozenset({"significance"})
KEYS: frozenset[Evidence] = frozenset({"keys"})


class Seen(NamedTuple):
    """What a pool receives besides the tokens (B, n, C)."""

    significance: Tensor | None  # (B, n): attention that each token receives, if the pool needs it
    keys: Tensor | None  # (B, n, D): keys averaged over the heads, if the pool needs them
    size: Tensor | None  # (B, n): patches per token; None if each token is one patch or sizes are not carried
    cells: tuple[int, int]  # grid of the tokens, as long as they form one
    assign: bool  # whether the pool must return an assignment


class Pooled(NamedTuple):
    """What a pool returns: K new tokens, or the indices of K tokens to keep."""

    tokens: Tensor | None = None  # (B, K, C); None: the tokens at `chosen`
    chosen: Tensor | None = None  # (B, K)
    assignment: Tensor | None = None  # (B, n): index of each token's group, -1 if dropped; if Seen.assign
    cells: tuple[int, int] | None = None  # grid of the new tokens, if they form one


class Pool(nn.Module):
    """Base class: reduces the n tokens after a block's attention to K.

    ``needs`` lists what the pool needs from the attention. ``joins`` is True if each new token stands for a
    group of tokens, False if the other tokens are dropped.
    """

    needs: frozenset[Evidence] = NOTHING
    joins: bool = True

    def acts(self, n: int, k: int) -> bool:
        """Whether the pool runs when K of n tokens are to be kept."""
        return k < n

    def macs(self, n: int, k: int, dim: int, head_dim: int) -> int:
        """Multiply-adds for one image."""
        return 0

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        """Pool ``x (B, n, C)`` to K tokens."""
        raise NotImplementedError


def keep_none(x: Tensor) -> Pooled:
    """What every pool makes of ``x (B, n, C)`` if K is 0."""
    return Pooled(tokens=x[:, :0], assignment=torch.full(x.shape[:2], -1, device=x.device))


class Clustering(Pool):
    """Options shared by k-means and k-medoids: point weights, initial centres, number of updates."""

    def __init__(self, *, weighted: bool, init: Init, iterations: int) -> None:
        super().__init__()
        self.weighted = weighted
        self.init = init
        self.iterations = iterations
        self.needs = SIGNIFICANCE if weighted or init == "significance" else NOTHING

    def weights(self, seen: Seen) -> Tensor | None:
        """w of Eq. 13, ``(B, n)``: the significance if weighted, else the carried sizes."""
        # PAPER: without significance w is 1. Appendix E carries sizes with weighted clustering only; counting
        # a token of s patches s times gives the mean of its patches.
        return seen.significance if self.weighted else seen.size

    def start(self, x: Tensor, seen: Seen) -> Tensor | Literal["distinct"]:
        """Initial centres as the ops take them: "distinct", or scores ``(B, n)`` whose K highest are used."""
        if self.init == "distinct":
            return "distinct"
        if self.init == "random" or seen.significance is None:
            return torch.rand(x.shape[:2], device=x.device)
        return seen.significance.detach()

    def extra_repr(self) -> str:
        return f"weighted={self.weighted}, init={self.init!r}, iterations={self.iterations}"


class KMeans(Clustering):
    """Eq. 13–15: the new tokens are cluster means."""

    def macs(self, n: int, k: int, dim: int, head_dim: int) -> int:
        total = (self.iterations + 1) * n * k * dim  # distances before each update and to the final means
        if self.init == "distinct" and k:
            while k <= n // 2:
                n //= 2
            total += ((n + 1) // 2) * (n // 2) * dim if k < n else 0
        return total

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        start = self.start(x, seen)
        found = kmeans(x, k, weights=self.weights(seen), init=start, iterations=self.iterations)
        return Pooled(tokens=found.centres, assignment=found.assignment)


class KMedoids(Clustering):
    """Eq. 16–18: cluster medoids are kept."""

    def macs(self, n: int, k: int, dim: int, head_dim: int) -> int:
        return n * n * dim if k else 0  # all distances, once

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        start = self.start(x, seen)
        found = kmedoids(x, k, weights=self.weights(seen), init=start, iterations=self.iterations)
        return Pooled(chosen=found.indices, assignment=found.assignment)


class Select(Pool):
    """Keeps the K tokens with the highest scores, in their original order, and drops the others."""

    joins = False

    def __init__(self, by: Literal["power_bert", "importance", "random"]) -> None:
        super().__init__()
        self.by = by
        self.needs = NOTHING if by == "random" else SIGNIFICANCE

    @torch.no_grad()
    def scores(self, x: Tensor, seen: Seen) -> Tensor:
        """Scores ``(B, n)``: the significance s (power_bert), uniform (random), or u^(1/s) (importance).

        The K highest u^(1/s), u uniform, are K draws with probabilities s without replacement.
        """
        if self.by == "power_bert" and seen.significance is not None:
            return seen.significance
        uniform = torch.rand(x.shape[:2], device=x.device)
        if self.by == "importance" and seen.significance is not None:
            return uniform.log() / seen.significance  # log u^(1/s)
        return uniform

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        chosen = top_k(self.scores(x, seen), k)  # (B, K)
        if not seen.assign:
            return Pooled(chosen=chosen)
        dropped = chosen.new_full(x.shape[:2], -1)  # (B, n)
        index = torch.arange(k, device=x.device).expand_as(chosen)
        return Pooled(chosen=chosen, assignment=dropped.scatter(1, chosen, index))

    def extra_repr(self) -> str:
        return f"by={self.by!r}"


class Merge(Pool):
    """Bipartite soft matching on the attention keys; merged tokens are means weighted by size.

    One round merges at most half of the tokens; rounds are repeated until K are left.
    """

    needs = KEYS

    def macs(self, n: int, k: int, dim: int, head_dim: int) -> int:
        total = 0
        while 0 < k < n:
            total += ((n + 1) // 2) * (n // 2) * head_dim
            n -= merge_count(n, n - k)
        return total

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        n = x.shape[1]
        if k == 0:
            return keep_none(x)
        # float32 from the first round to the last, so that means of means are not rounded in between
        tokens = x if x.dtype == torch.float64 else x.float()
        metric = (tokens if seen.keys is None else seen.keys).detach()  # (B, n, D)
        size, assignment = seen.size, None
        while n > k:
            merged = bipartite_merge(tokens, n - k, metric=metric, size=size)
            n = merged.tokens.shape[1]
            if n > k:
                metric, _ = group_mean(metric, merged.assignment, n, weights=size)  # (B, n, D)
            tokens, size = merged.tokens, merged.size  # (B, n, C), (B, n)
            step = merged.assignment
            assignment = step if assignment is None else step.gather(1, assignment)  # (B, tokens of x)
        return Pooled(tokens=tokens.to(x.dtype), assignment=assignment)


class WeightedMerge(Pool):
    """The tokens that are cheapest to lose, by significance and distance, join their nearest kept token.

    Distances are those of the normalised tokens, as the layers that follow see them. With a ``threshold``, K
    is the least number of tokens, and images keep as many as they need; see
    :func:`~visualtokens.ops.nearest_merge`.
    """

    needs = SIGNIFICANCE

    def __init__(self, threshold: float | None = None) -> None:
        super().__init__()
        self.threshold = threshold

    def macs(self, n: int, k: int, dim: int, head_dim: int) -> int:
        return n * n * dim if k else 0  # all distances, once

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        if k == 0:
            return keep_none(x)
        metric = F.layer_norm(upcast(x), x.shape[-1:])
        groups, k = nearest_groups(metric, k, weights=seen.significance, threshold=self.threshold)  # (B, n)
        return Pooled(tokens=mean_direction(x, groups, k, weights=seen.significance), assignment=groups)


class ConvPool(Pool):
    """Appendix D: a 2×2 convolution with stride 2 on the token grid, width unchanged.

    Initialised to the mean of the four tokens, so it can be inserted into a trained model. An odd last row
    or column is replicated.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.eye(dim) / 4)[:, :, None, None].repeat(1, 1, 2, 2))

    def acts(self, n: int, k: int) -> bool:
        return n > 1

    def macs(self, n: int, k: int, dim: int, head_dim: int) -> int:
        return 4 * k * dim**2

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        height, width = seen.cells
        maps = x.mT.unflatten(2, seen.cells)  # (B, C, H, W)
        maps = F.pad(maps, (0, width % 2, 0, height % 2), mode="replicate")
        tokens = F.conv2d(maps, self.weight, stride=2).flatten(2).mT  # (B, K, C)
        half = halved(seen.cells)
        rows, columns = (torch.arange(side, device=x.device) // 2 for side in seen.cells)
        assignment = (rows.unsqueeze(1) * half[1] + columns).flatten().expand(x.shape[:2])
        return Pooled(tokens=tokens, assignment=assignment, cells=half)


class KeepAll(Pool):
    """No-op pool for blocks that keep all tokens."""

    def acts(self, n: int, k: int) -> bool:
        return False


def halved(cells: tuple[int, int]) -> tuple[int, int]:
    """The grid after one :class:`ConvPool`."""
    return (cells[0] + 1) // 2, (cells[1] + 1) // 2


def halving_counts(counts: tuple[int, ...], grid: tuple[int, int]) -> tuple[int, ...]:
    """The tokens per block that halving can reach: the grid is halved as soon as the count asked for fits."""
    reached = []
    for count in counts:
        if count <= math.prod(halved(grid)) < math.prod(grid):
            grid = halved(grid)
        reached.append(math.prod(grid))
    return tuple(reached)


class Place(NamedTuple):
    """What a method's factory is given to build the pool of one block."""

    block: int
    dim: int  # C
    patches: int  # of an image of the model's own size
    n: int  # tokens before pooling, for such an image
    k: int  # tokens after it
    init: Init = "distinct"
    iterations: int | None = None  # None: the method's default
    threshold: float | None = None  # of the cost to lose a token; K is then the least number


Factory = Callable[[Place], Pool]
Fit = Callable[[tuple[int, ...], tuple[int, int]], tuple[int, ...]]

DEFAULT_METHOD = "weighted_merge"  # the most accurate without training, see benchmarks/imagenet_reduce.py
LEAST_SHARE = 1 / 16  # of the patches, that later blocks need
METHODS: list[str] = []  # the registered names
CLUSTERINGS: list[str] = []  # those that use `init` and `iterations`
_REGISTRY: dict[str, tuple[Factory, Fit | None]] = {}


def register_method(name: str, factory: Factory, *, fit: Fit | None = None, clusters: bool = False) -> None:
    """Make ``reduce(model, name, ...)``, ``reduced_vit`` and the command line accept a new method.

    ``factory`` returns the :class:`Pool` of one block. A method that cannot reach every number of tokens
    gives ``fit``: it maps the tokens wanted after each block and the patch grid to those it can reach.
    ``clusters`` tells that the factory uses :attr:`Place.init` and :attr:`Place.iterations`.
    """
    if name in _REGISTRY:
        raise UserError(f"the method {name!r} is already registered; choose another name")
    _REGISTRY[name] = factory, fit
    METHODS.append(name)
    if clusters:
        CLUSTERINGS.append(name)


def find_method(name: str) -> tuple[Factory, Fit | None]:
    """The factory and the fit of a registered method."""
    if name not in _REGISTRY:
        raise unknown("method", name, METHODS)
    return _REGISTRY[name]


def _clustering(kind: type[Clustering], *, weighted: bool, iterations: int) -> Factory:
    def make(place: Place) -> Pool:
        updates = iterations if place.iterations is None else place.iterations
        return kind(weighted=weighted, init=place.init, iterations=updates)

    return make


# K-means: the paper's 3 updates. K-medoids: the paper states no number; more than one changes the features of
# a pretrained model by less than the difference between two images.
register_method("kmeans", _clustering(KMeans, weighted=False, iterations=3), clusters=True)
register_method("weighted_kmeans", _clustering(KMeans, weighted=True, iterations=3), clusters=True)
register_method("kmedoids", _clustering(KMedoids, weighted=False, iterations=1), clusters=True)
register_method("weighted_kmedoids", _clustering(KMedoids, weighted=True, iterations=1), clusters=True)
register_method("power_bert", lambda place: Select("power_bert"))
register_method("importance", lambda place: Select("importance"))
register_method("random", lambda place: Select("random"))
register_method("merge", lambda place: Merge())
register_method("weighted_merge", lambda place: WeightedMerge(place.threshold))
register_method(
    "conv", lambda place: ConvPool(place.dim) if place.k < place.n else KeepAll(), fit=halving_counts
)
