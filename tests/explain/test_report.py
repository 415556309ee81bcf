from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from visualtokens.errors import UserError
from visualtokens.explain import Layer
from visualtokens.report import Report, Sample, report_page, write_report

from .stubs import explanation

VOID = {"meta", "img", "br", "hr"}
NASTY = '<b>"bold" & \'co\'</b><script src="https://x.org/x.js">'


class Page(HTMLParser):
    """Checks that every tag is closed in order, and keeps what is looked at below."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)

    def find(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def full_report(name: str = "cat") -> Report:
    classes = ("zero", name, "two")
    return Report(
        title=f"A report on {name}",
        summary=[("Accuracy", "97.5 %", f"of {name}"), (name, name, name)],
        history=[
            dict(epoch=e, loss=2 / e, train_accuracy=1 - 0.5 / e, accuracy=0.9 - 0.5 / e) for e in range(1, 6)
        ],
        confusion=np.array([[9, 1, 0], [0, 7, 0], [0, 2, 8]]),
        classes=classes,
        samples=[
            Sample(explanation(), 1, f"{name}.jpg"),
            Sample(explanation(), 2),
            Sample(explanation(target=0)),
        ],
        notes=[f"About {name}."],
        command=f"vtok demo --x={name}",
    )


def written(tmp_path: Path, report: Report) -> str:
    return write_report(tmp_path / "new" / "r.html", report).read_text(encoding="utf-8")


def check_self_contained(text: str) -> Page:
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert page.find("html")[0]["lang"] == "en"
    assert len(page.find("title")) == len(page.find("h1")) == 1
    assert {a.get("name") for a in page.find("meta")} >= {"viewport", "color-scheme"}
    assert not page.find("script")
    assert not page.find("link")
    assert not page.find("iframe")
    assert "@import" not in text
    assert "url(" not in text
    for tag, attrs in page.tags:
        for key, value in attrs.items():
            assert not key.startswith("on")
            if key in ("src", "href", "srcset", "data"):
                assert value is not None
                assert value.startswith("data:image/"), (tag, value[:80])
    for img in page.find("img"):
        assert img["alt"]
    return page


def test_the_report_needs_nothing_but_itself(tmp_path: Path) -> None:
    text = written(tmp_path, full_report())
    page = check_self_contained(text)
    assert not re.search(r"https?://", text)
    assert len(page.find("img")) == 3 * (1 + 3)
    assert len(page.find("svg")) == 2


def test_every_section_says_how_to_read_it(tmp_path: Path) -> None:
    page = Page(written(tmp_path, full_report()))
    headings = len(page.find("h2"))
    assert headings == 5
    assert len([a for a in page.find("p") if a.get("class") == "intro"]) == headings


def test_text_of_the_user_is_only_ever_text(tmp_path: Path) -> None:
    text = written(tmp_path, full_report(NASTY))
    page = check_self_contained(text)
    assert text.count("<script") == 0
    assert (
        text.count("<b>") == text.count("</b>") == 3 * 4
    )  # ours: a probability and three drops for each sample
    shown = "".join(page.text)
    assert shown.count(NASTY) >= 9  # title, headline, summary, matrix (twice), verdicts, note, command
    assert f"{NASTY}.jpg, taken for {NASTY}" in [img["alt"] for img in page.find("img")]


def test_an_explanation_is_saved_with_the_same_care(tmp_path: Path) -> None:
    path = explanation(classes=("zero", NASTY, "two")).save(tmp_path / "x.html")
    page = check_self_contained(path.read_text(encoding="utf-8"))
    assert len(page.find("img")) == 4
    assert f"Why “{NASTY}”?" in "".join(page.text)


def test_a_page_shows_who_reads_the_clusters_and_what_tokens_stand_for(tmp_path: Path) -> None:
    layers = (
        Layer("blocks.0.tap", "hard", 4, np.arange(4).reshape(2, 2)),
        Layer("blocks.1.tap", "hard", 2, np.array([[0, 0], [1, -1]])),
    )
    plain, full = explanation(), explanation(attention=explanation().maps, layers=layers, form="hard")
    pages = [Page(one.save(tmp_path / "x.html").read_text(encoding="utf-8")) for one in (plain, full)]
    assert len(pages[0].find("img")) == 1 + 3
    assert len(pages[1].find("img")) == 1 + 3 + 3 + 2
    assert "blocks.1: 2 tokens for 4 patches, 1 dropped" in [img["alt"] for img in pages[1].find("img")]
    assert "Who reads them" in pages[1].text
    assert full.about in pages[1].text


def test_clusters_come_in_order_with_their_numbers() -> None:
    text = report_page(full_report())
    card = text[text.index('<article class="sample">') : text.index("</article>")]
    assert re.findall(r"<b>([^<]*)</b>(\w[^<]*)<", card) == [
        ("−0.42", "drop in probability"),
        ("−0.02", "drop in probability"),
        ("0.00", "hardly any change"),
    ]
    assert re.findall(r'alt="Cluster (\d)', card) == ["1", "0", "3"]
    assert 'style="width: 43.0%"></i><i class="lost" style="width: 42.0%"' in card


def test_a_rise_is_told_from_a_drop() -> None:
    text = report_page(Report("x", samples=[Sample(explanation(order=(2, 0, 1, 3)))]))
    assert "<b>+0.05</b>rise in probability" in text
    assert 'style="width: 85.0%"></i><i class="gained" style="width: 5.0%"' in text


def test_verdicts() -> None:
    verdicts = re.findall(r'<div class="verdict">(.*?)</div>', report_page(full_report()), flags=re.DOTALL)
    assert "✓ right" in verdicts[0]
    assert "cat.jpg" in verdicts[0]
    assert "✗ wrong: it is two" in verdicts[1]
    assert not {"✓", "✗"} & set(verdicts[2])
    assert "whether it is right is not known" in verdicts[2]
    assert "wrong" not in verdicts[2]
    assert "explained: zero" in verdicts[2]


def test_names_of_the_explanation_win_over_those_of_the_report() -> None:
    sample = Sample(explanation(classes=("x", "own name", "z")))
    text = report_page(Report("t", classes=("a", "report name", "c"), samples=[sample]))
    assert "own name" in text
    assert "report name" not in text


def test_what_is_empty_is_left_out() -> None:
    page = Page(report_page(Report("Only a title")))
    assert "".join(page.text).split() == ["Only", "a", "title", "Only", "a", "title"]


def test_a_history_with_holes() -> None:
    history = [
        dict(epoch=1, loss=float("nan"), accuracy=0.5),
        dict(epoch=2, loss=1.0),
        dict(epoch=3, accuracy=0.7),
    ]
    text = report_page(Report("t", history=history))
    Page(text)
    assert [len(points.split()) for points in re.findall(r'points="([^"]*)"', text)] == [1, 2]
    assert "nan" not in text[text.index("<svg") :]


def test_a_report_is_html(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"r\.pdf.*\.html"):
        write_report(tmp_path / "r.pdf", full_report())
