"""The parser's complaints, in one line that tells what was expected and what was typed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from visualtokens.errors import UserError, unknown

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a mapping"}


def translate(message: str, hints: Mapping[str, Any], *, positional: str | None) -> UserError:
    """The error for what jsonargparse or argparse said about options with these type hints."""
    if found := re.match(r"unrecognized arguments: (.*)", message, re.DOTALL):
        return _unrecognized(found[1].split(), [name for name in hints if name != positional])
    if found := re.match(r"the following arguments are required: (.*)", message):
        return missing(found[1].split(", "), positional=positional)
    if found := re.match(r'Parser key "(\w+)[^"]*":.*(?:Got|Given) value: (.*)', message, re.DOTALL):
        name, value = found.groups()
        return _wrong_value(name, value.strip(), hints[name])
    return UserError(" ".join(message.split()))


def missing(names: Sequence[str], *, positional: str | None) -> UserError:
    """The error for options that must be given."""
    spelled = [name.removesuffix("s").upper() if name == positional else f"--{name}" for name in names]
    return UserError(f"{' and '.join(spelled)} must be given; --help shows an example")


def _unrecognized(arguments: Sequence[str], options: Sequence[str]) -> UserError:
    for argument in arguments:
        if argument.startswith("-"):
            known = [f"--{name}" for name in (*options, "config", "json", "help", "print_config")]
            return unknown("option", argument.split("=")[0], known)
    return UserError(f"unexpected argument {arguments[0]!r}; --help shows what is understood")


def _wrong_value(name: str, value: str, hint: Any) -> UserError:
    if get_origin(hint) is Literal:
        return unknown(f"--{name}", value, map(str, get_args(hint)))
    several = () if get_origin(hint) is dict else get_args(hint)
    expected = " or ".join(_word(kind) for kind in several or (hint,) if kind is not NoneType)
    return UserError(f"--{name} must be {expected}, not {value!r}")


def _word(kind: Any) -> str:
    """What a value of this type is to a person."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return _WORDS.get(get_origin(kind) or kind, str(kind))
