from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from visualtokens.errors import UserError
from visualtokens.explain import Layer
from visualtokens.explain.html import card, write_page

from .stubs import Page, check_self_contained, explanation

INJECTION = '<b>"bold" & \'co\'</b><script src="https://x.org/x.js">'


def test_an_explanation_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    path = explanation(classes=("zero", INJECTION, "two")).save(tmp_path / "x.html")
    page = check_self_contained(path.read_text(encoding="utf-8"))
    assert len(page.find("img")) == 1 + 3
    assert f"Why “{INJECTION}”?" in "".join(page.text)


def test_a_page_shows_attention_and_layers(tmp_path: Path) -> None:
    layers = (
        Layer("blocks.0.tap", "hard", 4, np.arange(4).reshape(2, 2)),
        Layer("blocks.1.tap", "hard", 2, np.array([[0, 0], [1, -1]])),
    )
    full = explanation(attention=explanation().maps, layers=layers, form="hard")
    page = Page(full.save(tmp_path / "x.html").read_text(encoding="utf-8"))
    assert len(page.find("img")) == 1 + 3 + 3 + 2
    assert "blocks.1: 2 tokens for 4 patches, 1 dropped" in [img["alt"] for img in page.find("img")]
    assert "Attention to the clusters" in page.text
    assert full.about in page.text
    headings = page.find("h2")
    assert len(headings) == 4
    assert len([a for a in page.find("p") if a.get("class") == "intro"]) == len(headings)


def test_clusters_are_sorted_and_labelled_with_their_change() -> None:
    text = card(explanation())
    assert re.findall(r"<b>([^<]*)</b>(\w[^<]*)<", text) == [
        ("−0.42", "drop in probability"),
        ("−0.02", "drop in probability"),
        ("0.00", "negligible change"),
    ]
    assert re.findall(r'alt="Cluster (\d)', text) == ["1", "0", "3"]
    assert 'style="width: 43.0%"></i><i class="lost" style="width: 42.0%"' in text


def test_a_rise_in_probability() -> None:
    text = card(explanation(order=(2, 0, 1, 3)))
    assert "<b>+0.05</b>rise in probability" in text
    assert 'style="width: 85.0%"></i><i class="gained" style="width: 5.0%"' in text


def test_the_prediction_and_its_true_class() -> None:
    classes = ("zero", "one", "two")
    assert "✓ correct" in card(explanation(classes=classes, truth=1), name="cat.jpg")
    assert "✗ true class: two" in card(explanation(classes=classes, truth=2))
    unknown = card(explanation(classes=classes, target=0))
    assert not {"✓", "✗"} & set(unknown)
    assert "true class unknown" in unknown
    assert "explained class: zero" in unknown


def test_a_page_is_written_as_html_only(tmp_path: Path) -> None:
    assert write_page(tmp_path / "new" / "x.html", "é").read_text(encoding="utf-8") == "é"
    with pytest.raises(UserError, match=r"x\.pdf.*\.html"):
        write_page(tmp_path / "x.pdf", "")
