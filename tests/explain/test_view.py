"""The HTML of the token view; tests/browser runs it."""

from __future__ import annotations

import base64
import io
import json
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visualtokens.errors import UserError
from visualtokens.explain import Layer
from visualtokens.explain.view import token_view, view_document, view_frame

from .stubs import Page, explanation, noise_image

HOSTILE = "</script><script>alert(1)</script><!-- \"'&"
HARD = Layer("blocks.0.reduction.tap", "hard", 3, np.array([[0, 0, -1], [1, 2, 2]]))
SOFT = Layer(
    "stages.0.attn.tap", "soft", 2, np.array([[0, 1]]), np.array([[[255, 0]], [[0, 255]]], dtype=np.uint8)
)
BOX = (0.0, 0.0, 30.0, 20.0)


def data_of(view: str) -> list[dict]:
    return json.loads(view.split('<script type="application/json">')[1].split("</script>")[0])


def photo_of(view: str) -> Image.Image:
    [photo] = [img for img in Page(view).find("img") if img.get("class") == "tv-photo"]
    source = photo["src"]
    assert source is not None
    image = Image.open(io.BytesIO(base64.b64decode(source.partition("base64,")[2])))
    assert (photo["width"], photo["height"]) == (str(image.width), str(image.height))
    return image


def test_a_view_has_the_tokens_of_each_layer() -> None:
    hard, soft = data_of(token_view(noise_image(30, 20), [HARD, SOFT], box=BOX))
    assert (hard["name"], hard["noun"], hard["tokens"]) == ("blocks.0", "token", 3)
    assert (hard["width"], hard["height"]) == (3, 2)
    assert hard["assignment"] == [0, 0, -1, 1, 2, 2]
    assert "maps" not in hard
    assert soft["noun"] == "cluster"
    maps = soft["maps"]
    weights = np.frombuffer(base64.b64decode(maps["data"]), dtype=np.uint8)
    assert SOFT.maps is not None
    np.testing.assert_array_equal(weights.reshape(2, maps["height"], maps["width"]), SOFT.maps)


def test_several_views_share_no_names_and_load_nothing() -> None:
    page = Page(token_view(noise_image(30, 20), [HARD, SOFT], box=BOX, caption="one") * 2)
    assert len(page.find("canvas")) == 2 * (1 + 2)
    for tag, attributes in page.tags:
        assert not {"id", "name", "for", "href", "onclick", "onload"} & set(attributes), tag
        assert attributes.get("src", "data:image/jpeg")[:15] == "data:image/jpeg"  # type: ignore[index]


def test_texts_are_escaped() -> None:
    layers = [Layer(HOSTILE, "hard", 1, np.zeros((1, 1), dtype=int)), HARD]
    view = token_view(noise_image(30, 20), layers, box=BOX, caption=HOSTILE, noun=HOSTILE)
    page = Page(view)
    assert len(page.find("script")) == 2
    assert not page.find("alert")
    assert data_of(view)[0]["name"] == data_of(view)[0]["noun"] == HOSTILE
    assert HOSTILE in page.text
    assert [img["alt"] for img in page.find("img")] == [HOSTILE]
    assert page.find("button")[3]["title"] == HOSTILE


def test_the_photo_is_what_the_model_saw() -> None:
    pixels = np.zeros((900, 1600, 3), dtype=np.uint8)
    pixels[:, :800] = 200
    large = photo_of(token_view(Image.fromarray(pixels), [HARD], box=(400, 0, 1300, 900)))
    assert large.size == (640, 640)
    light = np.asarray(large.convert("L")) > 100
    assert abs(light.mean() - 400 / 900) < 0.01
    padded = photo_of(token_view(Image.fromarray(pixels[:, :600]), [HARD], box=(0, 0, 1200, 900)))
    assert abs((np.asarray(padded.convert("L")) > 100).mean() - 0.5) < 0.01
    small = np.asarray(photo_of(token_view(noise_image(8, 8), [HARD], box=(0, 0, 8, 8))).convert("L")).astype(
        int
    )
    assert small.shape == (640, 640)  # the pixels stay squares
    inside = small.reshape(8, 80, 8, 80)[:, 20:60, :, 20:60]
    assert np.ptp(inside, axis=(1, 3)).max() < 12


def test_one_layer_needs_no_strip() -> None:
    page = Page(token_view(noise_image(30, 20), [HARD], box=BOX))
    assert len(page.find("canvas")) == 1
    with pytest.raises(UserError, match="at least one layer"):
        token_view(noise_image(30, 20), [], box=BOX)


def test_a_frame_contains_the_document() -> None:
    given: dict = dict(image=noise_image(30, 20), layers=[HARD, SOFT], box=BOX, caption=HOSTILE)
    [frame] = Page(view_frame(**given, after="<p>more</p>")).find("iframe")
    assert frame["sandbox"] == "allow-scripts allow-downloads"
    assert frame["title"] == HOSTILE
    document = frame["srcdoc"]
    assert document == view_document(**given, after="<p>more</p>")
    page = Page(document)
    assert page.text.count("more") == 1
    assert len(page.find("title")) == 1


@pytest.mark.parametrize("layers", [(), (HARD, SOFT), (SOFT,)])
def test_an_interactive_page(tmp_path: Path, layers: tuple[Layer, ...]) -> None:
    """Models that group nothing have the regions as one layer. Without scripts, divisions are drawn."""
    one = explanation(method="shapley", form="hard", layers=layers, classes=("a", HOSTILE, "c"))
    text = one.save(tmp_path / "x.html", interactive=True).read_text("utf-8")
    page = Page(text)
    assert len(page.find("script")) == 2
    found = data_of(text)
    assert [layer["noun"] for layer in found] == [
        {"hard": "token", "soft": "cluster"}[x.form] for x in layers
    ] or ["region"]
    pictures = text.partition("<noscript>")[2].partition("</noscript>")[0].count("<img")
    assert pictures == sum(layer.form != "soft" for layer in layers)
    static = Page(one.save(tmp_path / "x.html").read_text("utf-8"))
    assert not static.find("script")
    assert len(static.find("img")) + 1 == len(page.find("img"))


@pytest.mark.parametrize("method", ["shapley", "cluster"])
def test_a_notebook_displays_an_explanation(method: str) -> None:
    one = explanation(
        method=method,
        form="soft" if method == "cluster" else "hard",
        classes=("a", HOSTILE, "c"),
        layers=(HARD,),
    )
    html = one._repr_html_()
    document = unescape(html.partition('srcdoc="')[2].partition('"></iframe>')[0])
    page = Page(document)
    assert f"Why “{HOSTILE}”?" in page.text
    assert len(page.find("script")) == 2
    if method == "shapley":
        assert "+0.42" in page.text  # the value of the best region
    else:
        assert "−0.42" in page.text
