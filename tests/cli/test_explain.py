"""``vtok explain`` on folders, and how faithful it is."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visualtokens.data import open_dataset
from visualtokens.explain import METHODS

from .processes import files_limited_to

Vtok = Callable[..., tuple[int, str, str]]


@pytest.fixture
def photos(folder: Path, tmp_path: Path) -> Path:
    out = tmp_path / "photos"
    for digit in ("0", "1"):
        (out / digit).mkdir(parents=True)
        (out / digit / "x.png").write_bytes((folder / f"{digit}.png").read_bytes())
    (out / "notes.txt").write_text("about my digits")
    (out / "broken.png").write_bytes(b"no picture")
    Image.new("RGB", (1, 1)).save(out / "dot.png")
    return out


def test_a_folder_becomes_one_page(vtok: Vtok, checkpoint: Path, photos: Path, tmp_path: Path) -> None:
    page = tmp_path / "out" / "gallery.html"
    arguments = ("explain", photos, "--checkpoint", checkpoint, "--top", "3", "--save", page)
    code, text, err = vtok(*arguments)
    assert code == 1  # images were left out
    assert [line.split()[0] for line in text.splitlines()[1:3]] == ["0/x.png", "1/x.png"]
    assert f"2 images explained, 2 images left out, 1 other file ignored; saved as {page}" in text
    for name in ("broken.png: not an image", "dot.png: the image has 1×1 pixels"):
        assert name in err
    assert "notes.txt" not in err
    assert page.read_text(encoding="utf-8").count('<article class="sample regions">') == 2
    document = json.loads(vtok(*arguments, "--json")[1])
    assert [entry["truth"] for entry in document["explained"]] == ["0", "1"]
    for entry in document["explained"]:
        assert (entry["truth_probability"] == entry["probability"]) == (entry["truth"] == entry["predicted"])
    assert sorted(bad["path"] for bad in document["unreadable"]) == ["broken.png", "dot.png"]
    assert document["ignored"] == ["notes.txt"]


@pytest.mark.parametrize("given", [".", "0/x.png"])
@pytest.mark.parametrize("name", ["run", "run/best"])
def test_pages_state_model_checkpoint_and_date_only(
    vtok: Vtok, checkpoint: Path, photos: Path, tmp_path: Path, given: str, name: str
) -> None:
    shutil.copytree(checkpoint, tmp_path / "private" / name)
    page = tmp_path / "x.html"
    vtok("explain", photos / given, "--checkpoint", tmp_path / "private" / name, "--save", page)
    text = page.read_text(encoding="utf-8")
    footer = re.sub(r"<[^>]*>", "", text[text.rindex("<footer>") : text.index("</body>")]).split("\n")
    today = date.today()
    assert [line for line in footer if line] in [
        ["Model paca_vit_nano", f"Checkpoint {name}", day.isoformat()]
        for day in (today, today - timedelta(1))
    ]
    assert "private" not in text
    assert str(tmp_path) not in text


def test_folder_without_unreadable_files(vtok: Vtok, checkpoint: Path, photos: Path, tmp_path: Path) -> None:
    code, text, err = vtok("explain", photos / "0", "--checkpoint", checkpoint, "--save", tmp_path / "x.html")
    assert (code, err) == (0, "")
    assert "1 image explained; saved" in text


@pytest.mark.parametrize(
    ("name", "code"), [("notes.txt", 0), ("page.html", 0), ("LICENSE", 0), ("new.heic", 1), ("cut.JPG", 1)]
)
def test_only_images_that_fail_change_the_exit_code(
    vtok: Vtok, checkpoint: Path, photos: Path, tmp_path: Path, name: str, code: int
) -> None:
    (photos / "0" / name).write_text("no picture")
    given = ("explain", photos / "0", "--checkpoint", checkpoint, "--save", tmp_path / "x.html")
    found, text, err = vtok(*given)
    assert found == code
    assert (name in err) == bool(code)
    left_out = "1 image left out" if code else "1 other file ignored"
    assert f"1 image explained, {left_out}; saved" in text


def test_one_image_without_a_label(vtok: Vtok, checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    arguments = ("explain", folder / "0.png", "--checkpoint", checkpoint, "--save", tmp_path / "x.npz")
    text = vtok(*arguments)[1]
    assert "as predicted; the true class is unknown" in text
    arguments = (*arguments, "--method", "cluster", "--size", "48", "--json")
    by_attention = json.loads(vtok(*arguments, "--of", "attention")[1])
    assert by_attention["regions"] != json.loads(vtok(*arguments)[1])["regions"]


def test_one_image_in_the_folder_of_its_class(
    vtok: Vtok, checkpoint: Path, photos: Path, tmp_path: Path
) -> None:
    arguments = ("--checkpoint", checkpoint, "--save", tmp_path / "x.npz", "--json")
    documents = [json.loads(vtok("explain", photos / d / "x.png", *arguments)[1]) for d in ("0", "1")]
    for digit, one in zip(("0", "1"), documents, strict=True):
        right = one["predicted"] == digit
        assert ("as predicted and correct." if right else f"the true class is {digit}.") in one["about"]


def test_faithfulness_prints_the_table_and_draws_the_curves(
    vtok: Vtok, checkpoint: Path, data: str, tmp_path: Path
) -> None:
    picture = tmp_path / "new" / "curves.png"
    arguments = ("explain", "--faithfulness", "--data", data, "--checkpoint", checkpoint, "--save", picture)
    code, text, _ = vtok(*arguments, "--images", "3", "--steps", "4")
    assert code == 0
    assert [line.split("  ")[0] for line in text.splitlines()[3 : 3 + len(METHODS)]] == list(METHODS)
    assert "3 images" in text
    assert "–" in text  # no masks, no pointing
    assert np.asarray(Image.open(picture)).std() > 5
    document = json.loads(
        vtok(*arguments, "--images", "2", "--steps", "4", "--methods", "random", "--json")[1]
    )
    assert list(document["methods"]) == ["random"]
    assert len(document["methods"]["random"]["deletion_curve"]) == 5


def test_faithfulness_against_masks(vtok: Vtok, checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    """Digits as photos, with their ink as the foreground; one has no mask that fits, one is broken."""
    digits = open_dataset("digits", "val")
    for split in ("train", "val"):
        for digit in range(10):
            (tmp_path / "data" / split / str(digit)).mkdir(parents=True)
            digits[digit][0].save(tmp_path / "data" / split / str(digit) / f"{digit}.png")
    (tmp_path / "masks").mkdir()
    for digit in range(10):
        ink = (np.asarray(digits[digit][0].convert("L")) > 100).astype(np.uint8) * 255
        Image.fromarray(ink).save(tmp_path / "masks" / f"{digit}.png")
    Image.new("L", (3, 3)).save(tmp_path / "masks" / "4.png")
    (tmp_path / "masks" / "5.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    for digit in (6, 8):
        (tmp_path / "masks" / f"{digit}.png").unlink()
    (tmp_path / "masks" / "6.png").mkdir()
    os.mkfifo(tmp_path / "masks" / "8.png")
    (tmp_path / "data" / "val" / "7" / "7.png").write_bytes(b"no picture")
    arguments = (
        "explain",
        "--faithfulness",
        "--data",
        f"folder:{tmp_path / 'data'}",
        "--checkpoint",
        checkpoint,
    )
    options = ("--masks", tmp_path / "masks", "--steps", "2", "--methods", "clusters", "random", "--save")
    code, text, err = vtok(*arguments, *options, tmp_path / "x.png", "--json")
    assert code == 1
    document = json.loads(text)
    assert document["images"] == 5
    refused = {Path(bad["path"]).name: bad["reason"] for bad in document["unreadable"]}
    assert list(refused) == ["4.png", "5.png", "6.png", "7.png", "8.png"]
    for name, reason in {
        "5.png": "not an image in a lossless format",
        "6.png": "is a folder",
        "7.png": "not an image",
        "8.png": "not a regular file",
    }.items():
        assert reason in refused[name]
        assert refused[name] in err
    for method in document["methods"].values():
        assert 0 <= method["auroc"]["mean"] <= 1
        assert method["pointing"]["images"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give an image or a folder to explain, or --data, which --faithfulness needs too"),
        (["x.png", "--faithfulness"], "give an image or a folder"),
        (["--faithfulness"], "needs images to measure on; give --data"),
        (["--faithfulness", "--data", "digits", "--save", "x.html"], r"end --save 'x.html' in .png"),
        (["--faithfulness", "--data", "digits", "--images", "0"], "images=0 must be at least 1"),
        (
            ["--faithfulness", "--data", "digits", "--methods", "gradcam"],
            "unknown method 'gradcam'; did you mean",
        ),
        (["x.png", "--data", "digits"], "give an image or a folder to explain, or --data"),
        (
            ["--data", "digits", "--target", "3"],
            "target=3 has no effect when clusters are ranked",
        ),
        (["x.png", "--object", "2"], "object=2 is for detectors"),
        (
            ["x.png", "--data_args.label", "b"],
            "data_args={'label': 'b'} has no effect without --faithfulness",
        ),
        (["x.png", "--methods", "random"], "methods=['random'] has no effect without --faithfulness"),
        (["--faithfulness", "--data", "digits", "--target", "3"], "target=3 has no effect with --faithfuln"),
        (["nowhere.png"], "cannot read nowhere.png: no such file"),
        (["x.png", "--checkpoint", "nowhere"], "checkpoint 'nowhere' does not exist"),
    ],
)
def test_wrong_options_are_refused(vtok: Vtok, checkpoint: Path, arguments: list[str], message: str) -> None:
    code, _, err = vtok("explain", "--checkpoint", checkpoint, *arguments)
    assert code == 2
    assert message in err


def test_a_folder_is_saved_as_a_page(vtok: Vtok, checkpoint: Path, photos: Path) -> None:
    code, _, err = vtok("explain", photos, "--checkpoint", checkpoint, "--save", "x.npz")
    assert code == 2
    assert "end --save 'x.npz' in .html" in err


@pytest.mark.parametrize("ending", ["html", "png", "npz"])
def test_a_failed_save_leaves_the_old_file(
    vtok: Vtok, checkpoint: Path, folder: Path, tmp_path: Path, ending: str
) -> None:
    given = ("explain", folder / "0.png", "--checkpoint", checkpoint, "--save", tmp_path / f"x.{ending}")
    assert vtok(*given)[0] == 0
    before = (tmp_path / f"x.{ending}").read_bytes()
    with files_limited_to(1000):
        code, _, err = vtok(*given, "--top", "1")
    assert (code, err.count("\n")) == (2, 1)
    assert [path.name for path in tmp_path.iterdir()] == [f"x.{ending}"]
    assert (tmp_path / f"x.{ending}").read_bytes() == before


def test_curves_that_cannot_be_saved_leave_the_old_picture(
    vtok: Vtok, checkpoint: Path, data: str, tmp_path: Path
) -> None:
    picture = tmp_path / "x.png"
    picture.write_bytes(b"old")
    given = ("explain", "--faithfulness", "--data", data, "--checkpoint", checkpoint, "--save", picture)
    with files_limited_to(1000):
        code, _, _ = vtok(*given, "--images", "1", "--steps", "2", "--methods", "random")
    assert (code, picture.read_bytes()) == (2, b"old")


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("source", ["image", "folder", "checkpoint"])
def test_nothing_is_saved_over_an_input(
    vtok: Vtok,
    checkpoint: Path,
    photos: Path,
    tmp_path: Path,
    source: str,
    link: Callable[[Path, Path], None],
) -> None:
    image = photos / "0" / "x.png"
    saved = tmp_path / "out.html"
    link(checkpoint / "config.json" if source == "checkpoint" else image, saved)
    given = photos if source == "folder" else image
    code, out, err = vtok("explain", given, "--checkpoint", checkpoint, "--save", saved)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: '{saved}' would overwrite the input '")
    assert "<html" not in image.read_text(encoding="latin-1")


def test_a_page_inside_the_explained_folder_is_written_again(
    vtok: Vtok, checkpoint: Path, photos: Path
) -> None:
    given = ("explain", photos / "0", "--checkpoint", checkpoint, "--save", photos / "0" / "x.html")
    assert vtok(*given)[0] == 0
    assert vtok(*given)[0] == 0  # the page is not an image, and is ignored


@pytest.mark.parametrize("masks", [False, True])
def test_curves_are_not_saved_over_the_data(
    vtok: Vtok, checkpoint: Path, folder: Path, tmp_path: Path, masks: bool
) -> None:
    picture = (folder / "0.png").read_bytes()
    for split in ("train", "val"):
        for digit in range(10):
            (tmp_path / split / str(digit)).mkdir(parents=True)
            (tmp_path / split / str(digit) / "x.png").write_bytes(picture)
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "x.png").write_bytes(picture)
    saved = tmp_path / "masks" / "x.png" if masks else tmp_path / "val" / "3" / "x.png"
    given = ("--data", f"folder:{tmp_path}", "--masks", tmp_path / "masks", "--save", saved)
    code, _, err = vtok("explain", "--faithfulness", "--checkpoint", checkpoint, *given)
    assert (code, saved.read_bytes()) == (2, picture)
    assert "would overwrite the input" in err


def test_an_animation(vtok: Vtok, checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    given = ("explain", folder / "0.png", "--checkpoint", checkpoint, "--save", tmp_path / "x.npz")
    code, text, _ = vtok(*given, "--animate", tmp_path / "flow.webp")
    assert code == 0
    assert f"saved as {tmp_path / 'x.npz'}, {tmp_path / 'flow.webp'}" in text
    with Image.open(tmp_path / "flow.webp") as animation:
        assert getattr(animation, "n_frames", 1) > 10
    assert vtok("explain", folder, *given[2:4], "--animate", "x.gif")[0] == 2


def test_clusters_are_ranked_on_a_dataset(vtok: Vtok, checkpoint: Path, data: str) -> None:
    document = json.loads(vtok("explain", "--data", data, "--checkpoint", checkpoint, "--json")[1])
    assert document["metric"] == "accuracy"
    drops = [cluster["drop"] for cluster in document["clusters"]]
    assert drops == sorted(drops, reverse=True)
    evaluated = json.loads(vtok("eval", "--data", data, "--checkpoint", checkpoint, "--json")[1])
    assert document["value"] == pytest.approx(evaluated["accuracy"])


def test_an_interactive_page(vtok: Vtok, checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "x.html"
    given = ("explain", folder / "0.png", "--checkpoint", checkpoint, "--budget", "50", "--interactive")
    assert vtok(*given, "--save", page)[0] == 0
    text = page.read_text(encoding="utf-8")
    assert text.count('<div class="token-view') == 1
    assert '"noun":"cluster"' in text  # PaCa
    for wrong in ((*given, "--save", tmp_path / "x.png"), ("explain", folder, *given[2:])):
        code, _, err = vtok(*wrong)
        assert code == 2
        assert "is for the page of one image" in err
