"""The studio as a person uses it, in a real browser: every tab, desktop and phone, and by keyboard alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")
sync_api = pytest.importorskip("playwright.sync_api")
Axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe

from tests.studio.conftest import Running, checkpoints, studio  # noqa: E402, F401
from tests.studio.test_server import bad_files, photo  # noqa: E402

expect = sync_api.expect
Open = Callable[..., Any]
PATIENCE = 60_000  # milliseconds: a busy machine is slow


@pytest.fixture
def give(tmp_path: Path) -> Callable[[Any], None]:
    """Upload a photo and wait for the answer."""

    def upload(page: Any) -> None:
        page.locator("input[type=file]").first.set_input_files(photo(tmp_path / "photo.png", size=(300, 220)))
        expect(page.locator("#answer li")).to_have_count(5, timeout=PATIENCE)

    return upload


@pytest.mark.parametrize("phone", [False, True], ids=["desktop", "phone"])
def test_every_tab(studio: Running, open_page: Open, give: Callable[[Any], None], phone: bool) -> None:  # noqa: F811
    page = open_page(studio.url, phone=phone)
    give(page)
    # Look: the tokens light up under the pointer, in every layer.
    view = page.frame_locator("#tokens iframe")
    expect(view.locator(".tv-strip button").first).to_be_visible(timeout=PATIENCE)
    # Why: ranked regions, then only some of them.
    page.get_by_role("tab", name="Why").click()
    page.get_by_role("button", name="Explain", exact=True).click()
    explanation = page.frame_locator("#explanation iframe")
    expect(explanation.locator(".bars li").first).to_be_visible(timeout=PATIENCE)
    expect(page.locator("#variants figcaption")).to_have_count(2, timeout=PATIENCE)
    before = page.locator("#variants figcaption").first.inner_text()
    page.get_by_role("checkbox", name="1", exact=True).uncheck()
    expect(page.locator("#variants figcaption").first).not_to_have_text(before, timeout=PATIENCE)
    # Faster: answer, measured speed, curve, code.
    page.get_by_role("tab", name="Faster").click()
    expect(page.locator("#facts")).to_contain_text("speed-up, measured here", timeout=PATIENCE)
    expect(page.locator("#curve svg")).to_contain_text("you are here", timeout=PATIENCE)
    expect(page.locator("#mosaic figure")).to_have_count(2)
    page.get_by_role("button", name=re.compile("The same in Python")).click()
    expect(page.get_by_text("visualtokens.reduce(model, 'weighted_merge'")).to_be_visible()
    # Compare: the whole model and a reduced one.
    page.get_by_role("tab", name="Compare").click()
    page.locator("#compare-photo").click()
    for side in ("#left", "#right"):
        expect(page.locator(f"{side} li")).to_have_count(5, timeout=PATIENCE)
    left, right = (page.locator(side).bounding_box() for side in ("#left", "#right"))
    assert right["y"] >= left["y"] + left["height"] if phone else right["x"] >= left["x"] + left["width"]
    width = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert width[0] <= width[1], "the page scrolls sideways"


def test_by_keyboard_alone(studio: Running, open_page: Open, give: Callable[[Any], None]) -> None:  # noqa: F811
    page = open_page(studio.url)
    give(page)  # choosing a file is the browser's own dialogue
    tab = page.get_by_role("tab", name="Look")
    tab.focus()
    page.keyboard.press("Tab")
    for _ in range(12):
        if page.evaluate("document.activeElement.textContent.trim()") == "Faster":
            break
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "tab"
    page.keyboard.press("Enter")
    expect(page.locator("#facts")).to_contain_text("multiply-adds", timeout=PATIENCE)
    first = page.locator("#facts").inner_text()
    page.locator("#budget input[type=range]").focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    expect(page.locator("#facts")).not_to_have_text(first, timeout=PATIENCE)


def test_a_bad_file_gets_a_sentence(studio: Running, open_page: Open, tmp_path: Path) -> None:  # noqa: F811
    page = open_page(studio.url)
    page.locator("input[type=file]").first.set_input_files(bad_files(tmp_path)["text"])
    alert = page.get_by_text(re.compile("Cannot read text.jpg"))
    expect(alert).to_be_visible(timeout=PATIENCE)


def test_what_cannot_be_reduced_gets_a_sentence(
    studio: Running,  # noqa: F811
    open_page: Open,
    give: Callable[[Any], None],
) -> None:
    page = open_page(studio.url)
    page.get_by_role("tab", name="Faster").click()
    expect(page.locator("#facts")).to_contain_text("Give a photo first", timeout=PATIENCE)
    give(page)
    page.get_by_role("combobox", name="Model", exact=True).click()
    page.get_by_role("option", name="paca").click()
    page.get_by_role("tab", name="Look").click()
    page.get_by_role("tab", name="Faster").click()
    expect(page.locator("#facts")).to_contain_text("there is nothing to reduce", timeout=PATIENCE)


def test_a_folder_becomes_a_table(studio: Running, open_page: Open, tmp_path: Path) -> None:  # noqa: F811
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(3):
        photo(folder / f"{i}.png", i)
    (folder / "note.jpg").write_text("no photo")
    page = open_page(studio.url)
    page.get_by_role("tab", name="Compare").click()
    page.locator("#folder input[type=file]").set_input_files(folder)
    page.locator("#compare-folder").click()
    expect(page.locator("#table")).to_contain_text("Cannot read note.jpg", timeout=PATIENCE)
    expect(page.locator("#table")).to_contain_text("2.png")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_labels_contrast_and_structure(
    studio: Running,  # noqa: F811
    open_page: Open,
    give: Callable[[Any], None],
    dark: bool,
) -> None:
    """The rules of axe-core on every tab, with its results."""
    page = open_page(studio.url, dark=dark)
    give(page)
    shown = {
        "Look": "#tokens iframe",
        "Why": "#explanation iframe",
        "Faster": "#curve svg",
        "Compare": "#right li",
    }
    buttons = {"Why": "#explain", "Compare": "#compare-photo"}
    for tab, result in shown.items():
        page.get_by_role("tab", name=tab).click()
        if tab in buttons:
            page.locator(buttons[tab]).click()
        expect(page.locator(result).first).to_be_visible(timeout=PATIENCE)
        expect(page.locator(".pending")).to_have_count(0, timeout=PATIENCE)  # results that are faded
        page.wait_for_timeout(500)  # colours change gradually
        found = [
            (rule["id"], node["target"], node["html"])
            for rule in Axe().run(page).response["violations"]
            for node in rule["nodes"]
        ]
        assert not found, tab
