"""The demonstration writes its report; `make demo` shows that it also learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from visualtokens import demo


def test_report_holds_what_was_measured(tmp_path: Path) -> None:
    result = demo.run(tmp_path, epochs=1, progress=False)
    page = result.report.read_text()
    assert result.images == 360
    assert f"{result.accuracy:.1%}" in page
    assert page.count("drop in probability") + page.count("hardly any change") >= demo.SAMPLES
    assert "http" not in page.replace("http://www.w3.org/", "")  # nothing is loaded from elsewhere
    assert "http://www.w3.org/" in page or "<svg" in page


@pytest.mark.slow
def test_it_learns_digits(tmp_path: Path) -> None:
    assert demo.run(tmp_path, progress=False).accuracy >= 0.985
