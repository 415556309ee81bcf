from __future__ import annotations

import itertools
import re
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from visualtokens.errors import UserError
from visualtokens.explain import Layer, Origin
from visualtokens.explain.cards import card
from visualtokens.explain.html import file_name, style, write_page

from .stubs import Page, check_self_contained, explanation

INJECTION = '<b>"bold" & \'co\'</b><script src="https://x.org/x.js">'


def test_an_explanation_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    path = explanation(classes=("zero", INJECTION, "two")).save(tmp_path / "x.html")
    page = check_self_contained(path.read_text(encoding="utf-8"))
    assert len(page.find("img")) == 1 + 3
    assert f"Why “{INJECTION}”?" in "".join(page.text)
    assert not page.find("footer")


@pytest.mark.parametrize(
    ("changes", "question"),
    [
        (dict(truth=1), "Why “one”?"),
        (dict(truth=2), "Why “one” and not “two”?"),
        (dict(target=0, truth=2), "What speaks for “zero”?"),
    ],
)
def test_the_title_asks_what_the_page_answers(tmp_path: Path, changes: dict, question: str) -> None:
    path = explanation(classes=("zero", "one", "two"), **changes).save(tmp_path / "x.html")
    assert f"<title>{question}</title>" in path.read_text(encoding="utf-8")


def test_the_footer_has_what_is_known(tmp_path: Path) -> None:
    def shown(**parts: object) -> str:
        path = explanation().save(tmp_path / "x.html", origin=Origin(**parts))  # type: ignore[arg-type]
        text = path.read_text(encoding="utf-8")
        check_self_contained(text)
        return "|".join("".join(Page(text[text.rindex("<footer>") : text.index("</body>")]).text).split("\n"))

    assert shown(model="paca_vit_nano", date=date(2031, 2, 3)) == "||Model paca_vit_nano|2031-02-03|||"
    assert shown(checkpoint="run/best") == "||Checkpoint run/best|||"


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
    assert "✗ true class: two <b>0.10</b>" in card(explanation(classes=classes, truth=2))
    certain = np.array([0.0, 0.997, 0.003], dtype=np.float32)
    assert "two <b>&lt; 0.01</b>" in card(explanation(classes=classes, truth=2, probabilities=certain))
    unknown = card(explanation(classes=classes, target=0))
    assert not {"✓", "✗"} & set(unknown)
    assert "true class unknown" in unknown
    assert "explained class: zero (0.05)" in unknown


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a.png", ["a.png"]),
        ("great_pyrenees_0_104.jpg", ["great_", "pyrenees_", "0_", "104.jpg"]),
        ("DSC0001234567.JPG", ["DSC000123", "4567.JPG"]),
        ("val/pug-2/x.tiff", ["val/pug-2/", "x.tiff"]),
        ("validation/pug-2/x.tiff", ["validation/", "pug-", "2/", "x.tiff"]),
        ("photo.of_my_old_dog", ["photo.of_", "my_", "old_", "dog"]),
        ("no_extension", ["no_extension"]),
        ("two words_and_more_of_them", ["two words_", "and_", "more_", "of_", "them"]),
        (".jpg", [".jpg"]),
        ("<b>&_1.jpg", ["<b>&_", "1.jpg"]),
    ],
)
def test_file_names_wrap_outside_their_extension(name: str, parts: list[str]) -> None:
    text = file_name(name)
    assert [part for part in re.split(r"<wbr>|<span class=\"nowrap\">|</span>", text) if part] == [
        part.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") for part in parts
    ]
    assert "".join(Page(text).text) == name


# Contrast by WCAG 2: (L1 + 0.05) / (L2 + 0.05), L of sRGB.


def luminance(colour: tuple[float, ...]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def colours(scheme: str) -> dict[str, tuple[float, ...]]:
    """The variables of the style in one colour scheme."""
    light, dark = re.findall(r":root \{(.*?)\}", style(), re.DOTALL)[:2]
    found = dict(re.findall(r"--(\w+): (#\w{6}|\d+ \d+ \d+);", light + (dark if scheme == "dark" else "")))
    return {
        name: tuple(bytes.fromhex(value[1:])) if value[0] == "#" else tuple(map(int, value.split()))
        for name, value in found.items()
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(scheme: str) -> None:
    found = colours(scheme)
    for text, below in itertools.product(("ink", "soft", "right", "wrong"), ("page", "panel")):
        assert contrast(found[text], found[below]) >= 4.5, (text, below)
    shades = re.findall(r"rgb\(var\(--(\w+)\) / calc\(([.\d]+) \+ ([.\d]+) \* var\(--share\)\)\)", style())
    assert [name for name, *_ in shades] == ["right", "wrong"]
    for name, least, more in shades:
        for alpha in (float(least), float(least) + float(more)):
            mixed = tuple(
                alpha * c + (1 - alpha) * p for c, p in zip(found[name], found["page"], strict=True)
            )
            assert contrast(found["ink"], mixed) >= 4.5, (name, alpha)


def test_a_page_is_written_as_html_only(tmp_path: Path) -> None:
    assert write_page(tmp_path / "new" / "x.html", "é").read_text(encoding="utf-8") == "é"
    with pytest.raises(UserError, match=r"x\.pdf.*\.html"):
        write_page(tmp_path / "x.pdf", "")
