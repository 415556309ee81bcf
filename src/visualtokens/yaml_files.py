"""Reading YAML files of unknown origin: size, aliases and nesting are limited, and errors are one line."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from visualtokens.errors import UserError
from visualtokens.files import one_line

MAX_BYTES = 1_000_000
MAX_VALUES = 100_000


def read_yaml(path: str | Path, *, what: str) -> Any:
    """Return the content of a YAML file; only plain values, lists and mappings are built from it.

    ``what`` describes the file in messages, such as "config file". A file that cannot be read, is not YAML or
    exceeds a limit raises :class:`UserError`.
    """
    name = f"{what} {str(path)!r}"
    text = _read_text(Path(path), name)
    try:
        size = _expanded_size(yaml.compose(text, yaml.SafeLoader), {})
        content = yaml.safe_load(text) if size <= MAX_VALUES else None
    except yaml.MarkedYAMLError as error:
        place = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{name} is not YAML: {error.problem}{place}") from error
    except yaml.YAMLError as error:  # characters that YAML forbids
        raise UserError(f"{name} is not YAML: {one_line(error)}") from error
    except RecursionError as error:
        raise UserError(f"{name} is nested too deeply") from error
    except (ValueError, LookupError, AttributeError) as error:  # from PyYAML, for values such as 2024-99-99
        raise UserError(f"{name} holds a value that is not YAML: {one_line(error)}") from error
    if size > MAX_VALUES:
        raise UserError(
            f"{name} has more than {MAX_VALUES:,} values with its aliases expanded; leave the aliases out"
        )
    return content


def _read_text(file: Path, name: str) -> str:
    try:
        if file.exists() and not file.is_file():  # a named pipe would block, and the file may be read twice
            raise UserError(f"{name} is not a regular file; it must be a YAML file")
        if (size := file.stat().st_size) > MAX_BYTES:
            raise UserError(f"{name} has {size / 1e6:.1f} MB; at most {MAX_BYTES / 1e6:g} MB are read")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not text; it must be YAML") from error


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
