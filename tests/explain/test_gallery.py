from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visualtokens.errors import UserError
from visualtokens.explain import Gallery, explain_folder

from .stubs import Page, SoftClusters, check_self_contained, explanation, noise_image, preprocess

CLASSES = ("cat", "dog", "<b>ird")


def write_photo(path: Path, width: int = 24, height: int = 18, *, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise_image(width, height, seed=seed).save(path)


def explained(folder: Path, **options: object) -> Gallery:
    return explain_folder(
        SoftClusters().eval(), folder, preprocess=preprocess(16, 16), classes=CLASSES, **options
    )


def test_files_that_cannot_be_explained_are_listed(tmp_path: Path) -> None:
    write_photo(tmp_path / "a.png")
    write_photo(tmp_path / "sub" / "<script>" / "b.jpg")
    write_photo(tmp_path / "strip.png", 1, 3000)
    (tmp_path / "notes.txt").write_text("these are my photos")
    (tmp_path / "broken.jpg").write_bytes((tmp_path / "sub" / "<script>" / "b.jpg").read_bytes()[:200])
    (tmp_path / "empty.png").touch()
    (tmp_path / ".hidden").write_text("ignored")
    Image.new("RGB", (2000, 1000), (90, 140, 200)).save(tmp_path / "large.jpg")
    got = explained(tmp_path)
    assert [entry.name for entry in got.entries] == ["a.png", "large.jpg", "sub/<script>/b.jpg"]
    reasons = {bad.path: bad.reason for bad in got.refused}
    assert sorted(reasons) == ["broken.jpg", "empty.png", "strip.png"]
    assert got.ignored == ["notes.txt"]
    assert got.files == 7
    assert "damaged" in reasons["broken.jpg"]
    assert "1×3000 pixels, of which the model sees 1×1" in reasons["strip.png"]
    text = got.write(tmp_path / "out" / "gallery.html").read_text(encoding="utf-8")
    page = check_self_contained(text)
    shown = "".join(page.text)
    for name in ("a.png", "b.jpg", "large.jpg (2000×1000)", *reasons):
        assert name in shown
    assert "notes.txt" not in shown
    assert len(page.find("article")) == 3


def test_the_true_class_is_the_name_of_the_parent_folder(tmp_path: Path) -> None:
    for i, folder in enumerate(("cat", "dog", "elsewhere")):
        write_photo(tmp_path / folder / "x.png", seed=i)
    got = explained(tmp_path)
    assert [entry.truth for entry in got.entries] == ["cat", "dog", None]
    marks = [line[0] for line in Page(got.page()).text if line.startswith(("✓", "✗", "true class unknown"))]
    want = ["✓" if entry.truth == entry.predicted else "✗" for entry in got.entries[:2]]
    assert marks == [*want, "t"]


def test_json(tmp_path: Path) -> None:
    write_photo(tmp_path / "a.png")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "empty.png").touch()
    document = explained(tmp_path, target=2, top=2).to_dict()
    [entry] = document["explained"]
    assert entry["image"] == "a.png"
    assert entry["target"] == "<b>ird"
    assert len(entry["clusters"]) == 2
    assert document["unreadable"] == [{"path": "empty.png", "reason": "empty file"}]
    assert document["ignored"] == ["notes.txt"]


def test_a_folder_without_images(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no files"):
        explained(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    got = explained(tmp_path)
    assert (got.entries, got.refused, got.ignored) == ([], [], ["notes.txt"])
    assert "notes.txt" not in got.page()


def test_wrong_options_are_not_reported_as_bad_images(tmp_path: Path) -> None:
    write_photo(tmp_path / "a.png")
    with pytest.raises(UserError, match="layer=9"):
        explained(tmp_path, layer=9)


def test_images_of_a_gallery_are_small() -> None:
    gallery = Gallery("x")
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (900, 1200, 3), dtype=np.uint8))
    gallery.add(explanation(image=noise, crop_box=(150, 0, 1050, 900)), "noise.png")
    assert len(gallery.page()) < 700_000  # noise is the worst case for JPEG
