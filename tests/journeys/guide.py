"""Code blocks of a document, and running them in order as a reader would.

It needs nothing but the installed package, so that it also runs in an environment with only the wheel:
``python guide.py README.md``.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"


def blocks(document: Path) -> list[tuple[str, str]]:
    """(language, text) of the code blocks."""
    return re.findall(r"^```(\w*)\n(.*?)^```", document.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """The words of each command of a shell block, without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def follow(
    document: Path,
    *,
    replace: Mapping[str, str] | None = None,
    after: Callable[[list[str], str], None] = lambda words, output: None,
) -> None:
    """Run all Python blocks in one namespace and all commands of ``vtok`` and ``torchrun``, in order.

    ``replace`` shortens the examples; each of its texts must occur. ``after`` gets each command and what it
    printed. A command that fails raises an error with its output.
    """
    texts = blocks(document)
    unused = [long for long in replace or {} if not any(long in text for _, text in texts)]
    if unused:
        raise ValueError(f"{document} does not have {unused}")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for language, text in texts:
        for long, short in (replace or {}).items():
            text = text.replace(long, short)
        if language == "python":
            exec(compile(text, str(document), "exec"), namespace)
        elif language == "sh":
            for words in commands(text):
                if words[0] in ("vtok", "torchrun"):
                    after(words, run(*words))


def run(program: str, *arguments: str, code: int = 0) -> str:
    """The output of ``vtok`` or ``torchrun`` of this environment, which must end with this exit code."""
    module = {"vtok": "vtok", "torchrun": "torch.distributed.run"}[program]
    shown = shlex.join([program, *arguments])
    print(f"$ {shown}", flush=True)
    paths = [str(path) for word in arguments for path in _expanded(word)]
    done = subprocess.run([sys.executable, "-m", module, *paths], capture_output=True, text=True)
    print(done.stdout, flush=True)
    if done.returncode != code:
        raise RuntimeError(f"{shown} ended with code {done.returncode}: {done.stderr}")
    return done.stdout


def _expanded(word: str) -> list[str]:
    """The files that match a pattern, as a shell would list them."""
    found = sorted(map(str, Path().glob(word))) if "*" in word and not word.startswith("-") else []
    return found or [word]


if __name__ == "__main__":
    follow(Path(sys.argv[1]))
