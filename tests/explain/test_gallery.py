from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visualtokens.errors import UserError
from visualtokens.explain import Gallery, explain_folder

from .stubs import Learned, explanation, preprocess
from .test_report import Page, check_self_contained

CLASSES = ("cat", "dog", "<b>ird")


def photo(path: Path, width: int = 24, height: int = 18, *, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def explained(folder: Path, **options: object) -> Gallery:
    return explain_folder(Learned().eval(), folder, preprocess=preprocess(16, 16), classes=CLASSES, **options)


def test_what_cannot_be_explained_is_named_and_the_rest_is_explained(tmp_path: Path) -> None:
    photo(tmp_path / "a.png")
    photo(tmp_path / "deep" / "er" / "b.jpg")
    photo(tmp_path / "one.png", 1, 1)
    photo(tmp_path / "strip.png", 1, 3000)
    (tmp_path / "notes.txt").write_text("these are my photos")
    (tmp_path / "broken.jpg").write_bytes((tmp_path / "deep" / "er" / "b.jpg").read_bytes()[:200])
    (tmp_path / "empty.png").touch()
    (tmp_path / ".hidden").write_text("not ours")
    Image.new("RGB", (7746, 7746), (90, 140, 200)).save(tmp_path / "huge.jpg")
    got = explained(tmp_path)
    assert [entry.name for entry in got.entries] == ["a.png", "deep/er/b.jpg", "huge.jpg"]
    assert got.entries[2].size == (7746, 7746)
    reasons = {bad.path: bad.reason for bad in got.refused}
    assert sorted(reasons) == ["broken.jpg", "empty.png", "notes.txt", "one.png", "strip.png"]
    assert "damaged" in reasons["broken.jpg"]
    assert "not an image" in reasons["notes.txt"]
    assert "1×1 pixels" in reasons["one.png"]
    assert "1×3000 pixels, of which the model sees 1×1" in reasons["strip.png"]
    text = got.write(tmp_path / "out" / "gallery.html").read_text(encoding="utf-8")
    page = check_self_contained(text)
    shown = "".join(page.text)
    for name in ("a.png", "b.jpg", "huge.jpg (7746×7746)", *reasons):
        assert name in shown
    assert len(page.find("article")) == 3
    assert len(text) < 1_500_000


def test_the_truth_is_the_folder_of_an_image_if_that_is_a_class(tmp_path: Path) -> None:
    for i, folder in enumerate(("cat", "dog", "elsewhere")):
        photo(tmp_path / folder / "x.png", seed=i)
    got = explained(tmp_path)
    assert [entry.truth for entry in got.entries] == ["cat", "dog", None]
    page = Page(got.page())
    verdicts = [line for line in page.text if line.startswith(("✓", "✗", "whether"))]
    assert len(verdicts) == 3
    assert verdicts[2] == "whether it is right is not known"
    right = sum(entry.truth == entry.predicted for entry in got.entries)
    assert [line.startswith("✓") for line in verdicts].count(True) == right
    assert "not known" in got.entries[2].about


def test_json(tmp_path: Path) -> None:
    photo(tmp_path / "a.png")
    (tmp_path / "notes.txt").touch()
    document = explained(tmp_path, target=2, top=2).to_dict()
    [entry] = document["explained"]
    assert entry["image"] == "a.png"
    assert entry["target"] == "<b>ird"
    assert len(entry["clusters"]) == 2
    assert document["unreadable"] == [{"path": "notes.txt", "reason": "empty file"}]


def test_names_are_only_ever_text(tmp_path: Path) -> None:
    photo(tmp_path / "<script>alert(1)<" / "x.png")
    got = explained(tmp_path, target=2)
    assert got.page().count("<script") == 0
    check_self_contained(got.page())


def test_nothing_to_explain(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no files"):
        explained(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    got = explained(tmp_path)
    assert not got.entries
    assert "notes.txt" in got.page()


def test_an_error_of_the_model_is_no_bad_image(tmp_path: Path) -> None:
    photo(tmp_path / "a.png")
    with pytest.raises(UserError, match="layer=9"):
        explained(tmp_path, layer=9)


def test_a_gallery_is_html(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"g\.pdf.*\.html"):
        Gallery("x").write(tmp_path / "g.pdf")


def test_pictures_of_a_gallery_are_small() -> None:
    gallery = Gallery("x")
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 256, (900, 1200, 3), dtype=np.uint8))
    gallery.add(explanation(image=noise, crop_box=(150, 0, 1050, 900)), "noise.png")
    assert len(gallery.page()) < 700_000  # of noise, which JPEG cannot make small
