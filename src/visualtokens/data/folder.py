"""Images in folders: ``root/train/<class>/*.jpg`` and ``root/val/<class>/*.jpg``."""

from __future__ import annotations

import os
from pathlib import Path

from PIL import Image

from visualtokens.data.base import ImageDataset, Split, check_split
from visualtokens.data.decode import EXTENSIONS, read_image
from visualtokens.errors import UserError


class ImageFolder(ImageDataset):
    """One folder per class; the classes are the folders in ``train/``, sorted by name.

    Images are recognised by their extension, so that an unreadable one is reported and not skipped silently.
    Folders inside a class folder belong to that class. Folders with a leading dot, and anything beside
    ``train/`` and ``val/``, are ignored.
    """

    def __init__(self, root: str | Path, split: Split) -> None:
        check_split(split)
        base = Path(root).expanduser()
        _check_layout(base, split)
        self.spec = f"folder:{root}"
        self.classes = _class_names(base / "train")
        if split == "val":
            _check_known_classes(_class_names(base / "val"), self.classes, base)
        self.files: list[str] = []
        self.labels: list[int] = []
        for label, name in enumerate(self.classes):
            found = _images(base / split / name)
            if not found and split == "train":
                raise UserError(
                    f"{base / split / name} holds no images ({_extensions()}); add some or remove the folder"
                )
            self.files += found
            self.labels += [label] * len(found)
        if not self.files:
            raise UserError(f"{base / split} holds no images ({_extensions()}) in its class folders")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return read_image(self.files[index]), self.labels[index]

    def path(self, index: int) -> str:
        return self.files[index]


def _check_layout(base: Path, split: Split) -> None:
    expected = f"expected {base}/train/<class>/*.jpg and {base}/val/<class>/*.jpg"
    if not base.is_dir():
        what = "is a file, not a folder" if base.exists() else "does not exist"
        raise UserError(f"{base} {what}; {expected}")
    for needed in dict.fromkeys(("train", split)):  # train/ defines the classes
        if not (base / needed).is_dir():
            raise UserError(f"{base} has no {needed}/ folder, only {_describe_content(base)}; {expected}")


def _describe_content(base: Path) -> str:
    names = [f"{name}/" for name in _subfolders(base)]
    if not names:
        return "no folders at all"
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    split = {"train/", "val/"} & set(names)
    return shown if split else f"{shown} (class folders without a split?)"


def _class_names(folder: Path) -> list[str]:
    stray = sorted(entry.name for entry in folder.iterdir() if _is_image(entry.name) and entry.is_file())
    if stray:
        raise UserError(
            f"{folder} holds images outside class folders, such as {stray[0]}; "
            "move each into a folder named after its class"
        )
    names = _subfolders(folder)
    if not names:
        raise UserError(f"{folder} holds no class folders; expected {folder}/<class>/*.jpg")
    return names


def _check_known_classes(names: list[str], known: list[str], base: Path) -> None:
    unknown = [name for name in names if name not in known and _images(base / "val" / name)]
    if unknown:
        raise UserError(
            f"{base}/val has classes that {base}/train does not have: {', '.join(unknown)}; "
            "add them to train/ or remove them from val/"
        )


def _subfolders(folder: Path) -> list[str]:
    return sorted(e.name for e in folder.iterdir() if e.is_dir() and not e.name.startswith("."))


def _images(folder: Path) -> list[str]:
    """Every image below ``folder``, sorted, so that an index means the same on every machine."""
    found: list[str] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(parent, name) for name in files if _is_image(name)]
    return sorted(found)


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in EXTENSIONS


def _extensions() -> str:
    return " ".join(sorted(EXTENSIONS))
