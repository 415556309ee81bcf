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
    configs = [_config_path(config, verb=name, options=list(hints)) for config in configs]
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
        description=f"{purpose}\n\nexample:\n  {verb.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )
    described = _descriptions(verb.config)
    for field in sorted(dataclasses.fields(verb.config), key=lambda field: not _is_required(field)):
        _add(
            parser,
            field,
            hints[_spelled(field)],
            described[field.name],
            positional=field.name == verb.positional,
        )
    parser.add_argument("--json", action="store_true", help="Print the result as one JSON document.")
    parser.add_argument("--config", action="config", help=_config_help(list(hints)))
    return parser


def _descriptions(config: type) -> dict[str, str]:
    """Return the docstring of every field, those of base classes included."""
    return {
        param.arg_name: " ".join((param.description or "").split())
        for kind in reversed(config.__mro__)
        if dataclasses.is_dataclass(kind)
        for param in parse_from_object(kind).params
    }


def _add(
    parser: ArgumentParser, field: dataclasses.Field[Any], hint: Any, description: str, *, positional: bool
) -> None:
    """Add the option of one field."""
    default = default_of(field)
    shows_default = bool(default) or (isinstance(default, (int, float)) and hint is not bool)
    text = (description + (f" (default: {default})" if shows_default else "")).replace("%", "%%")
    several = get_origin(hint) is list
    if positional:
        # SUPPRESS keeps the value of a config file if none is typed.
        shown, nargs = field.name.removesuffix("s").upper(), "*" if several else "?"
        parser.add_argument(
            field.name, type=str, nargs=nargs, default=argparse.SUPPRESS, metavar=shown, help=text
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


RECIPES = Path(__file__).parents[1] / "recipes"


def recipes(options: Sequence[str]) -> list[str]:
    """Return the names of the included recipes for a verb with these options."""
    return [
        file.stem
        for file in sorted(RECIPES.glob("*.yaml"))
        if set(re.findall(r"^(\w+):", file.read_text(encoding="utf-8"), re.MULTILINE)) <= {*options}
    ]


def _config_help(options: Sequence[str]) -> str:
    names = recipes(options)
    kinds = "YAML file with options, or the name of a recipe" if names else "YAML file with options"
    listed = f" Recipes: {', '.join(names)}." if names else ""
    return f"{kinds}; command-line options override it.{listed}"


def _config_path(config: str, *, verb: str, options: Sequence[str]) -> str:
    """Return the path of a config file: an existing file, or the recipe of this name."""
    if (file := Path(config)).is_file():
        return config
    names = recipes(options)
    if config in names:
        return str(RECIPES / f"{config}.yaml")
    if names and not file.exists():
        if file.stem in names:
            raise UserError(
                f"config file {config!r} does not exist; --config {file.stem} is the recipe of this name"
            )
        if file.name == config and not file.suffix:
            known = ", ".join(names)
            raise UserError(
                f"--config {config!r} is neither a file nor a recipe; the recipes of vtok {verb} are {known}"
            )
    return config


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
