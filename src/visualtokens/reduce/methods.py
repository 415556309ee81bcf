"""The ways to make fewer tokens of many. Each is a small module that one block owns."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visualtokens.ops import group_mean, kmeans, kmedoids
from visualtokens.ops.k_medoids import medoids, products
from visualtokens.ops.matching import match, merge_count
from visualtokens.ops.seeds import top_k
from visualtokens.reduce.attention import Evidence
from visualtokens.reduce.state import Pooled

Init = Literal["distinct", "significance", "random"]
NOTHING: frozenset[Evidence] = frozenset()
SIGNIFICANCE: frozenset[Evidence] = frozenset({"significance"})
KEYS: frozenset[Evidence] = frozenset({"keys"})


class Seen(NamedTuple):
    """What a pool may know of its n tokens beside their values."""

    significance: Tensor | None  # (B, n): the attention each receives, if the pool needs it
    keys: Tensor | None  # (B, n, D): the mean of their keys, if the pool needs them
    size: Tensor | None  # (B, n): how many patches each stands for, if that is carried and not always one
    cells: tuple[int, int]  # their grid, as long as they have one
    assign: bool  # whether somebody wants to know where each went


class Pool(nn.Module):
    """Makes K tokens of the n that a block has behind its attention.

    ``needs`` is what it has to see of the attention. ``joins`` says whether its tokens stand for several,
    or were only chosen and the others dropped. A pool that also acts where no token has to go, such as
    one that learns how many to keep, says so in :meth:`acts`.
    """

    needs: frozenset[Evidence] = NOTHING
    joins: bool = True

    def acts(self, n: int, k: int) -> bool:
        """Whether there is anything to do when K of n tokens are to stay."""
        return k < n

    def macs(self, n: int, k: int, dim: int, head_dim: int) -> int:
        """Its multiply-adds for one image."""
        return 0

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        """Pool ``x (B, n, C)`` to K tokens."""
        raise NotImplementedError


class Clusters(Pool):
    """What k-means and k-medoids share: their weights and where they start."""

    def __init__(self, *, weighted: bool, init: Init, iterations: int) -> None:
        super().__init__()
        self.weighted = weighted
        self.init = init
        self.iterations = iterations
        self.needs = SIGNIFICANCE if weighted or init == "significance" else NOTHING

    def weights(self, seen: Seen) -> Tensor | None:
        """w of Eq. 13, ``(B, n)``: the significance; else, if that is carried, what each stands for."""
        return seen.significance if self.weighted else seen.size

    def start(self, x: Tensor, seen: Seen) -> Tensor | Literal["distinct"]:
        """The first centres, as the operations take them; of scores ``(B, n)``, the K highest."""
        if self.init == "distinct":
            return "distinct"
        if self.init == "random" or seen.significance is None:
            return torch.rand(x.shape[:2], device=x.device)
        return seen.significance.detach()

    def extra_repr(self) -> str:
        return f"weighted={self.weighted}, init={self.init!r}, iterations={self.iterations}"


class KMeans(Clusters):
    """Eq. 13–15: the new tokens are the means of clusters."""

    def macs(self, n: int, k: int, dim: int, head_dim: int) -> int:
        total = (self.iterations + 1) * n * k * dim  # distances before every update, and to the last means
        if self.init == "distinct" and k:
            while k <= n // 2:
                n //= 2
            total += ((n + 1) // 2) * (n // 2) * dim if k < n else 0
        return total

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        start = self.start(x, seen)
        found = kmeans(x, k, weights=self.weights(seen), init=start, iterations=self.iterations)
        return Pooled(tokens=found.centres, assignment=found.assignment)


class KMedoids(Clusters):
    """Eq. 16–18: the medoids of clusters stay."""

    def macs(self, n: int, k: int, dim: int, head_dim: int) -> int:
        return products(n, k, self.iterations, distinct=self.init == "distinct") * dim if k else 0

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        weights, start = self.weights(seen), self.start(x, seen)
        if not seen.assign:
            return Pooled(chosen=medoids(x, k, weights=weights, init=start, iterations=self.iterations))
        found = kmedoids(x, k, weights=weights, init=start, iterations=self.iterations)
        return Pooled(chosen=found.indices, assignment=found.assignment)


class Select(Pool):
    """Keep the K tokens of highest score, in their order, and drop the others."""

    joins = False

    def __init__(self, by: Literal["power_bert", "importance", "random"]) -> None:
        super().__init__()
        self.by = by
        self.needs = NOTHING if by == "random" else SIGNIFICANCE

    @torch.no_grad()
    def scores(self, x: Tensor, seen: Seen) -> Tensor:
        """``(B, n)``: power_bert takes the most significant, random any.

        importance draws without replacement, by significance s: the K of highest u^(1/s), u uniform.
        """
        if self.by == "power_bert" and seen.significance is not None:
            return seen.significance
        chance = torch.rand(x.shape[:2], device=x.device)
        if self.by == "importance" and seen.significance is not None:
            return chance.log() / seen.significance  # the logarithm of u^(1/s)
        return chance

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        chosen = top_k(self.scores(x, seen), k)  # (B, K)
        if not seen.assign:
            return Pooled(chosen=chosen)
        nowhere = chosen.new_full(x.shape[:2], -1)
        places = torch.arange(k, device=x.device).expand_as(chosen)
        return Pooled(chosen=chosen, assignment=nowhere.scatter(1, chosen, places))

    def extra_repr(self) -> str:
        return f"by={self.by!r}"


class Merge(Pool):
    """Bipartite soft matching by the attention's keys; merged tokens are means, weighted by their size.

    One round can merge at most half of the tokens; where fewer are to stay, more rounds follow.
    """

    needs = KEYS

    def macs(self, n: int, k: int, dim: int, head_dim: int) -> int:
        total = 0
        while 0 < k < n:
            total += ((n + 1) // 2) * (n // 2) * head_dim
            n -= merge_count(n, n - k)
        return total

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        b, n, _ = x.shape
        if k == 0:
            return Pooled(tokens=x[:, :0], assignment=torch.full((b, n), -1, device=x.device))
        metric = x if seen.keys is None else seen.keys  # (B, n, D)
        size = torch.ones(b, n, device=x.device) if seen.size is None else seen.size
        tokens, where = x, None
        while n > k:
            step = match(metric.detach(), n - k)  # (B, n)
            n -= merge_count(n, n - k)
            if n > k:
                metric, _ = group_mean(metric, step, n, weights=size)
            tokens, size = group_mean(tokens, step, n, weights=size)  # (B, n, C)
            where = step if where is None else step.gather(1, where)  # (B, tokens before)
        return Pooled(tokens=tokens.to(x.dtype), assignment=where)


class ConvPool(Pool):
    """Appendix D: a 2×2 convolution with stride 2 on the grid of tokens, width unchanged.

    It starts as the mean of the four, so that it can be put into a trained model, and can be trained. A
    last row or column without a partner is its own.
    """

    def __init__(self, dim: int, *, like: Tensor) -> None:
        super().__init__()
        mean = torch.eye(dim, device=like.device, dtype=like.dtype) / 4
        self.weight = nn.Parameter(mean[:, :, None, None].repeat(1, 1, 2, 2))

    def acts(self, n: int, k: int) -> bool:
        return n > 1

    def macs(self, n: int, k: int, dim: int, head_dim: int) -> int:
        return 4 * k * dim**2

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        height, width = seen.cells
        maps = x.mT.unflatten(2, seen.cells)  # (B, C, height, width)
        maps = F.pad(maps, (0, width % 2, 0, height % 2), mode="replicate")
        tokens = F.conv2d(maps, self.weight, stride=2).flatten(2).mT  # (B, K, C)
        half = halved(seen.cells)
        rows, columns = (torch.arange(side, device=x.device) // 2 for side in seen.cells)
        assignment = (rows.unsqueeze(1) * half[1] + columns).flatten().expand(x.shape[:2])
        return Pooled(tokens=tokens, assignment=assignment, cells=half)


class Idle(Pool):
    """Passes the tokens on: for the blocks between the convolutions."""

    def acts(self, n: int, k: int) -> bool:
        return False


def halved(cells: tuple[int, int]) -> tuple[int, int]:
    """The grid behind one :class:`ConvPool`."""
    return (cells[0] + 1) // 2, (cells[1] + 1) // 2
