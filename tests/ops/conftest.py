from __future__ import annotations

from collections.abc import Iterator

import pytest

from visualtokens.ops import set_checks


@pytest.fixture
def checks_on() -> Iterator[None]:
    before = set_checks(True)
    yield
    set_checks(before)


@pytest.fixture
def checks_off() -> Iterator[None]:
    before = set_checks(False)
    yield
    set_checks(before)
