"""Parsing: the options of a verb from the fields of its dataclass, and one-line errors for wrong ones."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]
from docstring_parser import parse_from_object
from jsonargparse import ArgumentParser

from visualtokens.cli.verb import Verb
from visualtokens.errors import UserError, unknown
from visualtokens.tasks.options import default_of

MAX_MESSAGE = 500  # characters; values in a message may be long


def parse(name: str, purpose: str, verb: Verb, arguments: Sequence[str]) -> tuple[Any, bool]:
    """Return the configuration of the verb, and whether JSON output is wanted.

    ``--help`` and ``--print_config`` print and raise ``SystemExit(0)``. Arguments that cannot be parsed
    raise a one-line :class:`UserError`.
    """
    try:
        return _parse(name, purpose, verb, arguments)
    except UserError as error:
        text = " ".join(str(error).split())
        raise UserError(text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…") from error


def _parse(name: str, purpose: str, verb: Verb, arguments: Sequence[str]) -> tuple[Any, bool]:
    fields = dataclasses.fields(verb.config)
    types = get_type_hints(verb.config)
    hints = {_spelled(field): types[field.name] for field in fields}
    configs, others = _split_configs(arguments)
    for path in configs:
        _check_config(path, known=[*hints, "json"])
    # Config files come first, so that command-line options override them wherever they stand.
    ordered = [f"--config={path}" for path in configs] + others
    try:
        values = _parser(name, purpose, verb, hints).parse_args(ordered).as_dict()
    except argparse.ArgumentError as error:
        raise translate(str(error), hints, positional=verb.positional) from error
    given = {field.name: values[_spelled(field)] for field in fields if _spelled(field) in values}
    absent = [_spelled(field) for field in fields if _is_required(field) and not given.get(field.name)]
    if absent:
        raise missing(absent, positional=verb.positional)
    for field in fields:
        if field.name in given and given[field.name] is None and not _takes_none(types[field.name]):
            raise UserError(f"--{_spelled(field)} must have a value, not null; leave it out for its default")
    return verb.config(**given), values["json"]


def _takes_none(hint: Any) -> bool:
    return hint is Any or hint is NoneType or any(map(_takes_none, get_args(hint)))


def _parser(name: str, purpose: str, verb: Verb, hints: dict[str, Any]) -> ArgumentParser:
    parser = ArgumentParser(
        prog=f"vtok {name}",
        usage=_usage(name, verb),
        description=f"{purpose}\n\nexample:\n  {verb.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )
    described = descriptions(verb.config)
    for title, fields in grouped_fields(verb).items():
        group = parser.add_argument_group(title)
        for field in fields:
            _add(
                group,
                field,
                hints[_spelled(field)],
                described[field.name],
                positional=field.name == verb.positional,
            )
    parser.add_argument("--json", action="store_true", help="Print the result as one JSON document.")
    parser.add_argument(
        "--config", action="config", help="YAML file with options; command-line options override it."
    )
    for action in parser._actions:
        if "--help" in action.option_strings:
            action.help = "Describe the options."
        elif "--print_config" in action.option_strings:
            action.help, action.metavar = "Print all options as YAML and exit.", ""
    parser._optionals.title = "general"
    parser._action_groups = sorted(parser._action_groups, key=lambda group: group is parser._optionals)
    return parser


def help_text(name: str, purpose: str, verb: Verb) -> str:
    """Return the text of ``vtok VERB --help``."""
    types = get_type_hints(verb.config)
    hints = {_spelled(field): types[field.name] for field in dataclasses.fields(verb.config)}
    return _parser(name, purpose, verb, hints).format_help()


def grouped_fields(verb: Verb) -> dict[str, list[dataclasses.Field[Any]]]:
    """Return the fields under each title of the help; those that no group names come last."""
    fields = sorted(dataclasses.fields(verb.config), key=lambda field: not _is_required(field))
    named = {field.name: field for field in fields}
    groups = {
        title: [named.pop(name) for name in names if name in named] for title, names in verb.groups.items()
    }
    if named:
        groups["other options" if groups else "options"] = list(named.values())
    return groups


def _usage(name: str, verb: Verb) -> str:
    """Return the command with its required options."""
    words: list[str] = []
    for field in dataclasses.fields(verb.config):
        if field.name == verb.positional:
            shown = _metavar(field)
            several = f" [{shown} ...]" if str(field.type).startswith("list") else ""
            words.insert(0, f"{shown}{several}" if _is_required(field) else f"[{shown}]")
        elif _is_required(field):
            words.append(f"--{_spelled(field)} {_spelled(field).upper()}")
    return " ".join(["vtok", name, *words, "[options]"])


def descriptions(config: type) -> dict[str, str]:
    """Return the docstring of every field, those of base classes included."""
    return {
        param.arg_name: " ".join((param.description or "").split())
        for kind in reversed(config.__mro__)
        if dataclasses.is_dataclass(kind)
        for param in parse_from_object(kind).params
    }


def _add(
    parser: Any, field: dataclasses.Field[Any], hint: Any, description: str, *, positional: bool
) -> None:
    """Add the option of one field to a parser or a group."""
    default = default_of(field)
    shows_default = bool(default) or (isinstance(default, (int, float)) and hint is not bool)
    text = (description + (f" (default: {default})" if shows_default else "")).replace("%", "%%")
    several = get_origin(hint) is list
    if positional:
        # SUPPRESS keeps the value of a config file if none is typed.
        parser.add_argument(
            field.name,
            type=str,
            nargs="*" if several else "?",
            default=argparse.SUPPRESS,
            metavar=_metavar(field),
            help=text,
        )
    elif hint is bool:
        parser.add_argument(f"--{_spelled(field)}", action="store_true", help=text)
    elif bool in get_args(hint):  # a switch with an optional value
        parser.add_argument(
            f"--{_spelled(field)}", type=hint, nargs="?", const=True, default=default, help=text
        )
    elif several:
        (kind,) = get_args(hint)
        parser.add_argument(f"--{_spelled(field)}", type=kind, nargs="+", default=default, help=text)
    else:
        needed = _is_required(field)
        parser.add_argument(f"--{_spelled(field)}", type=hint, default=default, required=needed, help=text)


def _spelled(field: dataclasses.Field[Any]) -> str:
    """Return the name of the option: ``lambda_``, which Python needs, becomes ``lambda``."""
    return field.name.removesuffix("_")


def _metavar(field: dataclasses.Field[Any]) -> str:
    return field.name.removesuffix("s").upper()


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


# Config files.

MAX_CONFIG_BYTES = 1_000_000
MAX_CONFIG_VALUES = 100_000


def _split_configs(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the files after ``--config``, and all other arguments."""
    configs: list[str] = []
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--config":
            path = next(rest, None)
            if path is None:
                raise UserError("--config needs a YAML file")
            configs.append(path)
        elif argument.startswith("--config="):
            configs.append(argument.removeprefix("--config="))
        else:
            others.append(argument)
    return configs, others


def _check_config(path: str, *, known: Sequence[str]) -> None:
    """Check that the file is YAML and holds options of this verb."""
    text = _read_config(path)
    try:
        size = _expanded_size(yaml.compose(text, yaml.SafeLoader), {})
        options = yaml.safe_load(text) if size <= MAX_CONFIG_VALUES else None
    except yaml.MarkedYAMLError as error:
        place = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"config file {path!r} is not YAML: {error.problem}{place}") from error
    except yaml.YAMLError as error:  # characters that YAML forbids
        raise UserError(f"config file {path!r} is not YAML: {error}") from error
    except RecursionError as error:
        raise UserError(f"config file {path!r} is nested too deeply") from error
    except (ValueError, LookupError, AttributeError) as error:  # from PyYAML, for values such as 2024-99-99
        raise UserError(f"config file {path!r} holds a value that is not YAML: {error}") from error
    if size > MAX_CONFIG_VALUES:
        raise UserError(
            f"config file {path!r} has more than {MAX_CONFIG_VALUES:,} values with its aliases expanded; "
            "leave the aliases out"
        )
    if not isinstance(options, dict):
        raise UserError(f"config file {path!r} must hold lines such as 'epochs: 10'")
    for name in options:
        if str(name).split(".")[0] not in known:
            raise unknown(f"option in {path}:", str(name), known)


def _read_config(path: str) -> str:
    file = Path(path)
    try:
        if file.exists() and not file.is_file():  # a named pipe would block, and the file is read twice
            raise UserError(f"config file {path!r} is not a regular file; it must be a YAML file")
        if (size := file.stat().st_size) > MAX_CONFIG_BYTES:
            raise UserError(f"config file {path!r} has {size / 1e6:.1f} MB; options fit into 1 MB")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read config file {path!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"config file {path!r} is not text; it must be YAML") from error


def _expanded_size(node: yaml.Node | None, sizes: dict[int, float]) -> float:
    """Return the number of values below a YAML node, where an alias counts as what it stands for.

    A few hundred bytes of nested aliases can stand for billions of values. ``sizes`` holds the nodes that
    were visited, an alias of itself counts as infinite.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in sizes:
        sizes[id(node)] = math.inf
        children = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        sizes[id(node)] = 1 + sum(_expanded_size(child, sizes) for child in children)
    return sizes[id(node)]


# Errors of the parser, rewritten as one line that states what was expected and what was given.

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a mapping"}


def translate(message: str, hints: Mapping[str, Any], *, positional: str | None) -> UserError:
    """Return the error for a message of jsonargparse or argparse about options with these type hints."""
    if found := re.match(r"unrecognized arguments: (.*)", message, re.DOTALL):
        return _unrecognized(found[1].split(), [name for name in hints if name != positional])
    if found := re.match(r"the following arguments are required: (.*)", message):
        return missing(found[1].split(", "), positional=positional)
    if found := re.match(r'Parser key "(\w+)[^"]*":.*(?:Got|Given) value: (.*)', message, re.DOTALL):
        name, value = found.groups()
        return _wrong_value(name, value.strip(), hints[name])
    return UserError(" ".join(message.split()))


def missing(names: Sequence[str], *, positional: str | None) -> UserError:
    """Return the error for required options."""
    spelled = [name.removesuffix("s").upper() if name == positional else f"--{name}" for name in names]
    return UserError(f"{' and '.join(spelled)} must be given; --help shows an example")


def _unrecognized(arguments: Sequence[str], options: Sequence[str]) -> UserError:
    for argument in arguments:
        if argument.startswith("-"):
            known = [f"--{name}" for name in (*options, "config", "json", "help", "print_config")]
            return unknown("option", argument.split("=")[0], known)
    return UserError(f"unexpected argument {arguments[0]!r}; --help lists the options")


def _wrong_value(name: str, value: str, hint: Any) -> UserError:
    if get_origin(hint) is Literal:
        return unknown(f"--{name}", value, map(str, get_args(hint)))
    several = () if get_origin(hint) is dict else get_args(hint)
    expected = " or ".join(_word(kind) for kind in several or (hint,) if kind is not NoneType)
    return UserError(f"--{name} must be {expected}, not {value!r}")


def _word(kind: Any) -> str:
    """Return the plain name of a type."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return _WORDS.get(get_origin(kind) or kind, str(kind))
