"""Folders of images, one per class."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
    with pytest.raises(UserError, match=r"holds no folders; expected .*/train/<class>/\*\.jpg"):
        ImageFolder(tmp_path, "train")


def test_class_folders_without_splits_are_explained(tmp_path: Path) -> None:
    for name in "abcdefg":
        save(tmp_path / name / "1.jpg")
    for split in ("train", "val", "test"):
        with pytest.raises(UserError) as caught:
            ImageFolder(tmp_path, split)  # type: ignore[arg-type]
        message = str(caught.value)
        assert (
            f"{tmp_path} has no {split}/ folder, only a/, b/, c/, d/, e/, …; if these are classes" in message
        )
        assert "give --val_share 0.2 to hold out a fifth of the images for validation" in message
        assert f"expected {tmp_path}/train/<class>/*.jpg and {tmp_path}/val/<class>/*.jpg" in message
    with pytest.raises(UserError, match="has no test/ folder"):
        ImageFolder(tmp_path, "test", val_share=0.2)


def test_a_missing_split_is_rejected(tmp_path: Path) -> None:
    save(tmp_path / "train/cat/1.jpg")
    assert len(ImageFolder(tmp_path, "train")) == 1
    with pytest.raises(UserError, match=r"has no val/ folder, only train/; give --val_share 0\.2"):
        ImageFolder(tmp_path, "val")
    with pytest.raises(UserError, match=r"has no test/ folder, only train/; expected"):
        ImageFolder(tmp_path, "test")


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


def test_the_test_split_has_the_classes_of_training(root: Path) -> None:
    save(root / "test/cat/7.jpg")
    test = ImageFolder(root, "test")
    assert (test.classes, test.labels, names(test, root)) == (["Bird", "cat"], [1], ["test/cat/7.jpg"])
    save(root / "test/dog/8.jpg")
    with pytest.raises(
        UserError, match=r"test has classes that .*train does not have: dog; add them to train/"
    ):
        ImageFolder(root, "test")


def test_without_training_images_the_classes_are_those_of_the_split(tmp_path: Path) -> None:
    save(tmp_path / "test/cat/7.jpg")
    save(tmp_path / "test/ant/8.jpg")
    (tmp_path / "test/empty").mkdir()
    test = ImageFolder(tmp_path, "test")
    assert (test.classes, test.labels) == (["ant", "cat"], [0, 1])
    for split, share in (("train", None), ("train", 0.2), ("val", 0.2)):
        with pytest.raises(UserError, match="has no train/ folder, only test/; expected"):
            ImageFolder(tmp_path, split, val_share=share)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["valid", "validation"])
def test_other_names_of_the_validation_split(root: Path, name: str) -> None:
    (root / "val").rename(root / name)
    assert names(ImageFolder(root, "val"), root) == [f"{name}/cat/4.bmp"]
    save(root / "val/cat/4.jpg")
    with pytest.raises(UserError, match=f"has both val/ and {name}/; rename one of them"):
        ImageFolder(root, "val")


@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    share=st.sampled_from([0.05, 0.2, 0.5, 0.9]),
    flat=st.booleans(),
)
@settings(max_examples=15)
def test_a_share_of_every_class_is_held_out(counts: list[int], share: float, flat: bool) -> None:
    with TemporaryDirectory() as folder:
        top = Path(folder) if flat else Path(folder, "train")
        for number, count in enumerate(counts):
            for i in range(count):
                file = top / f"class{number}" / f"{i}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
        if max(counts) == 1:
            with pytest.raises(UserError, match=r"holds out no image .*: each class has one at most"):
                ImageFolder(folder, "val", val_share=share)
            return
        train, val = (ImageFolder(folder, split, val_share=share) for split in ("train", "val"))  # type: ignore[arg-type]
        assert train.classes == val.classes == [f"class{number}" for number in range(len(counts))]
        assert sorted(train.files + val.files) == sorted(map(str, top.glob("*/*.png")))
        for dataset in (train, val):
            assert dataset.files == sorted(dataset.files)
            assert [f"class{label}" for label in dataset.labels] == [
                Path(f).parent.name for f in dataset.files
            ]
        for number, count in enumerate(counts):
            held = val.labels.count(number)
            assert held == (min(max(round(share * count), 1), count - 1) if count > 1 else 0)
        assert ImageFolder(folder, "val", val_share=share).files == val.files


def test_the_images_held_out_do_not_depend_on_the_place_of_the_folder(tmp_path: Path) -> None:
    held = []
    for place in ("here", "there/train", "there"):
        for i in range(20):
            save(tmp_path / place / "a" / f"{i}.png")
    for place in ("here", "there"):
        val = ImageFolder(tmp_path / place, "val", val_share=0.25)
        held.append([Path(file).name for file in val.files])
    assert held[0] == held[1]
    assert len(held[0]) == 5


def test_all_images_are_held_out_to_evaluate_on_them(tmp_path: Path) -> None:
    save(tmp_path / "a/1.jpg")
    save(tmp_path / "b/2.jpg")
    assert names(ImageFolder(tmp_path, "val", val_share=1.0), tmp_path) == ["a/1.jpg", "b/2.jpg"]
    with pytest.raises(
        UserError, match=r"val_share=1\.0 leaves no image of folder:.* to train on; give less"
    ):
        ImageFolder(tmp_path, "train", val_share=1.0)


def test_nothing_is_held_out_where_there_is_a_validation_split(root: Path) -> None:
    for split in ("train", "val"):
        with pytest.raises(UserError, match=r"/val holds the validation images; leave val_share=0\.2 out"):
            ImageFolder(root, split, val_share=0.2)  # type: ignore[arg-type]
    (root / "val").rename(root / "test")
    assert names(ImageFolder(root, "test", val_share=0.2), root) == ["test/cat/4.bmp"]
    assert names(ImageFolder(root, "val", val_share=0.2), root) in (["train/cat/1.PNG"], ["train/cat/2.jpg"])


def test_tiny_imagenet(tmp_path: Path) -> None:
    for name in ("n01", "n02"):
        save(tmp_path / f"train/{name}/images/{name}_0.JPEG")
        (tmp_path / f"train/{name}/{name}_boxes.txt").touch()
    listed = tmp_path / "val/val_annotations.txt"
    for i in range(3):
        save(tmp_path / f"val/images/val_{i}.JPEG")
    listed.write_text(
        "val_0.JPEG\tn02\t0\t0\t3\t3\nval_1.JPEG\tn01\t0\t0\t3\t3\nval_2.JPEG\tn02\t0\t0\t3\t3\n"
    )
    assert names(ImageFolder(tmp_path, "train"), tmp_path) == [
        f"train/{name}/images/{name}_0.JPEG" for name in ("n01", "n02")
    ]
    val = ImageFolder(tmp_path, "val")
    assert [(Path(file).name, label) for file, label in zip(val.files, val.labels, strict=True)] == [
        *(("val_1.JPEG", 0), ("val_0.JPEG", 1), ("val_2.JPEG", 1)),
    ]
    assert val[0][0].size == (4, 4)
    listed.write_text("val_0.JPEG\tn03\n")
    with pytest.raises(UserError, match="does not have: n03"):
        ImageFolder(tmp_path, "val")
    for line in ("val_0.JPEG n02", "../val_0.JPEG\tn02", ""):
        listed.write_text(f"val_1.JPEG\tn01\n{line}\n")
        with pytest.raises(
            UserError, match=r"val_annotations\.txt, line 2: expected the name of an image, a tab"
        ):
            ImageFolder(tmp_path, "val")


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
