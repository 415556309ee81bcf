from __future__ import annotations

from pathlib import Path

import pytest

from visualtokens import demo

from .explain.stubs import check_self_contained


def test_the_report_holds_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_images_per_second", lambda *_: 1234.0)  # takes seconds to measure
    result = demo.run(tmp_path, epochs=1, progress=False)
    page = check_self_contained(result.report.read_text(encoding="utf-8"))
    assert result.images == 360
    assert f"{result.accuracy:.1%}" in page.text
    assert "1,234" in page.text
    assert len(page.find("article")) == demo.SAMPLES
    assert any(line.startswith("✗") for line in page.text)  # after one epoch some are


@pytest.mark.slow
def test_the_model_learns_digits(tmp_path: Path) -> None:
    assert demo.run(tmp_path, progress=False).accuracy >= 0.985
