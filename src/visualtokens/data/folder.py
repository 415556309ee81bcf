"""Images in folders: ``root/train/<class>/*.jpg`` and ``root/val/<class>/*.jpg``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from visualtokens.data.base import ImageDataset, Split, check_class_count, check_split
from visualtokens.data.decode import EXTENSIONS, read_image
from visualtokens.errors import UserError


class ImageFolder(ImageDataset):
    """One folder per class; the classes are the folders in ``train/``, sorted by name.

    Images are recognised by their extension, so that an unreadable one is reported and not skipped silently.
    Folders inside a class folder belong to that class. Folders with a leading dot, and anything beside
    ``train/`` and ``val/``, are ignored. Links to files and folders are followed; a split with a folder that
    can be reached in two ways, or with a broken link, is refused (see :class:`Walk`).
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
        walk, present = Walk(base / split), set(_subfolders(base / split))
        for label, name in enumerate(self.classes):
            found = _images(walk, name) if name in present else []
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
    for entry in folder.iterdir():
        _check_link(str(entry))
    names = _subfolders(folder)
    if not names:
        raise UserError(f"{folder} holds no class folders; expected {folder}/<class>/*.jpg")
    check_class_count(len(names), str(folder))
    return names


def _check_known_classes(names: list[str], known: list[str], base: Path) -> None:
    extra = sorted(set(names) - set(known))
    unknown = [name for name in extra if _images(Walk(base / "val"), name)]
    if unknown:
        raise UserError(
            f"{base}/val has classes that {base}/train does not have: {', '.join(unknown)}; "
            "add them to train/ or remove them from val/"
        )


def _subfolders(folder: Path) -> list[str]:
    return sorted(e.name for e in folder.iterdir() if e.is_dir() and not e.name.startswith("."))


def _images(walk: Walk, name: str) -> list[str]:
    """Every image below a class folder, sorted, so that an index means the same on every machine."""
    return sorted(
        os.path.join(parent, file) for parent, files in walk(name) for file in files if _is_image(file)
    )


class Walk:
    """Lists folders below ``top``, with those that links lead to; folders with a leading dot are left out.

    Raises :class:`UserError` for a link that leads back to ``top``, above it, or to a folder that was already
    listed, for a broken link (unless it is named like an image, which is then reported as unreadable), and
    for a folder that cannot be listed.
    """

    def __init__(self, top: Path) -> None:
        self.top = str(top)
        real = Path(os.path.realpath(top))
        self._seen = {str(folder): self.top for folder in (real, *real.parents)}  # real path: path

    def __call__(self, start: str = "") -> Iterator[tuple[str, list[str]]]:
        """Each folder from ``top/start`` downwards, and the names of its files."""
        path = os.path.join(self.top, start) if start else self.top
        for parent, folders, files in os.walk(path, onerror=_fail, followlinks=True):
            if parent != self.top:
                self._visit(parent)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in files:
                _check_link(os.path.join(parent, name))
            yield parent, files

    def _visit(self, folder: str) -> None:
        real = os.path.realpath(folder)
        other = self._seen.setdefault(real, folder)
        if other is not folder:
            link = self._link(folder) or self._link(other) or folder
            raise UserError(f"the link {link} leads to {real}, which is also listed as {other}; remove it")

    def _link(self, path: str) -> str | None:
        """The last link on the way from ``top`` to the path."""
        while len(path) > len(self.top):
            if os.path.islink(path):
                return path
            path = os.path.dirname(path)
        return None


def _fail(error: OSError) -> None:
    raise UserError(f"{error.filename} cannot be listed: {error.strerror}") from error


def _check_link(path: str) -> None:
    """Raise for a broken link that may have been a folder of images."""
    name = os.path.basename(path)
    if _is_image(name) or name.startswith("."):
        return
    if os.path.islink(path) and not os.path.exists(path):
        raise UserError(f"the link {path} leads to {os.readlink(path)}, which does not exist; remove it")


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in EXTENSIONS


def _extensions() -> str:
    return " ".join(sorted(EXTENSIONS))
