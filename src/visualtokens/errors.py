"""Errors that say what was wrong, with its value, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the caller gave cannot be used. The message is one line that names the way out.

    The command line prints it and exits with code 2; in Python it is an ordinary ``ValueError``.
    """


def unknown(what: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that does not exist, with the nearest one that does."""
    options = sorted(known)
    nearest = max(options, key=lambda option: _likeness(name, option), default="")  # the first on ties
    if _likeness(name, nearest) >= 0.4:
        hint = f"did you mean {nearest!r}?"
    elif len(options) <= 12:
        hint = "choose from " + ", ".join(options)
    else:
        hint = f"there are {len(options)} to choose from, such as {options[0]!r}"
    return UserError(f"unknown {what} {name!r}; {hint}")


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a.lower(), b.lower()).ratio()
