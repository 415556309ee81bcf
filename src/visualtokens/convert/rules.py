"""What a table of names consists of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """Names that match ``pattern`` as a whole become ``target``, with the groups of the match filled in.

    ``{0}`` is the first group; ``{0-}`` and ``{0+}`` are it as a number less or plus one, for those who
    count stages from 1, or a transition to the stage before it.
    """

    pattern: str
    target: str | None  # None: a constant, or what only training needed; known, and left out
    part: int | None = None  # this tensor is one of several that become one, stacked in this order
    # The dimension from which on the tensor is flattened: 1 for a 1×1 convolution that is a Linear here,
    # 0 for what is a vector here.
    flatten: int | None = None

    def apply(self, name: str) -> str | None:
        """The new name; None where the rule does not match, empty for what is left out."""
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return None
        if self.target is None:
            return ""
        return _PLACE.sub(lambda place: _fill(place, match), self.target)


_PLACE = re.compile(r"\{(\d)([-+]?)\}")


def _fill(place: re.Match[str], match: re.Match[str]) -> str:
    value = match[int(place[1]) + 1]
    return str(int(value) + int(f"{place[2]}1")) if place[2] else value


@dataclass(frozen=True)
class Layout:
    """How one kind of checkpoint names its parameters."""

    sign: str  # a name that matches this is in every checkpoint of this kind, and in no other of its family
    rules: Sequence[Rule]


@dataclass(frozen=True)
class Family:
    """The checkpoints of one paper."""

    models: str  # pattern of the registered models that they may belong to
    layouts: Sequence[Layout]
    options: Mapping[str, Any] = field(default_factory=dict)  # what else the model must be created with
