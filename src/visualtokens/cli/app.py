"""Dispatch to a verb and print its result."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Sequence

import visualtokens
from visualtokens.cli import terminal
from visualtokens.cli.verb import Failure, Stream, Verb
from visualtokens.errors import UserError, unknown

# Each verb is a module of its name, imported only to run it.
VERBS = {
    "train": "Train a model for classification, segmentation or detection.",
    "eval": "Evaluate a checkpoint on a dataset.",
    "predict": "Print, save or draw what a checkpoint predicts for your images.",
    "explain": "Show which regions of an image determine a checkpoint's prediction.",
    "export": "Write a model as an ONNX file, an exported program or an AOTInductor package.",
    "models": "List the models of this library with their sizes.",
    "data": "Check a dataset before training: splits, classes, sizes and bad files.",
    "bench": "Compare the speed and memory of models on this machine.",
    "reduce": "Make a vision transformer faster by reducing its tokens, and measure what that costs.",
    "convert": "Convert released weights into a checkpoint folder.",
    "push": "Share a checkpoint on the Hugging Face Hub with a model card.",
    "papers": "Show the published figures of the papers beside those of this library.",
    "reproduce": "Test claims of the papers by trainings at small scale, with several seeds.",
    "studio": "See, explain, reduce and compare models in the browser.",
    "demo": "Train, evaluate and explain a small model on real digits, and write a report.",
    "completion": "Print a script that completes commands in bash, zsh or fish.",
    "help": "Show this list, or the options of a verb.",
}

USAGE = """usage: vtok VERB [options]

Vision transformers that see an image as a few meaningful tokens.

{verbs}

`vtok VERB --help` or `vtok help VERB` describes a verb, `vtok --version` prints the version.
Start here:
  vtok demo --out demo
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``vtok`` with these arguments, by default those of the process; return the exit code.

    Every failure ends with one line on stderr; with ``VTOK_DEBUG=1`` the traceback precedes it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    terminal.prepare()
    try:
        return _dispatch(arguments)
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed it
        terminal.discard_stdout()
        return 1
    except (UserError, OSError) as error:
        terminal.discard_if_unwritable()
        return _fail(error, str(error), code=2)
    except Failure as failure:
        return _fail(failure, str(failure), code=1)
    except KeyboardInterrupt:
        terminal.write_error("interrupted\n")
        return 130
    except Exception as error:  # noqa: BLE001 - a user gets one line instead of a traceback, whatever failed
        return _fail(error, _unforeseen(error), code=1)


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        terminal.write(usage())
        return 0
    if name == "--version":
        terminal.write(f"visualtokens {visualtokens.__version__}\n")
        return 0
    if name not in VERBS:
        raise unknown("option" if name.startswith("-") else "verb", name, [*VERBS, "--help", "--version"])
    return _run(name, arguments[1:])


def _run(name: str, arguments: list[str]) -> int:
    if importlib.util.find_spec("jsonargparse") is None:  # where only exported models are run
        from visualtokens.cli.plain import parse
    else:
        from visualtokens.cli.parse import parse

    verb: Verb = importlib.import_module(f"visualtokens.cli.{name}").VERB
    try:
        config, as_json = parse(name, VERBS[name], verb, arguments)
    except SystemExit as finished:  # after --help or --print_config
        return int(finished.code or 0)
    if not (verb.light(config) if callable(verb.light) else verb.light):
        visualtokens.register_models()
    with terminal.log_to_stderr():
        result = verb.run(config)
        if isinstance(result, Stream):
            from visualtokens.cli.stream import print_stream

            return print_stream(result, as_json=as_json)
    if not result.silent:
        text = terminal.to_json(result.document) if as_json else result.text
        terminal.write(text.rstrip("\n") + "\n")
    return result.code


def _fail(error: Exception, message: str, *, code: int) -> int:
    if os.environ.get("VTOK_DEBUG") == "1":
        terminal.write_error("".join(traceback.format_exception(error)))
    terminal.write_error(f"error: {' '.join(message.split())}\n")
    return code


def _unforeseen(error: Exception) -> str:
    """Return the message for an error that no part of the library foresaw."""
    from visualtokens.files import one_line

    text = one_line(error)
    memory = re.search("out of memory|not enough memory|allocate memory|bad_alloc", text)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and memory):
        return f"out of memory{text and f' ({text})'}; use a smaller batch, image size or model"
    return f"{type(error).__name__}{text and f': {text}'} (VTOK_DEBUG=1 shows the traceback)"


def usage() -> str:
    """Return the list of verbs."""
    width = max(map(len, VERBS))
    return USAGE.format(verbs="\n".join(f"  {name:<{width}}  {purpose}" for name, purpose in VERBS.items()))
