"""Settings of all tests."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from hypothesis import settings

# No test depends on the clock, which a busy machine stretches, or on chance.
settings.register_profile("visualtokens", deadline=None, derandomize=True)
settings.load_profile("visualtokens")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape file names that are not UTF-8 in the captured output: pytest-xdist cannot send them."""
    report = yield
    report.sections = [
        (title, text.encode("utf-8", "backslashreplace").decode()) for title, text in report.sections
    ]
    return report
