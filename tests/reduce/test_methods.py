"""Every reduction method against a slow reference, edge cases, and the registry."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor
from torch.testing import assert_close

import visualtokens
from tests.reduce.helpers import SMALL, build, images, rand, randn, run, small_vit
from visualtokens.errors import UserError
from visualtokens.ops import kmeans, take
from visualtokens.reduce import METHODS, Place, Pool, Pooled, Seen, methods, reduce, register_method
from visualtokens.reduce.methods import ConvPool, KMeans, KMedoids, Merge, Select, find_method, halving_counts
from visualtokens.tune.planning import plan

B, N, C = 3, 20, 6  # three different images
CELLS = (4, 5)
X = randn(B, N, C, seed=1)
SAMPLING = ("importance", "random")
POOLS = [method for method in METHODS if method != "conv"]
CLUSTERING = ["kmeans", "weighted_kmeans", "kmedoids", "weighted_kmedoids"]


def make_pool(method: str, *, init: str = "significance") -> Pool:
    factory, _ = find_method(method)
    return factory(Place(block=0, dim=C, patches=N, n=N, k=7, init=init))  # type: ignore[arg-type]


def make_seen(*, size: Tensor | None = None, assign: bool = True) -> Seen:
    return Seen(rand(B, N, seed=2) + 0.01, randn(B, N, 4, seed=3), size, CELLS, assign)


def tokens_of(pooled: Pooled, x: Tensor) -> Tensor:
    if pooled.tokens is not None:
        return pooled.tokens
    assert pooled.chosen is not None
    return take(x, pooled.chosen)


def distance(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).square().sum().item()


def nearest(token: Tensor, centres: list[Tensor]) -> int:
    return min(range(len(centres)), key=lambda j: distance(token, centres[j]))


def most_significant(significance: Tensor, k: int) -> list[int]:
    return sorted(sorted(range(N), key=lambda i: -significance[i])[:k])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("k", [1, 7])
def test_kmeans(weighted: bool, k: int) -> None:
    seen = make_seen()
    pooled = KMeans(weighted=weighted, init="significance", iterations=3)(X, k, seen)
    for b in range(B):
        w = seen.significance[b] if weighted else torch.ones(N)
        centres = [X[b, i] for i in most_significant(seen.significance[b], k)]
        for _ in range(3):
            groups = [nearest(X[b, i], centres) for i in range(N)]
            for j in range(k):
                own = [i for i in range(N) if groups[i] == j]
                if own:
                    centres[j] = sum(w[i] * X[b, i] for i in own) / sum(w[i] for i in own)
        assert_close(pooled.tokens[b], torch.stack(centres), rtol=1e-4, atol=1e-5)
        assert pooled.assignment[b].tolist() == [nearest(X[b, i], centres) for i in range(N)]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("k", [1, 7])
def test_kmedoids(weighted: bool, k: int) -> None:
    seen = make_seen()
    pooled = KMedoids(weighted=weighted, init="significance", iterations=2)(X, k, seen)
    for b in range(B):
        w = seen.significance[b] if weighted else torch.ones(N)
        medoids = most_significant(seen.significance[b], k)
        for _ in range(2):
            groups = [nearest(X[b, i], [X[b, m] for m in medoids]) for i in range(N)]
            for j in range(k):
                own = [i for i in range(N) if groups[i] == j]
                medoids[j] = min(
                    own, key=lambda i: sum(w[o].item() * distance(X[b, i], X[b, o]) for o in own)
                )
        assert pooled.chosen[b].tolist() == medoids
        assert pooled.assignment[b].tolist() == [
            nearest(X[b, i], [X[b, m] for m in medoids]) for i in range(N)
        ]


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("init", ["distinct", "significance"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", [KMeans, KMedoids])
def test_objective_never_rises(kind: type[Pool], weighted: bool, init: str, carried: bool) -> None:
    """Eq. 13, with the weights that the pool uses, from one iteration to the next."""
    seen = make_seen(size=(rand(B, N, seed=4) * 5).ceil() if carried else None)
    w = seen.significance if weighted else torch.ones(B, N) if seen.size is None else seen.size
    before = torch.full((B,), torch.inf, dtype=torch.float64)
    for iterations in range(4):
        pooled = kind(weighted=weighted, init=init, iterations=iterations)(X, 6, seen)
        squared = torch.cdist(X.double(), tokens_of(pooled, X).double()).square().amin(2)
        now = (w * squared).sum(1)
        assert (now <= before * (1 + 1e-5)).all()
        before = now


def test_unweighted_clustering_uses_carried_sizes() -> None:
    """K-means of tokens with sizes equals k-means of as many copies."""
    x = randn(1, 8, C)
    size = torch.tensor([[3.0, 1, 2, 1, 1, 4, 1, 1]])
    seen = Seen(torch.arange(8.0, 0, -1).unsqueeze(0), None, size, (2, 4), True)
    pooled = KMeans(weighted=False, init="significance", iterations=3)(x, 3, seen)
    copies = x[0].repeat_interleave(size[0].long(), dim=0).unsqueeze(0)
    assert_close(pooled.tokens, kmeans(copies, 3, init=x[0, :3], iterations=3).centres, rtol=1e-4, atol=1e-5)


def test_power_bert_keeps_the_most_significant_in_order() -> None:
    seen = make_seen()
    chosen = Select("power_bert")(X, 8, seen).chosen
    assert chosen.tolist() == [most_significant(seen.significance[b], 8) for b in range(B)]


def test_importance_samples_by_significance_without_replacement() -> None:
    """The probabilities of the first token and of a pair are those of successive draws."""
    p, draws = torch.tensor([0.5, 0.3, 0.15, 0.05]), 20_000
    seen = Seen(p.expand(draws, 4), None, None, (2, 2), False)
    torch.manual_seed(0)
    one = Select("importance")(torch.zeros(draws, 4, 1), 1, seen).chosen.flatten()
    deviation = 4 * (0.25 / draws) ** 0.5  # four standard deviations of a frequency
    assert_close(torch.bincount(one, minlength=4) / draws, p, rtol=0, atol=deviation)
    two = Select("importance")(torch.zeros(draws, 4, 1), 2, seen).chosen
    both = ((two[:, 0] == 0) & (two[:, 1] == 1)).float().mean().item()
    assert both == pytest.approx(0.5 * 0.3 / 0.5 + 0.3 * 0.5 / 0.7, abs=deviation)


def test_random_keeps_every_token_equally_often() -> None:
    draws = 20_000
    torch.manual_seed(0)
    chosen = Select("random")(torch.zeros(draws, 5, 1), 2, Seen(None, None, None, (1, 5), False)).chosen
    assert (chosen[:, 0] < chosen[:, 1]).all()
    frequency = torch.bincount(chosen.flatten(), minlength=5) / draws
    assert_close(frequency, torch.full((5,), 0.4), rtol=0, atol=4 * (0.25 / draws) ** 0.5)


@pytest.mark.parametrize("sized", [False, True])
def test_merge_averages_the_most_similar_pairs(sized: bool) -> None:
    """Each even token is matched to its most similar odd one; the r best pairs are merged."""
    r = 6
    seen = make_seen(size=(rand(B, N, seed=8) * 4).ceil() if sized else None)
    pooled = Merge()(X, N - r, seen)
    for b in range(B):
        unit = seen.keys[b] / seen.keys[b].norm(dim=1, keepdim=True)
        partner = {i: max(range(1, N, 2), key=lambda j: float(unit[i] @ unit[j])) for i in range(0, N, 2)}
        merged = sorted(partner, key=lambda i: -float(unit[i] @ unit[partner[i]]))[:r]
        size = torch.ones(N) if seen.size is None else seen.size[b]
        for index, i in enumerate(i for i in range(N) if i not in merged):
            own = [i, *(m for m in merged if partner[m] == i)]
            mean = sum(size[o] * X[b, o] for o in own) / sum(size[o] for o in own)
            assert_close(pooled.tokens[b, index], mean, rtol=1e-4, atol=1e-5)
            assert all(pooled.assignment[b, o] == index for o in own)


def test_merge_repeats_rounds_below_half_of_the_tokens() -> None:
    pooled = Merge()(X, 3, make_seen())
    assert sorted(set(pooled.assignment.flatten().tolist())) == [0, 1, 2]
    for b in range(B):
        for j in range(3):  # after any number of rounds, a token is the mean of its group
            assert_close(pooled.tokens[b, j], X[b][pooled.assignment[b] == j].mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cells", [(4, 6), (3, 5), (1, 4)])
def test_convolution_is_initialised_to_the_mean(cells: tuple[int, int]) -> None:
    x = randn(2, cells[0] * cells[1], C)
    pooled = ConvPool(C)(x, 0, Seen(None, None, None, cells, True))
    rows, columns = (cells[0] + 1) // 2, (cells[1] + 1) // 2
    assert pooled.cells == (rows, columns)
    grid, groups = x.unflatten(1, cells), pooled.assignment.unflatten(1, cells)
    for i in range(rows):
        for j in range(columns):
            cell = (slice(None), slice(2 * i, 2 * i + 2), slice(2 * j, 2 * j + 2))
            assert_close(pooled.tokens[:, i * columns + j], grid[cell].flatten(1, 2).mean(1))
            assert (groups[cell] == i * columns + j).all()


def test_convolution_halves_the_grid_as_soon_as_the_tokens_fit() -> None:
    assert halving_counts((16, 5, 4, 3, 0), (4, 4)) == (16, 16, 4, 4, 1)
    assert halving_counts((8, 8, 6), (3, 5)) == (15, 15, 6)


@pytest.mark.parametrize("method", POOLS)
@pytest.mark.parametrize("k", [0, 1, 9, 19])
def test_every_method_returns_k_tokens(method: str, k: int) -> None:
    for init in ("distinct", "significance", "random") if method in CLUSTERING else ("distinct",):
        pooled = make_pool(method, init=init)(X, k, make_seen())
        assert tokens_of(pooled, X).shape == (B, k, C)
        assert pooled.assignment.shape == (B, N)
        assert pooled.assignment.max() == k - 1
        if pooled.chosen is not None and k:
            assert (pooled.assignment.gather(1, pooled.chosen) == torch.arange(k)).all()


@pytest.mark.parametrize("method", [m for m in POOLS if m not in SAMPLING])
def test_images_are_pooled_independently(method: str) -> None:
    seen = make_seen()
    whole = tokens_of(make_pool(method)(X, 7, seen), X)
    for b in range(B):
        part = Seen(seen.significance[b : b + 1], seen.keys[b : b + 1], None, CELLS, True)
        alone = tokens_of(make_pool(method)(X[b : b + 1], 7, part), X[b : b + 1])
        assert_close(alone, whole[b : b + 1], rtol=1e-4, atol=1e-5)


def test_selection_computes_the_assignment_only_if_asked() -> None:
    assigned = Select("power_bert")(X, 7, make_seen(assign=True))
    chosen = Select("power_bert")(X, 7, make_seen(assign=False))
    assert torch.equal(assigned.chosen, chosen.chosen)
    assert chosen.assignment is None


class EverySecond(Pool):
    """Keeps the even tokens."""

    joins = False

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        chosen = (2 * torch.arange(k)).expand(len(x), k)
        dropped = chosen.new_full(x.shape[:2], -1)
        return Pooled(chosen=chosen, assignment=dropped.scatter(1, chosen, torch.arange(k).expand_as(chosen)))


@pytest.fixture
def every_second(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(methods, "_REGISTRY", dict(methods._REGISTRY))
    before = list(METHODS)
    register_method("every_second", lambda place: EverySecond())
    yield "every_second"
    METHODS[:] = before


def test_registered_methods_are_accepted_everywhere(every_second: str) -> None:
    model = build("deit")
    reduce(model, every_second, keep=[8, 4, 2])
    with visualtokens.record_groupings(model) as groupings:
        run(model, images())
    kept = (groupings["blocks.2.reduction.tap"].hard()[0] >= 0).nonzero().flatten()
    assert kept.tolist() == [0, 8]
    named = timm.create_model(
        "reduced_vit", base="deit_tiny_patch16_224", method=every_second, keep=0.5, **SMALL
    )
    assert named.reduction.method == every_second
    assert plan(small_vit(), macs=0.7, method=every_second).method == every_second
    with pytest.raises(UserError, match="'every_second' is already registered"):
        register_method(every_second, lambda place: EverySecond())
