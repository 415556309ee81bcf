"""Explanations as .npz files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visualtokens.explain.explanation import Explanation
from visualtokens.explain.layers import Layer

NOBODY = -1  # no class, where there may be none


def save_npz(explanation: Explanation, path: Path) -> None:
    e = explanation
    arrays: dict[str, NDArray] = dict(
        image=np.asarray(e.image),
        crop_box=np.array(e.crop_box),
        input_size=np.array(e.input_size),
        probabilities=e.probabilities,
        target=np.array(e.target),
        truth=np.array(NOBODY if e.truth is None else e.truth),
        classes=np.array(e.classes or (), dtype=np.str_),
        maps=e.maps,
        importance=e.importance,
        entropy=e.entropy,
        order=np.array(e.order),
        layer=np.array(e.layer),
        form=np.array(e.form),
        assignment=e.assignment,
        attention=np.empty(0, dtype=np.float32) if e.attention is None else e.attention,
        of=np.array(e.of),
        layer_names=np.array([one.name for one in e.layers], dtype=np.str_),
        layer_forms=np.array([one.form for one in e.layers], dtype=np.str_),
        layer_tokens=np.array([one.tokens for one in e.layers], dtype=np.int64),
        shown=np.array(e.shown),
    )
    arrays |= {f"layer_{i}": one.assignment for i, one in enumerate(e.layers)}
    np.savez_compressed(path, allow_pickle=False, **arrays)


def load_npz(path: str | Path) -> Explanation:
    with np.load(path, allow_pickle=False) as data:
        left, top, right, bottom = data["crop_box"].tolist()
        height, width = data["input_size"].tolist()
        truth = int(data["truth"])
        return Explanation(
            image=Image.fromarray(data["image"]),
            crop_box=(left, top, right, bottom),
            input_size=(height, width),
            probabilities=data["probabilities"],
            target=int(data["target"]),
            truth=None if truth == NOBODY else truth,
            classes=tuple(data["classes"].tolist()) or None,
            maps=data["maps"],
            importance=data["importance"],
            entropy=data["entropy"],
            order=tuple(data["order"].tolist()),
            layer=str(data["layer"]),
            form=data["form"].item(),
            assignment=data["assignment"],
            attention=data["attention"] if data["attention"].size else None,
            of=str(data["of"]),
            layers=_layers(data),
            shown=int(data["shown"]),
        )


def _layers(data: Mapping[str, NDArray]) -> tuple[Layer, ...]:
    described = zip(data["layer_names"], data["layer_forms"], data["layer_tokens"], strict=True)
    return tuple(
        Layer(str(name), form.item(), int(tokens), data[f"layer_{i}"])
        for i, (name, form, tokens) in enumerate(described)
    )
