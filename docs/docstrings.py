"""Docstrings in Markdown: an extension of griffe, which reads the API for the site.

Roles such as ``:func:`restore``` become code, and links where the name is documented. Doctest examples become
code blocks, and reStructuredText tables become Markdown tables.
The comment behind a field describes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from griffe import Attribute, Class, Docstring, Extension, Module, Object

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):`(?:(?P<label>[^`<]+) <)?~?(?P<target>[\w.]+)>?`")
# The names of the public API: those of its packages, not the packages themselves, nor deeper modules.
PACKAGES = "ops|reduce|layers|models|explain|data|tasks|train|predict|bench"
PUBLIC = re.compile(rf"visualtokens\.(?:(?:{PACKAGES})\.|(?!(?:{PACKAGES})$))\w+(?:\.of)?")
EXAMPLE = re.compile(r"(?:^ *(?:>>>|\.\.\.) .*\n?)+", re.MULTILINE)
COMMENT = re.compile(r"  # (?!type:|noqa)(.*)\s*$")
BORDER = r"^=+ +=+[= ]*\n"
TABLE = re.compile(rf"{BORDER}(?P<rows>(?:(?!=).*\n)+?){BORDER.removesuffix(chr(92) + 'n')}$", re.MULTILINE)


def to_markdown(text: str) -> str:
    """The docstring with roles, examples and tables in Markdown."""
    text = TABLE.sub(_table, text)
    text = EXAMPLE.sub(_example, text)
    return ROLE.sub(_role, text)


def _role(found: re.Match[str]) -> str:
    target = found["target"]
    short = target if re.fullmatch(rf"visualtokens\.({PACKAGES})", target) else target.rpartition(".")[2]
    code = f"`{found['label'] or short}`"
    return f"[{code}][{target}]" if PUBLIC.fullmatch(target) else code


def _example(found: re.Match[str]) -> str:
    lines = [re.sub(r"^ *(>>>|\.\.\.) ", "", line) for line in found[0].splitlines()]
    return "\n```python\n" + "\n".join(lines) + "\n```\n"


def _table(found: re.Match[str]) -> str:
    rows = [re.split(r" {2,}", line.strip(), maxsplit=1) for line in found["rows"].splitlines()]
    return "\n".join(["| | |", "|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def sentence(comment: str) -> str:
    """The comment behind a field with a capital letter, and its shape as code."""
    text = re.sub(r"^(\([\w, ·×+−/]+\))", r"`\1`", comment.strip())
    return text[0].upper() + text[1:]


class Markdown(Extension):
    """Rewrites every docstring."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of one object; a constant without one has its comment."""
        if isinstance(obj, Attribute) and not obj.docstring and isinstance(obj.parent, Module):
            if comment := COMMENT.search(obj.source):
                obj.docstring = Docstring(sentence(comment[1]) + ".", parent=obj)
        elif obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        """Add a table of the fields of a class that have comments."""
        rows = [
            f"| `{name}` | {sentence(comment[1])} |"
            for name, field in cls.attributes.items()
            if not field.docstring
            and "property" not in field.labels
            and (comment := COMMENT.search(field.source))
        ]
        if rows:
            text = cls.docstring.value if cls.docstring else ""
            table = "\n".join(["| field | |", "|---|---|", *rows])
            cls.docstring = Docstring(f"{text}\n\n{table}".strip(), parent=cls)

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """List functions first, then classes, then constants."""
        for module in _modules(pkg):
            if module.exports:
                module.exports = sorted(
                    map(str, module.exports), key=lambda n: (n.isupper(), n[0].isupper(), n)
                )


def _modules(module: Module) -> Iterator[Module]:
    yield module
    for each in module.modules.values():
        if isinstance(each, Module):
            yield from _modules(each)
