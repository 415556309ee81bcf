"""The token view in a browser."""

from __future__ import annotations

import io
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from visualtokens.explain import Layer
from visualtokens.explain.view import token_view, view_document, view_frame

from ..explain.stubs import explanation
from .conftest import OpenPage, playwright

SIDE = 80
BOX = (0.0, 0.0, float(SIDE), float(SIDE))
PATCHES = np.arange(16).reshape(4, 4)
MERGED = np.array([[0, 0, 1, 1], [0, 2, 2, 1], [3, 2, 2, 4], [3, 3, 4, 4]])
DROPPED = np.array([[0, 0, 1, 1], [0, 0, -1, 1], [0, 0, 1, 1], [0, 0, 1, 1]])
LAYERS = [
    Layer("blocks.0.reduction.tap", "hard", 16, PATCHES),
    Layer("blocks.1.reduction.tap", "hard", 5, MERGED),
    Layer("blocks.2.reduction.tap", "hard", 2, DROPPED),
]
NARROW_WIDTHS, WIDE_WIDTHS = (360, 503, 504, 700), (784, 1180)


def photo() -> Image.Image:
    """One colour per patch, with some texture."""
    rng = np.random.default_rng(0)
    cells = np.kron(rng.integers(40, 220, (4, 4, 3)), np.ones((SIDE // 4, SIDE // 4, 1)))
    return Image.fromarray((cells + rng.integers(-15, 15, cells.shape)).astype(np.uint8))


def document(**options: object) -> str:
    return view_document(photo(), **(dict(layers=LAYERS, box=BOX) | options))  # type: ignore[arg-type]


def centre(page: playwright.Page, row: int, column: int, *, cells: int = 4) -> dict[str, float]:
    """The middle of a patch, relative to the grid."""
    box = page.locator(".tv-grid").first.bounding_box()
    return dict(x=(column + 0.5) * box["width"] / cells, y=(row + 0.5) * box["height"] / cells)


def hover(page: playwright.Page, row: int, column: int) -> None:
    page.locator(".tv-grid").first.hover(position=centre(page, row, column))


def status(page: playwright.Page) -> str:
    return page.locator(".tv-status").first.inner_text()


def expect_status(page: playwright.Page, text: str) -> None:
    playwright.expect(page.locator(".tv-status").first).to_have_text(text)


def settle(page: playwright.Page) -> None:
    """Wait until what changed is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def drawn(page: playwright.Page, selector: str = ".tv-canvas") -> np.ndarray:
    """``(4, 4, 4)``: the RGBA values beside the middle of each patch, away from all lines."""
    settle(page)
    values = page.locator(selector).first.evaluate(
        """(canvas) => {
            const at = (i) => Math.floor((i + 0.42) / 4 * canvas.width);
            const read = (y, x) => [...canvas.getContext("2d").getImageData(at(x), at(y), 1, 1).data];
            return [0, 1, 2, 3].map((y) => [0, 1, 2, 3].map((x) => read(y, x)));
        }"""
    )
    return np.array(values)


def notes(page: playwright.Page) -> list[str]:
    settle(page)
    return page.locator(".tv-strip small").all_inner_texts()


def test_pointing_at_a_patch_lights_its_token_in_every_layer(open_page: OpenPage) -> None:
    page = open_page(document())
    expect_status(page, "Layer 2 of 3: 5 tokens for 16 patches")
    assert notes(page) == ["16 tokens", "5 tokens", "2 tokens"]
    assert not drawn(page)[..., 3].any()  # the photo below is not covered
    for row, column in ((1, 1), (3, 0)):
        hover(page, row, column)
        token = MERGED[row, column]
        size = (token == MERGED).sum()
        expect_status(page, f"Layer 2 of 3: token {token + 1} of 5, {size} patches")
        assert notes(page) == ["1 patch", f"{size} patches", f"{(DROPPED == 0).sum()} patches"]
        np.testing.assert_array_equal(drawn(page)[..., 3] == 0, token == MERGED)
    page.mouse.move(1, 1)
    expect_status(page, "Layer 2 of 3: 5 tokens for 16 patches")


def test_small_multiples_choose_the_layer_and_light_patches_too(open_page: OpenPage) -> None:
    page = open_page(document())
    third = page.locator(".tv-strip button").nth(2)
    third.click(position=dict(x=3, y=3))  # points at the first patch
    expect_status(page, "Layer 3 of 3: token 1 of 2, 8 patches")
    settle(page)
    assert third.get_attribute("aria-pressed") == "true"
    hover(page, 1, 2)
    expect_status(page, "Layer 3 of 3: dropped, no token represents this patch")
    assert notes(page)[2] == "dropped"


def test_taps_keep_a_patch_lit_on_a_phone(open_page: OpenPage) -> None:
    page = open_page(
        document(caption="A caption that is much too long for one line of a telephone"), phone=True
    )
    grid = page.locator(".tv-grid")
    grid.tap(position=centre(page, 2, 2))
    expect_status(page, "Layer 2 of 3: token 3 of 5, 4 patches")
    page.locator(".tv-play").tap()
    page.locator(".tv-play").tap()
    expect_status(page, "Layer 2 of 3: token 3 of 5, 4 patches")
    grid.tap(position=centre(page, 2, 2))
    expect_status(page, "Layer 2 of 3: 5 tokens for 16 patches")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    for control in page.locator(".tv-controls button, .tv-controls label, .tv-strip button").all():
        box = control.bounding_box()
        assert min(box["width"], box["height"]) >= 40


def test_keyboard_only(open_page: OpenPage) -> None:
    page = open_page(document())
    press = page.keyboard.press
    press("Tab")
    expect_status(page, "Layer 2 of 3: token 3 of 5, 4 patches")  # patch (2, 2), in the middle
    for key, (row, column) in (("ArrowUp", (1, 2)), ("ArrowRight", (1, 3)), ("ArrowRight", (1, 3))):
        press(key)
        token = MERGED[row, column]
        assert status(page).startswith(f"Layer 2 of 3: token {token + 1} of 5")
    press("ArrowLeft")
    press("PageDown")
    expect_status(page, "Layer 3 of 3: dropped, no token represents this patch")
    press("ArrowDown")
    expect_status(page, "Layer 3 of 3: token 2 of 2, 7 patches")
    press("[")
    press("PageUp")
    press("PageUp")
    expect_status(page, f"Layer 1 of 3: token {PATCHES[2, 2] + 1} of 16, 1 patch")
    press("]")
    press("Escape")
    expect_status(page, "Layer 2 of 3: 5 tokens for 16 patches")
    press(" ")
    assert "Pause" in page.locator(".tv-play").inner_text()
    press(" ")
    assert "Play" in page.locator(".tv-play").inner_text()
    focused = "document.activeElement.className || document.activeElement.ariaLabel"
    order = []
    for _ in range(8):
        press("Tab")
        order.append(page.evaluate(focused))
    names = [f"Layer {i}: blocks.{i - 1}, {layer.tokens} tokens" for i, layer in enumerate(LAYERS, start=1)]
    assert order == ["tv-play", "tv-slider", "tv-fill", "tv-png", "tv-svg", *names]


def test_playing_goes_through_the_layers_and_stops(open_page: OpenPage) -> None:
    page = open_page(document(), reduced_motion=True)
    page.clock.install()
    page.locator(".tv-slider").fill("3")
    play = page.locator(".tv-play")
    play.click()
    seen = [status(page)]
    for _ in range(3):
        page.clock.run_for(1000)
        seen.append(status(page))
    assert [text.split(":")[0] for text in seen] == [f"Layer {i} of 3" for i in (1, 2, 3, 3)]
    assert "Play" in play.inner_text()


@pytest.mark.parametrize("reduced_motion", [True, False])
def test_layers_fade_unless_motion_is_reduced(open_page: OpenPage, reduced_motion: bool) -> None:
    page = open_page(document(), reduced_motion=reduced_motion)
    page.locator(".tv-grid").focus()
    canvases = page.evaluate(
        """() => {
            document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "]", bubbles: true }));
            return document.querySelectorAll(".tv-grid canvas").length;
        }"""
    )
    assert canvases == (1 if reduced_motion else 2)
    playwright.expect(page.locator(".tv-grid canvas")).to_have_count(1)


def test_a_mosaic_has_the_mean_colour_of_each_token(open_page: OpenPage) -> None:
    page = open_page(document())
    page.locator(".tv-fill").check()
    pixels = np.asarray(photo(), dtype=float)
    labels = np.kron(MERGED, np.ones((SIDE // 4, SIDE // 4), dtype=int))
    means = np.stack([pixels[labels == token].mean(0) for token in range(5)])
    got = drawn(page)
    assert (got[..., 3] == 255).all()
    np.testing.assert_allclose(got[..., :3], means[MERGED], atol=3)  # the photo is a JPEG
    page.locator(".tv-slider").fill("3")
    page.wait_for_function("document.querySelectorAll('.tv-grid canvas').length === 1")
    assert drawn(page)[1, 2, 3] < 255  # a dropped patch


def test_a_soft_cluster_is_lit_by_its_weights(open_page: OpenPage) -> None:
    weights = np.zeros((2, 4, 4), dtype=np.uint8)
    weights[0] = np.arange(16).reshape(4, 4) * 17
    weights[1] = 255 - weights[0]
    soft = Layer("stages.0.attn.tap", "soft", 2, weights.argmax(0), weights)
    page = open_page(document(layers=[soft]))
    expect_status(page, "2 clusters for 16 patches")
    assert not page.locator(".tv-strip, .tv-play:visible, .tv-slider:visible").count()
    hover(page, 3, 3)
    expect_status(page, "Cluster 1 of 2, strongest on 8 patches")
    opacity = drawn(page)[..., 3]
    assert opacity[0, 0] > opacity[1, 1] > opacity[2, 2] > opacity[3, 3]
    hover(page, 0, 0)
    assert drawn(page)[0, 0, 3] < drawn(page)[3, 3, 3]


def test_downloads(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(document())
    page.locator(".tv-grid").click(position=centre(page, 1, 1))
    with page.expect_download() as got:
        page.locator(".tv-png").click()
    assert got.value.suggested_filename == "tokens-layer-2.png"
    picture = Image.open(io.BytesIO(Path(got.value.path()).read_bytes())).convert("RGB")
    assert picture.size == (1280, 1280)
    lit, shaded = (np.array(picture.getpixel((int((x + 0.4) * 320), 480))) for x in (2, 0))
    original = np.asarray(photo(), dtype=float)
    np.testing.assert_allclose(lit, original[20:40, 40:60].mean((0, 1)), atol=25)
    assert (shaded < original[20:40, :20].mean((0, 1)) - 15).all()
    with page.expect_download() as got:
        page.locator(".tv-svg").click()
    root = ElementTree.fromstring(Path(got.value.path()).read_text("utf-8"))
    space = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{space}image").attrib["href"].startswith("data:image/jpeg")  # type: ignore[union-attr]
    cells = root.findall(f"{space}g/{space}path")
    assert len(cells) == 16
    light = [float(cell.attrib["fill-opacity"]) == 0 for cell in cells]
    assert light == (MERGED == 2).ravel().tolist()


def test_two_views_do_not_disturb_each_other(open_page: OpenPage) -> None:
    first, second = (token_view(photo(), LAYERS[:n], box=BOX, caption=f"{n} layers") for n in (3, 2))
    page = open_page(f"<!doctype html><html lang='en'><body>{first}{second}</body></html>")
    hover(page, 1, 1)
    expect_status(page, "Layer 2 of 3: token 3 of 5, 4 patches")
    other = page.locator(".tv-status").nth(1)
    playwright.expect(other).to_have_text("Layer 2 of 2: 5 tokens for 16 patches")
    page.locator(".tv-slider").nth(1).fill("1")
    playwright.expect(other).to_have_text("Layer 1 of 2: 16 tokens for 16 patches")
    assert page.locator(".tv-slider").first.input_value() == "2"


def contrast(first: str, second: str) -> float:
    """WCAG 2: (L1 + 0.05) / (L2 + 0.05) of two CSS colours."""

    def luminance(colour: str) -> float:
        shares = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
        linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_texts_are_legible(open_page: OpenPage, dark: bool) -> None:
    page = open_page(document(caption="A photo"), dark=dark)
    pairs = page.evaluate(
        """() => [...document.querySelectorAll(
            ".tv-caption, .tv-status, .tv-name, .tv-help, .tv-controls :is(button, label), .tv-strip small"
        )].map((element) => {
            const colour = getComputedStyle(element).color;
            const fill = (one) => getComputedStyle(one).backgroundColor;
            let behind = element;
            while (fill(behind) === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
            return [element.className, colour, fill(behind)];
        })"""
    )
    assert len(pairs) >= 10
    for name, text, background in pairs:
        assert contrast(text, background) >= 4.5, name
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (contrast(background, "rgb(0, 0, 0)") < 2) == dark


def test_a_frame_works_in_its_sandbox_and_is_tall_enough(open_page: OpenPage) -> None:
    framed = view_frame(photo(), LAYERS * 4, box=BOX, caption="Twelve layers")
    page = open_page(f"<!doctype html><html lang='en'><body style='margin: 0'>{framed}</body></html>")
    inside = page.frame_locator("iframe")
    inside.locator(".tv-grid").hover(position=dict(x=5, y=5))
    playwright.expect(inside.locator(".tv-status")).to_have_text("Layer 7 of 12: token 1 of 16, 1 patch")
    with page.expect_download():
        inside.locator(".tv-png").click()
    for width in (*NARROW_WIDTHS, *WIDE_WIDTHS):
        page.set_viewport_size(dict(width=width, height=800))
        height = page.locator("iframe").bounding_box()["height"]
        content = inside.locator("main").bounding_box()["height"]
        assert content <= height <= content + 180, width


@pytest.mark.parametrize("method", ["shapley", "cluster"])
def test_an_explanation_in_a_notebook(open_page: OpenPage, method: str) -> None:
    one = explanation(
        method=method, form="soft" if method == "cluster" else "hard", image=photo(), crop_box=BOX
    )
    page = open_page(
        f"<!doctype html><html lang='en'><body style='margin: 0'>{one._repr_html_()}</body></html>"
    )
    inside = page.frame_locator("iframe")
    inside.locator(".tv-grid").hover(position=dict(x=5, y=5))
    noun = {"shapley": "Region 1 of 4, 1 patch", "cluster": "Cluster 1 of 4, strongest on 1 patch"}[method]
    playwright.expect(inside.locator(".tv-status")).to_have_text(noun)
    for width in (*NARROW_WIDTHS, *WIDE_WIDTHS):
        page.set_viewport_size(dict(width=width, height=800))
        height = page.locator("iframe").bounding_box()["height"]
        assert inside.locator("main").bounding_box()["height"] <= height, width


def test_hostile_texts_run_nothing(open_page: OpenPage) -> None:
    hostile = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\"'&lt;"
    layers = [Layer(hostile, "hard", 5, MERGED), LAYERS[0]]
    page = open_page(document(layers=layers, caption=hostile, noun="token"))
    page.locator(".tv-slider").fill("1")
    expect_status(page, "Layer 1 of 2: 5 tokens for 16 patches")
    assert page.locator(".tv-name").inner_text() == page.locator(".tv-caption").inner_text() == hostile
    assert page.evaluate("window.hacked") is None
    assert page.title() == hostile


def test_a_page_without_scripts_has_the_pictures(open_page: OpenPage, tmp_path: Path) -> None:
    one = explanation(method="shapley", form="hard", layers=tuple(LAYERS), image=photo(), crop_box=BOX)
    text = one.save(tmp_path / "x.html", interactive=True).read_text("utf-8")
    page = open_page(text, scripts=False)
    assert page.locator(".strip img:visible").count() == 3
    assert not page.locator(".token-view").is_visible()
    page = open_page(text)
    assert page.locator(".token-view").is_visible()
    assert not page.locator(".strip img").count()
