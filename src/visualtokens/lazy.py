"""Names of a package that are imported on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package whose names live in other modules.

    ``names`` maps each name to ``"module:"``, which has the name, or to ``"module"``, which is the value.

    >>> __getattr__, __dir__ = lazy_names(__name__, {"TrainConfig": "visualtokens.train.config:"})
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, member, _ = names[name].partition(":")
        value = importlib.import_module(module)
        if member:
            value = getattr(value, name)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return get, listed
