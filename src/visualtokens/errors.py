"""Errors for invalid input: each states the value that was given and what to give instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Invalid input from the user. The message is one line that states how to fix it.

    The command line prints the message and exits with code 2.
    """


def unknown(what: str, name: str, known: Iterable[str]) -> UserError:
    """The error for an unknown name, with the most similar known one."""
    options = sorted(known)
    nearest = max(options, key=lambda option: _similarity(name, option), default="")  # the first on ties
    if _similarity(name, nearest) >= 0.4:
        hint = f"did you mean {nearest!r}?"
    elif len(options) <= 12:
        hint = "choose from " + ", ".join(options)
    else:
        hint = f"there are {len(options)} to choose from, such as {options[0]!r}"
    return UserError(f"unknown {what} {name!r}; {hint}")


def _similarity(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a.lower(), b.lower()).ratio()
