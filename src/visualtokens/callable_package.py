"""Callable packages: ``visualtokens.reduce(model)`` as well as ``visualtokens.reduce.macs``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(package: str, function: Callable[..., Any]) -> None:
    """Make the imported ``package`` callable: calls are forwarded to ``function``."""
    module = sys.modules[package]
    module.__class__ = type(
        "CallablePackage", (ModuleType,), {"__call__": staticmethod(function), "__doc__": module.__doc__}
    )
    vars(module)["__signature__"] = inspect.signature(function)
