"""The error for an unknown name."""

from __future__ import annotations

import pytest

from visualtokens.errors import UserError, unknown


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("paca_vit_bo", "did you mean 'paca_vit_b0'?"),  # equally similar to b0, b1 and b2: the first
        ("PACA_VIT_B2", "did you mean 'paca_vit_b2'?"),
        ("zzz", "choose from paca_vit_b0, paca_vit_b1, paca_vit_b2"),
    ],
)
def test_the_most_similar_name_is_suggested(name: str, hint: str) -> None:
    error = unknown("model", name, ["paca_vit_b2", "paca_vit_b0", "paca_vit_b1"])
    assert isinstance(error, UserError)
    assert isinstance(error, ValueError)
    assert str(error) == f"unknown model {name!r}; {hint}"


def test_many_or_no_options() -> None:
    assert "there are 40 to choose from, such as 'm00'" in str(
        unknown("x", "?", [f"m{i:02}" for i in range(40)])
    )
    assert str(unknown("x", "?", [])) == "unknown x '?'; choose from "
