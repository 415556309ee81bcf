"""What identifies the data of a run, so that resuming notices other data behind the same name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from visualtokens.data import ImageDataset, ImageStream
from visualtokens.progress import count as number_of
from visualtokens.tasks.task import Training

Fingerprint = dict[str, Any]


def fingerprint(training: Training[Any]) -> Fingerprint:
    """Return the classes, and of each split the number of images and digests of their names and labels.

    Opens no image. The shape of images in memory counts as a part of their labels.
    """
    splits = {"train": training.train_set, "val": training.val_set}
    return {"classes": list(training.classes)} | {name: _of_split(split) for name, split in splits.items()}


def _of_split(dataset: Any) -> dict[str, Any]:
    labels = hashlib.sha256()
    if isinstance(dataset, ImageDataset):  # others have no single label per image
        labels.update(np.asarray(getattr(dataset, "labels", ()), dtype=np.int64).tobytes())
    labels.update(str(getattr(getattr(dataset, "images", None), "shape", ())).encode())
    names = hashlib.sha256()
    for name in _names(dataset):
        names.update(name.encode("utf-8", "surrogateescape") + b"\0")
    return {"images": len(dataset), "names": names.hexdigest(), "labels": labels.hexdigest()}


def _names(dataset: Any) -> Iterable[str]:
    """Return the files of the dataset, which may be shards, or else the names of its items."""
    if hasattr(dataset, "files"):
        return map(str, dataset.files)
    if isinstance(dataset, ImageStream) or not hasattr(dataset, "path"):
        return ()
    return map(dataset.path, range(len(dataset)))


def difference(now: Fingerprint, before: Fingerprint) -> str | None:
    """Return what changed, in a few words; None if nothing did."""
    if now["classes"] != before["classes"]:
        return _other_classes(now["classes"], before["classes"])
    for split in ("train", "val"):
        a, b = now[split], before[split]
        if a["images"] != b["images"]:
            return f"{split} has {number_of(a['images'], 'image')} instead of {b['images']:,}"
        for what, words in (("names", "files"), ("labels", "labels")):
            if a[what] != b[what]:
                return f"{split} has other {words}"
    return None


def _other_classes(now: Sequence[str], before: Sequence[str]) -> str:
    same = len(now) == len(before)
    changed = "other classes" if same else f"{number_of(len(now), 'class')} instead of {len(before)}"
    new, missing = sorted(set(now) - set(before)), sorted(set(before) - set(now))
    shown = [f"{_brief(names)} {word}" for names, word in ((new, "new"), (missing, "missing")) if names]
    return f"{changed}: {', '.join(shown) or 'in another order'}"


def _brief(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")
