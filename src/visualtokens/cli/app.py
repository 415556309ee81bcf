"""Choosing the verb, running it, and printing what comes of it."""

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

from visualtokens.cli.parse import Failure, Result, Verb
from visualtokens.errors import UserError, unknown

# The verbs and what each is for. Each lives in a module of its name, which is imported only to run it.
VERBS = {
    "train": "Train a model to classify, segment or detect, and save it as a checkpoint folder.",
    "eval": "Measure how well a checkpoint does on the images of a dataset.",
    "predict": "Say, and draw, what a checkpoint sees in your images.",
    "explain": "Draw which regions of an image a checkpoint's answer rests on.",
    "models": "List the models of this library with their size.",
    "bench": "Measure the speed and memory of models, side by side on this machine.",
    "reduce": "Make a vision transformer faster by giving it fewer tokens, and see what that costs.",
    "papers": "Show the papers' published figures beside what this library computes.",
    "demo": "Train, evaluate and explain a small model on real digits, and write a report.",
}

USAGE = """usage: vtok VERB [options]

Vision transformers that see an image as a few meaningful tokens.

{verbs}

`vtok VERB --help` describes one verb, `vtok --version` tells the version.
Start here:
  vtok demo --out demo
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``vtok`` with these arguments, by default those of the process. Gives the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (UserError, OSError) as error:
        return _fail(str(error), code=2)
    except Failure as failure:
        return _fail(str(failure), code=1)
    except KeyboardInterrupt:
        return _fail("interrupted", code=130)


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
    except SystemExit as finished:  # --help and --print_config have printed what was asked for
        return int(finished.code or 0)
    with _log_to_stderr():
        result = verb.run(config)
    if not result.silent:
        _print(result, as_json=as_json)
    return result.code


@contextlib.contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Show what the library tells on its way, such as the epochs of a training; stdout is for results."""
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
    """The document with null where a number is not finite: JSON has no word for those."""
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
