"""Verdicts on published rows, and the page written from the results."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from visualtokens.papers import Row, published, table, verdicts
from visualtokens.papers.verdicts import verdict_for
from visualtokens.studies.results import load_results

ROOT = Path(__file__).parents[2]
CSV = """paper,table,rows,metric,study,claim,verdict,difference,seeds
visual-transformers,3,vt_r18 tokenizer=filter;vt_r18 tokenizer=pool,accuracy,vt-tokenizers,A.,undecided,+0.1,3
visual-transformers,3,,accuracy,vt-tokenizers,B.,confirmed at small scale,+2.0,3
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """docs/studies.py."""
    spec = importlib.util.spec_from_file_location("studies_page", ROOT / "docs" / "studies.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_and_verdicts_are_up_to_date(script: ModuleType) -> None:
    found = load_results(script.RESULTS)
    assert script.PAGE.read_text("utf-8") == script.page(found), "run: python docs/studies.py"
    assert script.VERDICTS.read_text("utf-8") == script.verdicts_csv(found), "run: python docs/studies.py"


def _lines(rows: list[Row]) -> list[str]:
    """The lines of the table below its title and header."""
    return table(rows).splitlines()[2 : 2 + len(rows)]


def test_verdicts_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = published("visual-transformers", "3")
    (tmp_path / verdicts.FILE).write_text(CSV)
    monkeypatch.setattr(verdicts.resources, "files", lambda package: tmp_path)
    verdicts._read.cache_clear()
    try:
        assert [each.claim for each in verdict_for("visual-transformers", "3")] == ["A.", "B."]
        (one,) = verdict_for("visual-transformers", "3", "vt_r18", "tokenizer=pool")
        assert (one.claim, one.verdict, one.seeds) == ("A.", "undecided", 3)
        assert verdict_for("visual-transformers", "3", "vt_r18", "tokenizer=cluster") == []
        assert verdict_for("paca-vit", "3") == []
        rows = [Row(figure, None) for figure in figures if not figure.is_cost and figure.model == "vt_r18"]
        shown = {
            row.published.variant: line.endswith("undecided")
            for row, line in zip(rows, _lines(rows), strict=True)
        }
        assert shown == {"tokenizer=pool": True, "tokenizer=cluster": False, "tokenizer=filter": True}
    finally:
        verdicts._read.cache_clear()
