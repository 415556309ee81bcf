"""From coalitions of regions to a value for each: Shapley values, a greedy order, single removals.

The players of a game are the K regions of an image. A coalition ``(K,)`` of booleans is the set of regions
that are shown, and the game gives its score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visualtokens.errors import UserError

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]


class Game:
    """The score of coalitions of K players; counts its evaluations."""

    def __init__(self, players: int, evaluate: Callable[[Tensor], Tensor]) -> None:
        self.players = players
        self.evaluations = 0
        self._evaluate = evaluate

    def __call__(self, shown: Bools) -> Floats:
        """``(M,)``: the scores of the coalitions ``shown (M, K)``."""
        shown = np.asarray(shown, dtype=bool)
        self.evaluations += len(shown)
        if not len(shown):
            return np.empty(0)
        with torch.no_grad():
            return self._evaluate(torch.from_numpy(shown)).double().numpy()

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The scores with all players and with none."""
        full, empty = self(np.array([[True] * self.players, [False] * self.players]))
        return float(full), float(empty)

    @property
    def full(self) -> float:
        """The score with all players."""
        return self.ends[0]

    @property
    def empty(self) -> float:
        """The score with no players."""
        return self.ends[1]


@dataclass(frozen=True, eq=False)
class Attribution:
    """A value for each player."""

    values: Floats  # (K,)
    errors: Floats | None  # (K,): standard errors, None if the values are exact or have none
    order: tuple[int, ...]  # the players, most important first


def attribution(values: Floats, errors: Floats | None = None) -> Attribution:
    """The values with the players ordered by them."""
    return Attribution(values, errors, tuple(np.argsort(-values, kind="stable").tolist()))


# Shapley values.


def shapley(game: Game, *, budget: int, seed: int = 0) -> Attribution:
    """The Shapley value of each player: exact if ``budget`` allows all 2^K coalitions, else estimated.

    The values sum to the score with all players minus that with none, up to rounding.
    """
    check_budget(game, budget)
    if 2**game.players <= budget:
        return attribution(exact_shapley(game))
    return attribution(*kernel_shapley(game, budget=budget, seed=seed))


def check_budget(game: Game, budget: int) -> None:
    """Raise :class:`UserError` if the budget cannot determine a value for each player."""
    needed = min(2**game.players, 2 * game.players + 2)
    if budget < needed:
        raise UserError(
            f"budget={budget} for {game.players} regions; give at least {needed}, or fewer regions"
        )


def exact_shapley(game: Game) -> Floats:
    """``(K,)``, from all 2^K coalitions: Σ_S |S|! (K − |S| − 1)! / K! (v(S ∪ k) − v(S))."""
    k = game.players
    number = np.arange(2**k)
    shown = (number[:, None] >> np.arange(k)) & 1 == 1  # (2^K, K)
    score = game(shown)
    game.ends = float(score[-1]), float(score[0])
    weight = np.array([1 / (k * comb(k - 1, size)) for size in range(k)])  # of a coalition without the player
    values = np.empty(k)
    for player in range(k):
        without = number[~shown[:, player]]
        gain = score[without | 1 << player] - score[without]
        values[player] = (weight[shown[without].sum(1)] * gain).sum()
    return values


def kernel_shapley(game: Game, *, budget: int, seed: int = 0) -> tuple[Floats, Floats]:
    """``(K,)`` each: Shapley values by kernel regression, and their standard errors.

    Shapley values are the best additive model of the game under the constraint that they sum to
    v(all) − v(none), with the weight (K − 1) / (C(K, s) s (K − s)) for a coalition of size s (Charnes et
    al., 1988). Coalitions are drawn in proportion to it, each together with its complement, which removes
    the error of all interactions of even order. The standard errors are those of the jackknife over the pairs
    that were drawn at random.
    """
    pairs, weights, drawn = draw_pairs(game.players, (budget - 2) // 2, np.random.default_rng(seed))  # (P, K)
    total = game.full - game.empty
    scores = game(np.concatenate((pairs, ~pairs)))
    difference = (scores[: len(pairs)] - scores[len(pairs) :]) / 2  # (P,)
    # Σ_S values = difference + total / 2; with values = total / K + deviation, where Σ deviation = 0:
    share = pairs.mean(1)
    centred = pairs - share[:, None]  # (P, K)
    target = difference + total * (0.5 - share)
    weighted = centred * weights[:, None]
    inverse = np.linalg.pinv(weighted.T @ centred, hermitian=True)  # (K, K)
    deviation = inverse @ (weighted.T @ target)
    residual = target - centred @ deviation
    leverage = np.einsum("pk,kl,pl->p", weighted, inverse, centred)
    shift = (weighted * (residual / np.maximum(1 - leverage, 1e-9))[:, None]) @ inverse  # (P, K)
    errors = np.sqrt((shift[drawn] ** 2).sum(0) * (1 - 1 / max(drawn.sum(), 1)))
    return total / game.players + deviation - deviation.mean(), errors


def draw_pairs(players: int, count: int, rng: np.random.Generator) -> tuple[Bools, Floats, Bools]:
    """At most ``count`` different coalitions ``(P, K)``, each for itself and its complement.

    Also their weights ``(P,)`` and which of them were drawn at random. Coalitions of one player, of two and
    so on are all taken as long as random drawing would take each of them about once; the remaining
    evaluations are drawn from the larger sizes.
    """
    sizes = np.arange(1, players // 2 + 1)
    number = np.array([comb(players, int(s)) for s in sizes], dtype=float)  # of pairs
    chance = 2 / (sizes * (players - sizes))
    if players % 2 == 0:  # a coalition of half the players and its complement have the same size
        number[-1], chance[-1] = number[-1] / 2, chance[-1] / 2
    rows: list[tuple[bytes, float, bool]] = []
    taken = 0
    while taken < len(sizes) and (count - len(rows)) * chance[taken] >= number[taken] * chance[taken:].sum():
        every = {_pair(players, chosen) for chosen in combinations(range(players), int(sizes[taken]))}
        rows += [(key, chance[taken] / number[taken], False) for key in sorted(every)]
        taken += 1
    left = count - len(rows)
    if taken < len(sizes) and left > 0:
        drawn = _draw(players, sizes[taken:], chance[taken:], min(left, int(number[taken:].sum())), rng)
        unit = chance[taken:].sum() / sum(drawn.values())
        rows += [(key, unit * times, True) for key, times in drawn.items()]
    pairs = np.array([np.frombuffer(key, dtype=bool) for key, _, _ in rows])
    return pairs, np.array([weight for _, weight, _ in rows]), np.array([random for *_, random in rows])


def _draw(
    players: int, sizes: NDArray[np.integer], chance: Floats, count: int, rng: np.random.Generator
) -> dict[bytes, int]:
    """``count`` different pairs of these sizes, and how often each was drawn until there were so many."""
    drawn: dict[bytes, int] = {}
    for _ in range(50):  # small games repeat pairs
        # systematic sampling: the shares of the sizes are exact
        position = (np.arange(count) + rng.random()) / count
        chosen = sizes[np.searchsorted(np.cumsum(chance) / chance.sum(), position).clip(max=len(sizes) - 1)]
        for size in rng.permutation(chosen):
            key = _pair(players, rng.permutation(players)[:size])
            drawn[key] = drawn.get(key, 0) + 1
            if len(drawn) == count:
                return drawn
    return drawn


def _pair(players: int, chosen: Sequence[int] | NDArray[np.integer]) -> bytes:
    """A coalition or its complement, whichever shows player 0, as a key."""
    shown = np.zeros(players, dtype=bool)
    shown[list(chosen)] = True
    return (shown if shown[0] else ~shown).tobytes()


# A greedy order.


def greedy(game: Game, *, budget: int, batch: int = 8) -> Attribution:
    """The order in which removing the regions lowers the score fastest, each after those before it.

    The value of a region is the drop when it is removed in this order, so the values sum to v(all) − v(none).
    The next region is the one with the largest drop. A drop found earlier is tried again only if it is among
    the ``batch`` largest. Once the budget is used up, the rest follows by their last known drops.
    """
    check_budget(game, budget)
    k = game.players
    stop = game.evaluations + budget - (k - 1)  # the removals in the final order are measured at the end
    drops = game.full - game(~np.eye(k, dtype=bool))
    order: list[int] = []
    shown, left = np.ones(k, dtype=bool), set(range(k))
    score = game.full
    fresh = True
    while left:
        ranked = sorted(left, key=lambda player: -drops[player])
        if not fresh and game.evaluations + len(ranked[:batch]) <= stop:
            tried = ranked[:batch]
            trial = np.repeat(shown[None], len(tried), axis=0)
            trial[np.arange(len(tried)), tried] = False
            drops[tried] = score - game(trial)
        best = max(left, key=lambda player: drops[player])
        order.append(best)
        left.remove(best)
        shown[best] = False
        score -= drops[best]
        fresh = False
    return Attribution(_drops_in_order(game, order), None, tuple(order))


def _drops_in_order(game: Game, order: list[int]) -> Floats:
    """``(K,)``: the drop at each removal in this order."""
    k = len(order)
    shown = np.ones((k - 1, k), dtype=bool)
    for step, player in enumerate(order[:-1]):
        shown[step:, player] = False
    scores = np.concatenate(([game.full], game(shown), [game.empty]))
    values = np.empty(k)
    values[order] = scores[:-1] - scores[1:]
    return values
