"""What a table of names consists of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Rule(NamedTuple):
    """Names that match ``pattern`` as a whole become ``target``, with the groups of the match filled in.

    ``{0}`` is the first group; ``{0-}`` is it as a number less one, for those who count stages from 1.
    """

    pattern: str
    target: str | None  # None: a constant, or what only training needed; known, and left out
    part: int | None = None  # this tensor is one of several that become one, stacked in this order
    flatten: bool = False  # a 1×1 convolution that is a Linear here

    def apply(self, name: str) -> str | None:
        """The new name; None where the rule does not match, empty for what is left out."""
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return None
        if self.target is None:
            return ""
        return _PLACE.sub(lambda place: _fill(place, match), self.target)


_PLACE = re.compile(r"\{(\d)(-?)\}")


def _fill(place: re.Match[str], match: re.Match[str]) -> str:
    value = match[int(place[1]) + 1]
    return str(int(value) - 1) if place[2] else value


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
