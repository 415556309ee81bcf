"""The picture of a gallery in the README: the first two photos of a page.

    vtok explain photos/ --checkpoint run/ --save gallery.html
    python docs/gallery_picture.py gallery.html

The page is that of a pretrained ViT-B/16 and photos of pets. Needs Chromium.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

OUT = Path(__file__).with_name("gallery.jpg")
WIDTH, MARGIN = 1080, 8  # pixels
PHOTOS = 2


def draw(page: Path) -> Image.Image:
    """Return the part of the page from the heading of the first photos to the last card that is shown."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        tab = browser.new_page(viewport={"width": WIDTH, "height": 800})
        tab.goto(page.resolve().as_uri())
        tab.add_style_tag(content="a[href='#index'] { display: none }")  # floats over the cards
        first = tab.locator("section.group h2").first.bounding_box()
        last = tab.locator("article.sample").nth(PHOTOS - 1).bounding_box()
        assert first is not None
        assert last is not None
        top, bottom = first["y"] - MARGIN, last["y"] + last["height"] + MARGIN
        clip = {"x": 0, "y": top, "width": WIDTH, "height": bottom - top}
        png = tab.screenshot(full_page=True, clip=clip)
        browser.close()
    return Image.open(io.BytesIO(png)).convert("RGB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    draw(parser.parse_args().page).save(OUT, quality=88)


if __name__ == "__main__":
    main()
