"""Datasets by the name a command line gives them."""

from __future__ import annotations

import re
from pathlib import Path

from visualtokens.data.arrays import NpzImages
from visualtokens.data.base import ImageDataset, Split
from visualtokens.data.digits import Digits
from visualtokens.data.folder import ImageFolder
from visualtokens.data.hub import HubImages
from visualtokens.data.scenes import DigitScenes
from visualtokens.data.shards import TarShards
from visualtokens.errors import UserError, unknown

KINDS = ("digits", "digit_scenes", "folder", "npz", "wds", "hfds")


def open_dataset(spec: str, split: Split, *, seed: int = 0) -> ImageDataset:
    """The dataset that ``spec`` names.

    ======================  =================================================================
    ``digits``              scikit-learn's handwritten digits, 8×8
    ``digit_scenes``        those digits on cluttered canvases of 128×128
    ``digit_scenes:96x160`` the same, 96 high and 160 wide
    ``folder:/path``        ``/path/train/<class>/*.jpg`` and ``/path/val/<class>/*.jpg``
    ``npz:/path/file.npz``  uint8 arrays, see :class:`~visualtokens.data.arrays.NpzImages`
    ``wds:/path``           tar shards, see :class:`~visualtokens.data.shards.TarShards`
    ``hfds:name``           of the Hugging Face Hub, see :class:`~visualtokens.data.hub.HubImages`
    ======================  =================================================================

    ``seed`` decides which scenes ``digit_scenes`` makes; nothing in the other datasets is random.
    """
    kind, _, rest = spec.partition(":")
    if kind == "digits":
        if rest:
            raise UserError(f"{spec!r}: digits has no options; write 'digits'")
        return Digits(split)
    if kind == "digit_scenes":
        return DigitScenes(split, size=_size(spec, rest) if rest else (128, 128), seed=seed)
    if kind in KINDS and not rest:
        raise UserError(f"{spec!r} names no path; write '{kind}:/path'")
    if kind == "folder":
        return ImageFolder(rest, split)
    if kind == "npz":
        return NpzImages(rest, split)
    if kind == "wds":
        return TarShards(rest, split)
    if kind == "hfds":
        return HubImages(rest, split)
    if Path(spec).expanduser().exists():
        prefix = "npz" if spec.endswith(".npz") else "folder"
        raise UserError(f"{spec!r} is a path without its kind; write '{prefix}:{spec}'")
    raise unknown("dataset", kind, KINDS)


def _size(spec: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None:
        raise UserError(
            f"{spec!r}: {text!r} is not a size; write HEIGHTxWIDTH, such as 'digit_scenes:96x160'"
        )
    return int(match[1]), int(match[2])
