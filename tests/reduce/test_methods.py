"""Every way to pool against a slow one that is written out, and the edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.helpers import EXAMPLES, rand, randn
from visualtokens.ops import kmeans, take
from visualtokens.reduce import METHODS, Place, Pool, Pooled, Seen
from visualtokens.reduce.methods import ConvPool, KMeans, KMedoids, Merge, Select
from visualtokens.reduce.reduction import _pool

B, N, C = 3, 20, 6  # three different images
CELLS = (4, 5)
POOLS = [method for method in METHODS if method != "conv"]


def pool_of(method: str, **options: object) -> Pool:
    return _pool(method, options.get("init", "significance"), options.get("iterations"), Place(0, C, N))


def seen(*, size: Tensor | None = None, assign: bool = True, n: int = N) -> Seen:
    return Seen(rand(B, n, seed=2).float() + 0.01, randn(B, n, 4, seed=3).float(), size, CELLS, assign)


def x(n: int = N) -> Tensor:
    return randn(B, n, C, seed=1).float()


def result(pooled: Pooled, tokens: Tensor) -> Tensor:
    if pooled.tokens is not None:
        return pooled.tokens
    assert pooled.chosen is not None
    return take(tokens, pooled.chosen)


def distance(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).square().sum().item()


def nearest(token: Tensor, centres: list[Tensor]) -> int:
    return min(range(len(centres)), key=lambda j: distance(token, centres[j]))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("k", [1, 7, 19])
def test_kmeans(weighted: bool, k: int) -> None:
    tokens, look = x(), seen()
    pooled = KMeans(weighted=weighted, init="significance", iterations=3)(tokens, k, look)
    for b in range(B):
        w = look.significance[b] if weighted else torch.ones(N)
        start = sorted(sorted(range(N), key=lambda i: -look.significance[b, i])[:k])
        centres = [tokens[b, i] for i in start]
        for _ in range(3):
            groups = [nearest(tokens[b, i], centres) for i in range(N)]
            for j in range(k):
                own = [i for i in range(N) if groups[i] == j]
                if own:
                    centres[j] = sum(w[i] * tokens[b, i] for i in own) / sum(w[i] for i in own)
        assert torch.allclose(pooled.tokens[b], torch.stack(centres), atol=1e-5)
        assert pooled.assignment[b].tolist() == [nearest(tokens[b, i], centres) for i in range(N)]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("k", [1, 7, 19])
def test_kmedoids(weighted: bool, k: int) -> None:
    tokens, look = x(), seen()
    pooled = KMedoids(weighted=weighted, init="significance", iterations=2)(tokens, k, look)
    for b in range(B):
        w = look.significance[b] if weighted else torch.ones(N)
        medoids = sorted(sorted(range(N), key=lambda i: -look.significance[b, i])[:k])
        for _ in range(2):
            groups = [nearest(tokens[b, i], [tokens[b, m] for m in medoids]) for i in range(N)]
            for j in range(k):
                own = [i for i in range(N) if groups[i] == j]
                medoids[j] = min(
                    own,
                    key=lambda i: sum(w[o].item() * distance(tokens[b, i], tokens[b, o]) for o in own),
                )
        assert pooled.chosen[b].tolist() == medoids
        assert pooled.assignment[b].tolist() == [
            nearest(tokens[b, i], [tokens[b, m] for m in medoids]) for i in range(N)
        ]


@pytest.mark.parametrize("init", ["distinct", "significance", "random"])
@pytest.mark.parametrize("weighted", [False, True])
def test_kmedoids_ends_at_the_medoid_of_its_cluster(weighted: bool, init: str) -> None:
    """After enough updates nothing changes any more: every medoid is the cheapest of its own cluster."""
    tokens, look = x(), seen()
    pooled = KMedoids(weighted=weighted, init=init, iterations=20)(tokens, 6, look)
    for b in range(B):
        w = look.significance[b] if weighted else torch.ones(N)
        for j in range(6):
            own = (pooled.assignment[b] == j).nonzero().flatten().tolist()
            cost = {i: sum(w[o].item() * distance(tokens[b, i], tokens[b, o]) for o in own) for i in own}
            assert cost[int(pooled.chosen[b, j])] <= min(cost.values()) + 1e-5


@EXAMPLES
@given(
    seed=st.integers(0, 1000),
    k=st.integers(1, N - 1),
    kind=st.sampled_from([KMeans, KMedoids]),
    weighted=st.booleans(),
    carried=st.booleans(),
    init=st.sampled_from(["distinct", "significance"]),
)
def test_the_objective_never_rises(
    seed: int, k: int, kind: type[Pool], weighted: bool, carried: bool, init: str
) -> None:
    """Eq. 13, with the weights that the pool uses, from one iteration to the next."""
    tokens = randn(B, N, C, seed=seed).float()
    significance = rand(B, N, seed=seed + 1).float()
    size = (rand(B, N, seed=seed + 2) * 5).ceil().float() if carried else None
    look = Seen(significance, None, size, CELLS, True)
    w = significance if weighted else torch.ones(B, N) if size is None else size
    before = torch.full((B,), math.inf, dtype=torch.float64)
    for iterations in range(5):
        pooled = kind(weighted=weighted, init=init, iterations=iterations)(tokens, k, look)
        away = torch.cdist(tokens.double(), result(pooled, tokens).double()).square().amin(2)
        now = (w * away).sum(1)
        assert (now <= before + 1e-4).all()
        before = now


def test_power_bert_keeps_the_most_significant_in_order() -> None:
    look = seen()
    chosen = Select("power_bert")(x(), 8, look).chosen
    for b in range(B):
        best = sorted(range(N), key=lambda i: -look.significance[b, i])[:8]
        assert chosen[b].tolist() == sorted(best)


def test_importance_draws_by_significance_without_replacement() -> None:
    """The chance that a token comes first, and that both of two come, are those of drawing one by one."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    many = 20_000
    look = Seen(p.expand(many, 4), None, None, (2, 2), False)
    torch.manual_seed(0)
    one = Select("importance")(torch.zeros(many, 4, 1), 1, look).chosen.flatten()
    assert torch.allclose(torch.bincount(one, minlength=4) / many, p, atol=0.012)
    two = Select("importance")(torch.zeros(many, 4, 1), 2, look).chosen
    both = ((two[:, 0] == 0) & (two[:, 1] == 1)).float().mean().item()
    assert both == pytest.approx(0.5 * 0.3 / 0.5 + 0.3 * 0.5 / 0.7, abs=0.012)


def test_random_takes_every_token_as_often() -> None:
    look = Seen(None, None, None, (2, 2), False)
    torch.manual_seed(0)
    chosen = Select("random")(torch.zeros(20_000, 5, 1), 2, look).chosen
    assert (chosen[:, 0] < chosen[:, 1]).all()
    assert torch.allclose(
        torch.bincount(chosen.flatten(), minlength=5) / 20_000, torch.full((5,), 0.4), atol=0.015
    )


@pytest.mark.parametrize("sized", [False, True])
def test_merge_joins_the_most_similar_pairs(sized: bool) -> None:
    """Token i of one side goes to the most similar of the other; the r best pairs become one."""
    tokens, r = x(), 6
    size = (rand(B, N, seed=8) * 4).ceil().float() if sized else None
    look = seen(size=size)
    pooled = Merge()(tokens, N - r, look)
    for b in range(B):
        unit = look.keys[b] / look.keys[b].norm(dim=1, keepdim=True)
        partner = {i: max(range(1, N, 2), key=lambda j: float(unit[i] @ unit[j])) for i in range(0, N, 2)}
        going = sorted(partner, key=lambda i: -float(unit[i] @ unit[partner[i]]))[:r]
        stay = [i for i in range(N) if i not in going]
        s = torch.ones(N) if size is None else size[b]
        for place, i in enumerate(stay):
            own = [i, *(g for g in going if partner[g] == i)]
            mean = sum(s[o] * tokens[b, o] for o in own) / sum(s[o] for o in own)
            assert torch.allclose(pooled.tokens[b, place], mean, atol=1e-5)
            assert all(pooled.assignment[b, o] == place for o in own)


def test_merge_goes_on_where_less_than_half_is_to_stay() -> None:
    pooled = Merge()(x(), 3, seen())
    assert pooled.tokens.shape == (B, 3, C)
    assert sorted(set(pooled.assignment.flatten().tolist())) == [0, 1, 2]
    for b in range(B):
        for j in range(3):  # whatever the rounds, a token is the mean of all it stands for
            assert torch.allclose(pooled.tokens[b, j], x()[b][pooled.assignment[b] == j].mean(0), atol=1e-5)


@pytest.mark.parametrize("cells", [(4, 6), (3, 5), (1, 4), (1, 1)])
def test_convolution_starts_as_the_mean_of_what_is_there(cells: tuple[int, int]) -> None:
    n = cells[0] * cells[1]
    tokens = randn(2, n, C).float()
    pooled = ConvPool(C, like=tokens)(tokens, 0, Seen(None, None, None, cells, True))
    rows, columns = (cells[0] + 1) // 2, (cells[1] + 1) // 2
    assert pooled.cells == (rows, columns)
    grid = tokens.unflatten(1, cells)
    for i in range(rows):
        for j in range(columns):
            cell = grid[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].flatten(1, 2)
            assert torch.allclose(pooled.tokens[:, i * columns + j], cell.mean(1), atol=1e-6)
    where = pooled.assignment.unflatten(1, cells)
    assert where[0, -1, -1] == rows * columns - 1
    assert (where[0, : 2 if cells[0] > 1 else 1, : 2 if cells[1] > 1 else 1] == 0).all()


@pytest.mark.parametrize("method", POOLS)
@pytest.mark.parametrize("init", ["distinct", "significance", "random"])
@pytest.mark.parametrize("k", [0, 1, 9, 10, 19])
def test_k_tokens_come_out_of_every_method(method: str, init: str, k: int) -> None:
    tokens = x()
    pooled = pool_of(method, init=init)(tokens, k, seen())
    assert result(pooled, tokens).shape == (B, k, C)
    assert result(pooled, tokens).dtype == tokens.dtype
    assert pooled.assignment.shape == (B, N)
    assert pooled.assignment.max() < max(k, 1)
    if k == 0:
        assert (pooled.assignment == -1).all()
    if pooled.chosen is not None and k:
        assert (pooled.assignment.gather(1, pooled.chosen) == torch.arange(k)).all()


@pytest.mark.parametrize("method", [m for m in POOLS if m not in ("importance", "random")])
def test_an_image_does_not_depend_on_its_batch(method: str) -> None:
    tokens, look = x(), seen()
    whole = result(pool_of(method)(tokens, 7, look), tokens)
    for b in range(B):
        part = Seen(look.significance[b : b + 1], look.keys[b : b + 1], None, CELLS, True)
        alone = result(pool_of(method)(tokens[b : b + 1], 7, part), tokens[b : b + 1])
        assert torch.allclose(alone, whole[b : b + 1], atol=1e-6)


@pytest.mark.parametrize("method", ["kmedoids", "weighted_kmedoids", "power_bert"])
def test_what_is_chosen_does_not_depend_on_whether_somebody_asks_where_tokens_went(method: str) -> None:
    a = pool_of(method)(x(), 7, seen(assign=True))
    b = pool_of(method)(x(), 7, seen(assign=False))
    assert torch.equal(a.chosen, b.chosen)
    assert b.assignment is None


def test_plain_clustering_counts_what_tokens_stand_for() -> None:
    """With sizes carried, k-means of tokens is k-means of as many copies."""
    tokens = randn(1, 8, C).float()
    size = torch.tensor([[3.0, 1, 2, 1, 1, 4, 1, 1]])
    look = Seen(torch.arange(8.0, 0, -1).unsqueeze(0), None, size, (2, 4), True)
    pooled = KMeans(weighted=False, init="significance", iterations=3)(tokens, 3, look)
    copies = tokens[0].repeat_interleave(size[0].long(), dim=0).unsqueeze(0)
    expected = kmeans(copies, 3, init=tokens[0, :3], iterations=3).centres
    assert torch.allclose(pooled.tokens, expected, atol=1e-5)
