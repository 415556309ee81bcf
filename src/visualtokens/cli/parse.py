"""Parsing: the options of a verb from the fields of its dataclass, and one-line errors for wrong ones."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object
from jsonargparse import ArgumentParser

from visualtokens.cli.verb import Verb
from visualtokens.errors import UserError, unknown
from visualtokens.tasks.options import default_of
from visualtokens.yaml_files import read_yaml

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
        parser = _parser(name, purpose, verb, hints, with_config=bool(configs))
        values = parser.parse_args(ordered).as_dict()
    except argparse.ArgumentError as error:
        raise translate(str(error), hints, positional=verb.positionals) from error
    given = {field.name: values[_spelled(field)] for field in fields if _spelled(field) in values}
    absent = [_spelled(field) for field in fields if _is_required(field) and not given.get(field.name)]
    if absent:
        raise missing(absent, positional=verb.positionals)
    for field in fields:
        if field.name in given and given[field.name] is None and not _takes_none(types[field.name]):
            raise UserError(f"--{_spelled(field)} must have a value, not null; leave it out for its default")
    return verb.config(**given), values["json"]


def _takes_none(hint: Any) -> bool:
    return hint is Any or hint is NoneType or any(map(_takes_none, get_args(hint)))


def _parser(
    name: str, purpose: str, verb: Verb, hints: dict[str, Any], *, with_config: bool
) -> ArgumentParser:
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
                positional=field.name in verb.positionals,
                # Of several, argparse would take the second as absent if an option follows the first.
                exactly_one=len(verb.positionals) > 1 and not with_config,
            )
    parser.add_argument("--json", action="store_true", help="Print the result as one JSON document.")
    parser.add_argument("--config", action="config", help=_config_help(list(hints)))
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
    return _parser(name, purpose, verb, hints, with_config=False).format_help()


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
    positional: list[str] = []
    options: list[str] = []
    for field in dataclasses.fields(verb.config):
        if field.name in verb.positionals:
            shown = _metavar(field)
            several = str(field.type).startswith("list")
            more = " ..." if several else ""
            required = f"{shown} [{shown} ...]" if several else shown
            positional.append(required if _is_required(field) else f"[{shown}{more}]")
        elif _is_required(field):
            options.append(f"--{_spelled(field)} {_spelled(field).upper()}")
    return " ".join(["vtok", name, *positional, *options, "[options]"])


def descriptions(config: type) -> dict[str, str]:
    """Return the docstring of every field, those of base classes included."""
    return {
        param.arg_name: " ".join((param.description or "").split())
        for kind in reversed(config.__mro__)
        if dataclasses.is_dataclass(kind)
        for param in parse_from_object(kind).params
    }


def _add(
    parser: Any,
    field: dataclasses.Field[Any],
    hint: Any,
    description: str,
    *,
    positional: bool,
    exactly_one: bool,
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
            nargs="*" if several else None if exactly_one else "?",
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
    """Return one of what a field holds: "studies" holds STUDY."""
    name = field.name
    return (f"{name[:-3]}y" if name.endswith("ies") else name.removesuffix("s")).upper()


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


# Config files.


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
    options = read_yaml(path, what="config file")
    if not isinstance(options, dict):
        raise UserError(f"config file {path!r} must hold lines such as 'epochs: 10'")
    for name in options:
        if str(name).split(".")[0] not in known:
            raise unknown(f"option in {path}:", str(name), known)


# Errors of the parser, rewritten as one line that states what was expected and what was given.

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a mapping"}


def translate(message: str, hints: Mapping[str, Any], *, positional: Collection[str] = ()) -> UserError:
    """Return the error for a message of jsonargparse or argparse about options with these type hints."""
    if found := re.match(r"unrecognized arguments: (.*)", message, re.DOTALL):
        return _unrecognized(found[1].split(), [name for name in hints if name not in positional])
    if found := re.match(r"the following arguments are required: (.*)", message):
        return missing(found[1].split(", "), positional=positional)
    if found := re.match(r'Parser key "(\w+)[^"]*":.*(?:Got|Given) value: (.*)', message, re.DOTALL):
        name, value = found.groups()
        return _wrong_value(name, value.strip(), hints[name])
    return UserError(" ".join(message.split()))


def missing(names: Sequence[str], *, positional: Collection[str]) -> UserError:
    """Return the error for required options."""
    spelled = [
        name.removesuffix("s").upper() if name.lower() in positional else f"--{name}" for name in names
    ]
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
