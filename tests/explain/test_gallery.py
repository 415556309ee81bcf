from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visualtokens.errors import UserError
from visualtokens.explain import Gallery, Origin, explain_folder

from .stubs import Page, SoftClusters, check_self_contained, explanation, noise_image, preprocess

CLASSES = ("cat", "dog", "<b>ird")


def write_photo(path: Path, width: int = 24, height: int = 18, *, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise_image(width, height, seed=seed).save(path)


def explained(folder: Path, **options: object) -> Gallery:
    return explain_folder(
        SoftClusters().eval(),
        folder,
        preprocess=preprocess(16, 16),
        classes=CLASSES,
        **dict(regions=4, budget=12, path=0) | options,  # type: ignore[arg-type]
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
    cards = Page("".join(entry.card for entry in got.entries)).text
    marks = [line[0] for line in cards if line.startswith(("✓", "✗", "true class unknown"))]
    want = ["✓" if entry.truth == entry.predicted else "✗" for entry in got.entries[:2]]
    assert marks == [*want, "t"]


def gallery(*answers: tuple[int, int | None, float], folder: str = "pets") -> Gallery:
    """A gallery of one image per predicted class, true class and probability of the predicted class."""
    made = Gallery(folder)
    for i, (predicted, truth, p) in enumerate(answers):
        probabilities = np.full(3, (1 - p) / 2, dtype=np.float32)
        probabilities[predicted] = p
        made.add(
            explanation(classes=CLASSES, probabilities=probabilities, target=predicted, truth=truth),
            f"{i}.png",
        )
    return made


MIXED = ((0, 0, 0.9), (1, 0, 0.5), (2, None, 0.6), (1, 1, 0.7), (0, 2, 0.8))


def test_wrong_answers_come_first_and_the_most_confident_of_them_before() -> None:
    made = gallery(*MIXED)
    assert [entry.name for entry in made.ordered()] == ["4.png", "1.png", "0.png", "3.png", "2.png"]
    page = check_self_contained(made.page())
    alts = [img["alt"] for img in page.find("img")]
    index, cards = alts[:5], [alt for alt in alts if alt and "predicted as" in alt]
    assert index == [
        "4.png, wrong answer:",
        "1.png, wrong answer:",
        "0.png, correct answer:",
        "3.png, correct answer:",
        "2.png:",
    ]
    assert [alt.partition(",")[0] for alt in cards] == ["4.png", "1.png", "0.png", "3.png", "2.png"]
    anchors = [a["href"] for a in page.find("a")]
    assert anchors == [*(f"#image-{i}" for i in range(1, 6)), "#index"]
    headings = [text for text in page.text if re.match(r"(Wrong|Correct) answers|Images of", text)]
    assert headings == ["Wrong answers", "Correct answers", "Images of unknown class"]
    assert [entry["image"] for entry in made.to_dict()["explained"]] == [f"{i}.png" for i in range(5)]


def test_the_filter_shows_a_verdict_or_a_class() -> None:
    """Follows the style sheet by hand: a checked button hides the items without its CSS class."""
    text = gallery(*MIXED).page()
    page = Page(text)
    buttons = [a for a in page.find("input") if a["type"] == "radio"]
    assert len({a["name"] for a in buttons}) == 1
    assert ["checked" in a for a in buttons] == [True] + [False] * 6
    labels = re.findall(r'id="show-([\w-]+)"[^>]*> ([^<]*) <small>\((\d)\)</small></label>', text)
    cards = {a["id"]: a["class"] for a in page.find("div") if (a.get("id") or "").startswith("image-")}
    links = [a["class"] for a in page.find("li") if (a.get("class") or "").startswith("item")]
    assert links == list(cards.values())
    shown = {}
    for kind, label, count in labels:
        rule = f"body:has(#show-{kind}:checked) :is(.item:not(.{kind}), .group:not(:has(.{kind})))"
        assert (rule in text) == (label != "all")
        shown[label] = [int(i[6:]) for i, classes in cards.items() if kind in (classes or "").split()]
        assert len(shown[label]) == int(count)
    assert shown == {
        "all": [1, 2, 3, 4, 5],
        "wrong": [1, 2],
        "correct": [3, 4],
        "unknown class": [5],
        "&lt;b&gt;ird": [1, 5],
        "cat": [1, 2, 3],
        "dog": [2, 4],
    }


def test_the_filter_is_left_out_where_it_would_not_narrow_the_page() -> None:
    page = Page(gallery((0, 0, 0.9), (0, 0, 0.8)).page())
    assert not page.find("fieldset")
    assert not Page(Gallery("x").page()).find("fieldset")
    assert len(page.find("ol")) == 3  # the index, and the clusters of two images


@pytest.mark.parametrize(
    ("answers", "score"),
    [
        (MIXED, "5 images from pets/: 2 of the 4 answers that can be checked are wrong"),
        (MIXED[:2], "2 images from pets/: 1 of the 2 answers is wrong"),
        (MIXED[:1], "1 image from pets/: the answer is correct"),
        (MIXED[1:3], "2 images from pets/: the answer that can be checked is wrong"),
        (MIXED[:1] * 3, "3 images from pets/: all answers are correct"),
        (MIXED[2:3] * 2, "2 images from pets/"),
    ],
)
def test_the_title_is_a_sentence(answers: tuple[tuple[int, int | None, float], ...], score: str) -> None:
    made = gallery(*answers)
    assert made.title == f"What the model saw in {score}"
    assert f"<title>{made.title}</title>" in made.page()


def test_the_footer_of_a_gallery(tmp_path: Path) -> None:
    origin = Origin(model="m", checkpoint="run", date=date(2031, 2, 3))
    text = gallery(*MIXED).write(tmp_path / "x.html", origin=origin).read_text(encoding="utf-8")
    footer = "".join(Page(text[text.rindex("<footer>") : text.index("</body>")]).text)
    assert footer.split() == ["Model", "m", "Checkpoint", "run", "2031-02-03"]
    assert "<footer>" not in gallery(*MIXED).page()


def test_json(tmp_path: Path) -> None:
    write_photo(tmp_path / "a.png")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "empty.png").touch()
    document = explained(tmp_path, target=2, top=2).to_dict()
    [entry] = document["explained"]
    assert entry["image"] == "a.png"
    assert entry["target"] == "<b>ird"
    assert entry["truth_probability"] is None
    assert len(entry["regions"]) == 2
    assert document["unreadable"] == [{"path": "empty.png", "reason": "empty file"}]
    assert document["ignored"] == ["notes.txt"]


def test_a_folder_without_images(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no files"):
        explained(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    got = explained(tmp_path)
    assert (got.entries, got.refused, got.ignored) == ([], [], ["notes.txt"])
    assert "notes.txt" not in got.page()
    assert got.title == f"No image in {tmp_path.name}/ could be explained"


def test_wrong_options_are_not_reported_as_bad_images(tmp_path: Path) -> None:
    write_photo(tmp_path / "a.png")
    with pytest.raises(UserError, match="layer=9"):
        explained(tmp_path, layer=9)


def test_images_of_a_gallery_are_small() -> None:
    gallery = Gallery("x")
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (900, 1200, 3), dtype=np.uint8))
    gallery.add(explanation(image=noise, crop_box=(150, 0, 1050, 900)), "noise.png")
    assert len(gallery.page()) < 700_000  # noise is the worst case for JPEG
