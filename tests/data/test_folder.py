"""Folders of images, one per class."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from visualtokens.data import BadImage, Preprocess, create_loader
from visualtokens.data.folder import ImageFolder
from visualtokens.errors import UserError

PREPROCESS = Preprocess((4, 4), (0.5,) * 3, (0.5,) * 3)


def save(path: Path, colour: str = "red") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), colour).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path / "train/cat/2.jpg")
    save(tmp_path / "train/cat/1.PNG", "blue")
    save(tmp_path / "train/Bird/3.webp")
    save(tmp_path / "val/cat/4.bmp", "blue")
    return tmp_path


def test_items_and_classes_are_sorted(root: Path) -> None:
    train = ImageFolder(root, "train")
    assert train.classes == ["Bird", "cat"]
    assert [Path(train.path(i)).relative_to(root / "train").as_posix() for i in range(3)] == [
        "Bird/3.webp",
        "cat/1.PNG",
        "cat/2.jpg",
    ]
    image, label = train[1]
    assert (image.mode, image.getpixel((0, 0)), label) == ("RGB", (0, 0, 255), 1)
    assert train.spec == f"folder:{root}"


def test_validation_has_the_class_numbers_of_training(root: Path) -> None:
    val = ImageFolder(root, "val")
    assert val.classes == ["Bird", "cat"]
    assert [label for _, label in val] == [1]


def test_images_are_recognised_by_their_extension(root: Path) -> None:
    (root / "train/cat/notes.txt").write_text("not an image")
    (root / "train/cat/.DS_Store").write_bytes(b"\0")
    (root / "train/cat/broken.jpg").write_bytes(b"not an image either")
    save(root / "train/cat/.ipynb_checkpoints/copy.png")
    save(root / "train/.trash/old.png")
    save(root / "train/cat/more/5.png")
    save(root / "masks/train/cat/1.png")
    train = ImageFolder(root, "train")
    assert [Path(file).name for file in train.files] == ["3.webp", "1.PNG", "2.jpg", "broken.jpg", "5.png"]
    with pytest.raises(BadImage) as caught:
        train[3]
    assert caught.value.path == str(root / "train/cat/broken.jpg")


def test_home_is_expanded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(root.parent))
    assert len(ImageFolder(f"~/{root.name}", "train")) == 3


def test_a_missing_root_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere does not exist; expected .*nowhere/train/<class>/\*\.jpg"):
        ImageFolder(tmp_path / "nowhere", "train")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file, not a folder"):
        ImageFolder(tmp_path / "file", "train")
    with pytest.raises(UserError, match=r"no train/ folder, only no folders at all"):
        ImageFolder(tmp_path, "train")


def test_class_folders_without_splits_are_explained(tmp_path: Path) -> None:
    for name in "abcdefg":
        save(tmp_path / name / "1.jpg")
    with pytest.raises(UserError) as caught:
        ImageFolder(tmp_path, "train")
    message = str(caught.value)
    assert "a/, b/, c/, d/, e/, … (class folders without a split?)" in message
    assert f"expected {tmp_path}/train/<class>/*.jpg and {tmp_path}/val/<class>/*.jpg" in message


def test_a_missing_split_is_rejected(tmp_path: Path) -> None:
    save(tmp_path / "train/cat/1.jpg")
    assert len(ImageFolder(tmp_path, "train")) == 1
    with pytest.raises(UserError, match=r"has no val/ folder, only train/; expected"):
        ImageFolder(tmp_path, "val")


def test_images_outside_class_folders_are_rejected(root: Path) -> None:
    save(root / "train/stray.jpg")
    with pytest.raises(UserError, match=r"outside class folders, such as stray\.jpg"):
        ImageFolder(root, "train")


def test_folders_without_images_are_rejected(root: Path) -> None:
    (root / "train/dog").mkdir()
    with pytest.raises(UserError, match=r"train/dog holds no images \(\.avif"):
        ImageFolder(root, "train")
    (root / "val/cat/4.bmp").unlink()
    with pytest.raises(UserError, match="val holds no images"):
        ImageFolder(root, "val")
    (root / "val/cat").rmdir()
    with pytest.raises(UserError, match="val holds no class folders"):
        ImageFolder(root, "val")


def test_a_validation_class_that_training_lacks_is_rejected(root: Path) -> None:
    save(root / "val/dog/1.jpg")
    with pytest.raises(UserError, match=r"classes that .*train does not have: dog; add them"):
        ImageFolder(root, "val")


def names(dataset: ImageFolder, root: Path) -> list[str]:
    return [Path(file).relative_to(root).as_posix() for file in dataset.files]


def test_links_to_images_and_folders_are_followed(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pool = tmp_path_factory.mktemp("pool")
    save(pool / "dogs/more/1.jpg")
    save(pool / "birds/2.jpg")
    (root / "train/dog").symlink_to(pool / "dogs")
    (root / "train/Bird/others").symlink_to(pool / "birds")
    (root / "train/cat/3.jpg").symlink_to(pool / "birds/2.jpg")
    train = ImageFolder(root, "train")
    assert train.classes == ["Bird", "cat", "dog"]
    assert names(train, root / "train") == [
        *("Bird/3.webp", "Bird/others/2.jpg"),
        *("cat/1.PNG", "cat/2.jpg", "cat/3.jpg"),
        "dog/more/1.jpg",
    ]
    assert train[5][1] == 2


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("train/self", "."),
        ("train/up", ".."),
        ("train/all", "/"),
        ("train/cat/self", "."),
        ("train/cat/up", "../.."),
        ("train/kitten", "cat"),
        ("train/Alias", "Bird"),  # listed before the folder it leads to
        ("train/cat/birds", "../Bird"),
    ],
)
def test_a_link_to_a_folder_that_is_already_listed_is_refused(root: Path, link: str, target: str) -> None:
    (root / link).symlink_to(target)
    with pytest.raises(UserError, match=rf"the link {root / link} leads to .*; remove it"):
        ImageFolder(root, "train")


@pytest.mark.parametrize("link", ["train/dog", "train/cat/more"])
def test_a_broken_link_that_may_have_been_a_folder_is_refused(root: Path, link: str) -> None:
    (root / link).symlink_to("nowhere")
    with pytest.raises(UserError, match=rf"the link {root / link} leads to nowhere, which does not exist"):
        ImageFolder(root, "train")
    (root / link).unlink()
    (root / link).symlink_to((root / link).name)  # a link to itself
    with pytest.raises(UserError, match="which does not exist"):
        ImageFolder(root, "train")


def test_a_broken_link_to_an_image_is_unreadable(root: Path) -> None:
    (root / "train/cat/9.jpg").symlink_to("nowhere.jpg")
    train = ImageFolder(root, "train")
    with pytest.raises(BadImage, match=r"9\.jpg: no such file"):
        train[3]


def test_names_that_are_not_utf_8(root: Path) -> None:
    folder = os.fsencode(root / "train") + b"/caf\xe9"
    os.mkdir(folder)
    os.rename(root / "train/cat/2.jpg", folder + b"/\xff.jpg")
    with open(folder + b"/\xfe.jpg", "wb") as broken:
        broken.write(b"not an image")
    train = ImageFolder(root, "train")
    assert os.fsencode(train.classes[1]) == b"caf\xe9"
    assert [os.fsencode(train.path(i)) for i in (1, 2)] == [folder + b"/\xfe.jpg", folder + b"/\xff.jpg"]
    batches = list(create_loader(train, PREPROCESS, batch=4, train=False, workers=1))
    assert batches[0].labels.tolist() == [0, 1, 2]
    assert [os.fsencode(bad.path) for bad in batches[0].bad] == [folder + b"/\xfe.jpg"]
