from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from visualtokens.ops import (
    Cells,
    assign_soft,
    bipartite_merge,
    gather,
    kmeans,
    kmedoids,
    scatter,
    set_checks,
    super_token_association,
    super_token_gather,
    super_token_scatter,
)
from visualtokens.ops.checks import check_finite

from .helpers import compiled, randn

CELLS = Cells((3, 4), (2, 2))

# operation, its tensors by name (each in turn gets a bad value), how to call it
CASES: dict[str, tuple[dict[str, tuple[int, ...]], Callable[..., Any]]] = {
    "kmeans": ({"x": (2, 12, 3), "weights": (2, 12), "init": (2, 4, 3)}, lambda **t: kmeans(k=4, **t)),
    "kmedoids": ({"x": (2, 12, 3), "weights": (2, 12), "init": (2, 12)}, lambda **t: kmedoids(k=4, **t)),
    "assign_soft": ({"logits": (2, 12, 4)}, assign_soft),
    "gather": ({"x": (2, 12, 3), "weights": (2, 12, 4)}, gather),
    "scatter": ({"tokens": (2, 4, 3), "weights": (2, 12, 4)}, scatter),
    "bipartite_merge": (
        {"x": (2, 12, 3), "metric": (2, 12, 3), "size": (2, 12)},
        lambda **t: bipartite_merge(r=3, **t),
    ),
    "super_token_association": ({"x": (2, 12, 3)}, lambda **t: super_token_association(cells=CELLS, **t)),
    "super_token_gather": (
        {"x": (2, 12, 3), "association": (2, 4, 4, 9)},
        lambda **t: super_token_gather(cells=CELLS, **t),
    ),
    "super_token_scatter": (
        {"supers": (2, 4, 3), "association": (2, 4, 4, 9)},
        lambda **t: super_token_scatter(cells=CELLS, **t),
    ),
}
TENSORS = [(operation, name) for operation, (shapes, _) in CASES.items() for name in shapes]


def tensors(operation: str, spoiled: str | None = None, value: float = torch.nan) -> dict[str, torch.Tensor]:
    """Finite inputs; the last value of the last image of ``spoiled`` becomes ``value``."""
    made = {name: randn(*shape).abs() + 0.1 for name, shape in CASES[operation][0].items()}
    if spoiled is not None:
        made[spoiled].view(-1)[-1] = value
    return made


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_a_bad_value_is_named_with_its_place(
    operation: str, name: str, value: float, checks_on: None
) -> None:
    shape = CASES[operation][0][name]
    place = ", ".join(str(size - 1) for size in shape)
    with pytest.raises(ValueError, match="not finite") as error:
        CASES[operation][1](**tensors(operation, name, value))
    message = str(error.value)
    assert message.startswith(f"{operation}: {name} has 1 of ")
    assert f"{value} at ({place})" in message
    assert "\n" not in message


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_without_checks_a_bad_value_returns(
    operation: str, name: str, value: float, checks_off: None
) -> None:
    """Nothing waits for convergence, so nothing hangs, and the shapes are those of good inputs."""
    good = torch.utils._pytree.tree_leaves(CASES[operation][1](**tensors(operation)))
    bad = torch.utils._pytree.tree_leaves(CASES[operation][1](**tensors(operation, name, value)))
    assert [t.shape for t in bad] == [t.shape for t in good]


@pytest.mark.parametrize("operation", CASES)
def test_good_values_pass_the_checks(operation: str, checks_on: None) -> None:
    CASES[operation][1](**tensors(operation))


def test_counts_and_first_place(checks_on: None) -> None:
    x = torch.zeros(2, 3)
    x[0, 2], x[1, 1] = -torch.inf, torch.nan
    with pytest.raises(ValueError, match=r"^here: b has 2 of 6 values .* the first is -inf at \(0, 2\)"):
        check_finite("here", a=None, b=x, c=torch.zeros(3), d=torch.arange(3))


def test_the_switch_says_what_it_was(checks_off: None) -> None:
    assert set_checks(True) is False
    assert set_checks(True) is True
    assert set_checks(False) is True
    assert set_checks(False) is False


def test_checks_are_off_by_default() -> None:
    assert set_checks(False) is False


def test_compiled_graphs_never_check(checks_on: None) -> None:
    result = compiled(gather)(**tensors("gather", "x"))
    assert result.isnan().any()
