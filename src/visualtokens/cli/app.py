"""Dispatch to a verb and print its result."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from visualtokens.cli.verb import Failure, Result, Verb
from visualtokens.errors import UserError, unknown

# Each verb is a module of its name, imported only to run it.
VERBS = {
    "train": "Train a model for classification, segmentation or detection.",
    "eval": "Evaluate a checkpoint on a dataset.",
    "predict": "Print, and draw, what a checkpoint predicts for your images.",
    "explain": "Show which regions of an image determine a checkpoint's prediction.",
    "models": "List the models of this library with their sizes.",
    "bench": "Compare the speed and memory of models on this machine.",
    "reduce": "Make a vision transformer faster by reducing its tokens, and measure what that costs.",
    "papers": "Show the published figures of the papers beside those of this library.",
    "demo": "Train, evaluate and explain a small model on real digits, and write a report.",
}

USAGE = """usage: vtok VERB [options]

Vision transformers that see an image as a few meaningful tokens.

{verbs}

`vtok VERB --help` describes a verb, `vtok --version` prints the version.
Start here:
  vtok demo --out demo
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``vtok`` with these arguments, by default those of the process; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (UserError, OSError) as error:
        return _fail(str(error), code=2)
    except Failure as failure:
        return _fail(str(failure), code=1)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0
    if name == "--version":
        from visualtokens import __version__

        sys.stdout.write(f"visualtokens {__version__}\n")
        return 0
    if name not in VERBS:
        raise unknown("option" if name.startswith("-") else "verb", name, [*VERBS, "--help", "--version"])
    return _run(name, arguments[1:])


def _run(name: str, arguments: list[str]) -> int:
    from visualtokens.cli.parse import parse

    verb: Verb = importlib.import_module(f"visualtokens.cli.{name}").VERB
    try:
        config, as_json = parse(name, VERBS[name], verb, arguments)
    except SystemExit as finished:  # after --help or --print_config
        return int(finished.code or 0)
    with _log_to_stderr():
        result = verb.run(config)
    if not result.silent:
        _print(result, as_json=as_json)
    return result.code


@contextlib.contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Show the log of the library, such as training epochs, on stderr; stdout is for results."""
    logger, handler = logging.getLogger("visualtokens"), logging.StreamHandler(sys.stderr)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _print(result: Result, *, as_json: bool) -> None:
    text = json.dumps(_strict(result.document), indent=2) if as_json else result.text
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()


def _strict(value: Any) -> Any:
    """Return the document with None for numbers that are not finite, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, (list, tuple)) else value


def _fail(message: str, *, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return code


def _usage() -> str:
    width = max(map(len, VERBS))
    return USAGE.format(verbs="\n".join(f"  {name:<{width}}  {purpose}" for name, purpose in VERBS.items()))
