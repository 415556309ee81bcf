"""Images in folders: ``root/train/<class>/*.jpg`` and ``root/val/<class>/*.jpg``."""

from __future__ import annotations

import os
from pathlib import Path

from PIL import Image

from visualtokens.data.base import (
    SPLIT_OF,
    ImageDataset,
    Split,
    check_class_count,
    check_split,
    is_inside,
    split_rows,
)
from visualtokens.data.decode import EXTENSIONS, read_image
from visualtokens.data.walk import Walk, check_link, is_image
from visualtokens.errors import UserError

TINY_IMAGENET = "val_annotations.txt"
MAX_LIST_BYTES = 2**28  # of a list of images; a line takes about 50


class ImageFolder(ImageDataset):
    """One folder per class; the classes are the folders in ``train/``, sorted by name.

    Images are recognised by their extension, so that an unreadable one is reported and not skipped silently.
    Folders inside a class folder belong to that class. Folders with a leading dot, and anything beside
    ``train/``, ``val/`` (or ``valid/``, ``validation/``) and ``test/``, are ignored. Links to files and
    folders are followed; a split with a folder that can be reached in two ways, or with a broken link, is
    refused (see :class:`Walk`).

    With ``val_share``, that share of every class of ``train/`` is the validation split (see
    :func:`~visualtokens.data.base.held_out`), and ``root`` may hold the class folders itself. Without
    ``train/``, the classes are those of the split. Tiny ImageNet's ``val/val_annotations.txt`` is read.
    """

    def __init__(self, root: str | Path, split: Split, *, val_share: float | None = None) -> None:
        check_split(split)
        self.spec = f"folder:{root}"
        base = Path(root).expanduser()
        folders = _split_folders(base)
        folder = _folder_of(base, folders, split, val_share)
        images = _listed_images(folder) if (folder / TINY_IMAGENET).is_file() else _images_by_class(folder)
        if "train" in folders:
            self.classes = _class_names(folders["train"])
            _check_known_classes(images, self.classes, folder, folders["train"])
        else:
            self.classes = [name for name, files in images.items() if files]
        self.files: list[str] = []
        self.labels: list[int] = []
        for label, name in enumerate(self.classes):
            found = images.get(name, [])
            if not found and folder == folders.get("train"):
                raise UserError(
                    f"{folder / name} holds no images ({_extensions()}); add some or remove the folder"
                )
            self.files += found
            self.labels += [label] * len(found)
        if not self.files:
            raise UserError(f"{folder} holds no images ({_extensions()}) in its class folders")
        if val_share is not None and split != "test":
            inside = [file[len(str(folder)) + 1 :].replace(os.sep, "/") for file in self.files]
            rows = split_rows(split, inside, val_share, labels=self.labels, source=self.spec)
            self.files = [self.files[row] for row in rows]
            self.labels = [self.labels[row] for row in rows]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return read_image(self.files[index]), self.labels[index]

    def path(self, index: int) -> str:
        return self.files[index]


def _split_folders(base: Path) -> dict[str, Path]:
    """The folder of each split; if there is none, ``base`` is the training split."""
    if not base.is_dir():
        what = "is a file, not a folder" if base.exists() else "does not exist"
        raise UserError(f"{base} {what}; {_expected(base)}")
    folders: dict[str, Path] = {}
    for name, split in SPLIT_OF.items():
        if not (base / name).is_dir():
            continue
        if split in folders:
            raise UserError(f"{base} has both {folders[split].name}/ and {name}/; rename one of them")
        folders[split] = base / name
    if not folders and not _subfolders(base):
        raise UserError(f"{base} holds no folders; {_expected(base)}")
    return folders or {"train": base}


def _folder_of(base: Path, folders: dict[str, Path], split: Split, val_share: float | None) -> Path:
    """The folder with the images of the split, or with those of which ``val_share`` is held out."""
    if val_share is not None and "val" in folders:
        raise UserError(f"{folders['val']} holds the validation images; leave val_share={val_share} out")
    if folders.get("train") == base and (val_share is None or split == "test"):
        shown = _describe([f"{name}/" for name in _subfolders(base)])
        raise UserError(
            f"{base} has no {split}/ folder, only {shown}; if these are classes, give --val_share 0.2 to "
            "hold out a fifth of the images for validation (1 to evaluate on all), otherwise "
            f"{_expected(base)}"
        )
    source = "train" if split == "val" and val_share is not None else split
    if source in folders:
        return folders[source]
    hint = _expected(base)
    if split == "val" and "train" in folders:
        hint = f"give --val_share 0.2 to hold out a fifth of the training images, or add {base}/val/<class>/"
    elif source != "train" and "train" not in folders:
        hint = f"give --split {next(iter(folders))}, or add {base}/{split}/<class>/"
    only = ", ".join(f"{folder.name}/" for folder in folders.values())
    raise UserError(f"{base} has no {source}/ folder, only {only}; {hint}")


def _describe(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _expected(base: Path) -> str:
    return f"expected {base}/train/<class>/*.jpg and {base}/val/<class>/*.jpg"


def _class_names(folder: Path) -> list[str]:
    stray = sorted(entry.name for entry in folder.iterdir() if is_image(entry.name) and entry.is_file())
    if stray:
        raise UserError(
            f"{folder} holds images outside class folders, such as {stray[0]}; "
            "move each into a folder named after its class"
        )
    for entry in folder.iterdir():
        check_link(str(entry))
    names = _subfolders(folder)
    if not names:
        raise UserError(f"{folder} holds no class folders; expected {folder}/<class>/*.jpg")
    check_class_count(len(names), str(folder))
    return names


def _images_by_class(folder: Path) -> dict[str, list[str]]:
    """Every image below each class folder, sorted, so that an index means the same on every machine."""
    walk = Walk(folder)
    return {
        name: sorted(
            os.path.join(parent, file) for parent, files in walk(name) for file in files if is_image(file)
        )
        for name in _class_names(folder)
    }


def _listed_images(folder: Path) -> dict[str, list[str]]:
    """The files in Tiny ImageNet's ``val/images`` by class; a line of the list is name, class and a box."""
    listed = folder / TINY_IMAGENET
    images: dict[str, list[str]] = {}
    if (size := listed.stat().st_size) > MAX_LIST_BYTES:
        raise UserError(f"{listed} has {size:,} bytes; at most {MAX_LIST_BYTES:,} are read")
    text = listed.read_text(encoding="utf-8", errors="surrogateescape")
    for number, line in enumerate(text.splitlines(), 1):
        name, *others = line.split("\t")
        if not others or not is_inside(name):
            raise UserError(f"{listed}, line {number}: expected the name of an image, a tab and its class")
        images.setdefault(others[0], []).append(os.path.join(folder, "images", name))
    check_class_count(len(images), str(listed))
    return {name: sorted(images[name]) for name in sorted(images)}


def _check_known_classes(
    images: dict[str, list[str]], known: list[str], folder: Path, training: Path
) -> None:
    unknown = sorted(name for name in set(images) - set(known) if images[name])
    if unknown:
        raise UserError(
            f"{folder} has classes that {training} does not have: {_describe(unknown)}; "
            f"add them to {training.name}/ or remove them from {folder.name}/"
        )


def _subfolders(folder: Path) -> list[str]:
    return sorted(e.name for e in folder.iterdir() if e.is_dir() and not e.name.startswith("."))


def _extensions() -> str:
    return " ".join(sorted(EXTENSIONS))
