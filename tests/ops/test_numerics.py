"""Checks of non-finite inputs: each operation names the bad tensor, and returns without checks."""

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
from visualtokens.ops.numerics import check_finite

from .helpers import compiled, randn

CELLS = Cells((3, 4), (2, 2))

# operation: the shapes of its tensors, one of which gets a bad value, and a call
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


def tensors(operation: str, bad: str | None = None, value: float = torch.nan) -> dict[str, torch.Tensor]:
    """Finite inputs, except that the last value of the tensor ``bad`` is ``value``."""
    made = {name: randn(*shape).abs() + 0.1 for name, shape in CASES[operation][0].items()}
    if bad is not None:
        made[bad].view(-1)[-1] = value
    return made


@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_a_bad_value_is_reported_with_its_index(operation: str, name: str, checks_on: None) -> None:
    shapes, call = CASES[operation]
    index = ", ".join(str(size - 1) for size in shapes[name])
    call(**tensors(operation))
    with pytest.raises(ValueError, match="not finite") as error:
        call(**tensors(operation, name))
    message = str(error.value)
    assert message.startswith(f"{operation}: {name} has 1 of ")
    assert f"nan at ({index})" in message


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_without_checks_shapes_do_not_depend_on_values(
    operation: str, name: str, value: float, checks_off: None
) -> None:
    call = CASES[operation][1]
    good = torch.utils._pytree.tree_leaves(call(**tensors(operation)))
    bad = torch.utils._pytree.tree_leaves(call(**tensors(operation, name, value)))
    assert [t.shape for t in bad] == [t.shape for t in good]


def test_the_first_bad_value_and_their_number_are_reported(checks_on: None) -> None:
    x = torch.zeros(2, 3)
    x[0, 2], x[1, 1] = -torch.inf, torch.nan
    with pytest.raises(ValueError, match=r"^here: b has 2 of 6 values .* the first is -inf at \(0, 2\)"):
        check_finite("here", a=None, b=x, c=torch.zeros(3), d=torch.arange(3))


def test_set_checks_returns_the_previous_setting() -> None:
    assert set_checks(True) is False  # off by default
    assert set_checks(False) is True
    assert set_checks(False) is False


def test_compiled_graphs_never_check(checks_on: None) -> None:
    result = compiled(gather)(**tensors("gather", "x"))
    assert result.isnan().any()
