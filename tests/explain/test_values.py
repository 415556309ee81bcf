from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor

from visualtokens.errors import UserError
from visualtokens.explain.values import Game, draw_pairs, exact_shapley, greedy, kernel_shapley, shapley


def game_of(players: int, value: object) -> Game:
    def evaluate(shown: Tensor) -> Tensor:
        scores = [value(set(row.nonzero().squeeze(1).tolist())) for row in shown]
        return torch.tensor(scores, dtype=torch.float64)

    return Game(players, evaluate)


def table_game(players: int, seed: int) -> tuple[Game, np.ndarray]:
    """A random score for every coalition, with interactions of all orders, and the table itself."""
    rng = np.random.default_rng(seed)
    main, pair = rng.normal(size=players), rng.normal(size=(players, players))
    table = np.empty(2**players)
    for number in range(2**players):
        s = np.array([number >> k & 1 for k in range(players)])
        table[number] = np.tanh(main @ s + 0.3 * s @ pair @ s)
    powers = 2 ** np.arange(players)
    return Game(
        players, lambda shown: torch.from_numpy(table)[shown.long() @ torch.from_numpy(powers)]
    ), table


def slow_shapley(table: np.ndarray, players: int) -> np.ndarray:
    """The mean gain of each player over all orders in which they could join."""
    total, orders = np.zeros(players), list(permutations(range(players)))
    for order in orders:
        number = 0
        for player in order:
            total[player] += table[number | 1 << player] - table[number]
            number |= 1 << player
    return total / len(orders)


def test_exact_values_are_the_mean_over_all_orders() -> None:
    game, table = table_game(5, 0)
    assert exact_shapley(game) == pytest.approx(slow_shapley(table, 5), abs=1e-12)
    assert game.evaluations == 32


def test_values_of_games_with_a_known_solution() -> None:
    glove = game_of(3, lambda s: float(0 in s and bool(s & {1, 2})))  # one left glove, two right ones
    assert shapley(glove, budget=8).values.tolist() == pytest.approx([2 / 3, 1 / 6, 1 / 6])
    weights = [0.1, -0.4, 2.0, 0.0, 0.7, 0.3]
    additive = game_of(6, lambda s: 5 + sum(weights[k] for k in s))
    found = shapley(additive, budget=30)  # fewer than the 64 coalitions
    assert found.errors is not None
    assert found.values.tolist() == pytest.approx(weights, abs=1e-9)
    assert found.errors.max() < 1e-9
    assert found.order == (2, 4, 5, 0, 3, 1)
    airport = game_of(4, lambda s: float(max((k + 1 for k in s), default=0)))  # a runway for the largest
    want = [sum(1 / (4 - j) for j in range(k + 1)) for k in range(4)]
    assert shapley(airport, budget=16).values.tolist() == pytest.approx(want)


@pytest.mark.parametrize("players", [6, 8, 10])
def test_sampled_values_agree_with_all_coalitions_within_their_errors(players: int) -> None:
    deviations = []
    for seed in range(12):
        game, _ = table_game(players, seed)
        want = exact_shapley(game)
        values, errors = kernel_shapley(game, budget=2 ** (players - 1) // 2 + 4 * players, seed=seed)
        assert values.sum() == pytest.approx(game.full - game.empty, abs=1e-12)
        deviations += ((values - want) / np.maximum(errors, 1e-12)).tolist()
    ratio = math.sqrt(np.mean(np.square(deviations)))
    assert 0.5 < ratio < 1.5  # 1: the errors are as large as stated
    assert np.abs(deviations).max() < 5


def test_errors_fall_with_the_budget() -> None:
    errors = []
    for budget in (64, 256, 1024):
        game, _ = table_game(12, 3)
        errors.append(kernel_shapley(game, budget=budget)[1].mean())
        assert game.evaluations <= budget
    assert errors[0] > 1.5 * errors[1] > 2.25 * errors[2]


def test_pairs_follow_the_shapley_kernel() -> None:
    rng = np.random.default_rng(0)
    pairs, weights, drawn = draw_pairs(20, 2000, rng)
    assert len(np.unique(pairs, axis=0)) == len(pairs) == 2000
    assert pairs[:, 0].all()  # its complement does not show player 0
    size = np.minimum(pairs.sum(1), 20 - pairs.sum(1))
    assert np.bincount(size)[1:3].tolist() == [20, 190]  # all of them
    assert np.array_equal(drawn, size > 2)
    share = np.bincount(size, weights) / weights.sum()
    kernel = np.array([0] + [2 / (s * (20 - s)) for s in range(1, 10)] + [1 / 100])
    assert np.abs(share - kernel / kernel.sum()).max() < 0.002
    assert len(draw_pairs(6, 100, rng)[0]) == 31  # there are no more


def test_a_budget_below_the_number_of_regions_is_refused() -> None:
    game, _ = table_game(9, 0)
    with pytest.raises(UserError, match="at least 20"):
        shapley(game, budget=19)


def test_greedy_removes_the_player_that_hurts_most_after_those_before() -> None:
    """Players 0 and 1 stand in for each other: alone neither matters, so after one the other is next."""

    def value(s: set[int]) -> float:
        return 0.5 * bool(s & {0, 1}) + 0.3 * (2 in s) + 0.1 * (3 in s)

    found = greedy(game_of(5, value), budget=40)
    assert found.order[0] == 2
    assert found.values.sum() == pytest.approx(0.9)
    slow, left = [], {0, 1, 2, 3, 4}
    while left:
        best = max(left, key=lambda k: (value(left) - value(left - {k}), -k))
        slow.append(round(value(left) - value(left - {best}), 9))
        left -= {best}
    assert [round(float(found.values[k]), 9) for k in found.order] == slow


@pytest.mark.parametrize("budget", [26, 40, 100])
def test_greedy_stays_within_its_budget(budget: int) -> None:
    game, _ = table_game(12, 1)
    found = greedy(game, budget=budget)
    assert game.evaluations <= budget
    assert sorted(found.order) == list(range(12))
    assert found.values.sum() == pytest.approx(game.full - game.empty)
