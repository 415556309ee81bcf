"""Parsing by argparse alone, where only exported models are run and jsonargparse is not installed."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from visualtokens.cli.verb import Verb
from visualtokens.errors import UserError
from visualtokens.tasks.options import default_of


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists the options")


def parse(name: str, purpose: str, verb: Verb, arguments: Sequence[str]) -> tuple[Any, bool]:
    """Return the configuration of the verb, and whether JSON output is wanted.

    Config files, and options that hold others, are not supported.
    """
    parser = _Parser(
        prog=f"vtok {name}", description=f"{purpose} example: {verb.example}", allow_abbrev=False
    )
    hints, fields = get_type_hints(verb.config), dataclasses.fields(verb.config)
    for field in fields:
        _add(parser, field, hints[field.name], positional=field.name in verb.positionals)
    parser.add_argument("--json", action="store_true", help="Print the result as one JSON document.")
    values = vars(parser.parse_args(list(arguments)))
    as_json = values.pop("json")
    return verb.config(**values), as_json


def _add(parser: _Parser, field: dataclasses.Field[Any], hint: Any, *, positional: bool) -> None:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    several = get_origin(hint) is list
    kind = hint if not kinds or get_origin(hint) is Literal else kinds[0] if len(kinds) == 1 else str
    default = default_of(field)
    if get_origin(kind) is dict:
        return
    name = field.name if positional else f"--{field.name.removesuffix('_')}"
    if hint is bool:
        parser.add_argument(name, action="store_true")
    elif positional:
        parser.add_argument(name, nargs="+" if several else None)
    elif get_origin(kind) is Literal:
        parser.add_argument(name, dest=field.name, choices=get_args(kind), default=default)
    else:
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        parser.add_argument(
            name,
            dest=field.name,
            type=kind,
            nargs="+" if several else None,
            default=default,
            required=required,
        )
