"""The result of ``explain``: cluster maps and their importance, to plot, save and load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visualtokens.errors import UserError
from visualtokens.explain import render
from visualtokens.explain.importance import Floats, combine
from visualtokens.explain.layers import Form, Ints, Layer
from visualtokens.explain.render import Box
from visualtokens.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from visualtokens.explain.html import Origin


@dataclass(frozen=True, eq=False)
class Explanation:
    """The K clusters of one layer on one image, and the importance of each to one class."""

    image: Image.Image  # the original, RGB
    crop_box: Box  # (left, top, right, bottom) of the original that the model saw
    input_size: tuple[int, int]  # (H, W) of the model's input
    probabilities: Floats  # (classes,)
    target: int  # the explained class
    classes: tuple[str, ...] | None  # the class names
    maps: Floats  # (K, h, w) on the patch grid, each from 0 to 1; all 0 for a cluster without a region
    importance: Floats  # (K,): the drop of the target's probability when the cluster is masked
    entropy: Floats  # (K,), in nats: low means concentrated
    order: tuple[int, ...]  # the K clusters by decreasing importance
    layer: str  # the name of the tap that recorded the grouping
    form: Form  # the kind of grouping: "soft", "tessellation" or "hard"
    assignment: Ints  # (h, w): the cluster with the largest weight on each patch, -1 for none
    truth: int | None = None  # the true class, if known
    attention: Floats | None = None  # (K, h, w), 0 to 1: how the patches attend to each cluster, if they do
    of: str = "groups"  # what `maps` show: "groups" or "attention"
    layers: tuple[Layer, ...] = ()  # all layers that divide the patches among tokens, first to last
    shown: int = 6  # how many clusters are drawn

    @property
    def predicted(self) -> int:
        """The most probable class."""
        return int(self.probabilities.argmax())

    @property
    def target_is_prediction(self) -> bool:
        """Whether the explained class is the predicted one, as it is by default."""
        return self.target == self.predicted

    @property
    def about(self) -> str:
        """One sentence: the explained class, and whether it is the predicted and the true class."""
        target, predicted = self.class_name(self.target), self.class_name(self.predicted)
        if not self.target_is_prediction:
            relation = ", the true class" if self.truth == self.target else ""
            return f"Explained class: {target}{relation}; the model predicts {predicted}."
        if self.truth is None:
            return f"Explained class: {target}, as predicted; the true class is unknown."
        if self.truth == self.predicted:
            return f"Explained class: {target}, as predicted and correct."
        truth = self.class_name(self.truth)
        return f"Explained class: {target}, as predicted but wrong; the true class is {truth}."

    @property
    def top(self) -> tuple[int, ...]:
        """The clusters that are drawn, by decreasing importance."""
        return self.order[: self.shown]

    def class_name(self, number: int) -> str:
        """The name of a class, or ``class 7`` without names."""
        return f"class {number}" if self.classes is None else self.classes[number]

    def masked_probability(self, k: int) -> float:
        """The target's probability when cluster k is masked."""
        return float(self.probabilities[self.target] - self.importance[k])

    def map_on_image(self, k: int) -> Floats:
        """``(height, width)`` of the original: the map of cluster k inside the crop, 0 outside."""
        return render.place(self.maps[k], self.crop_box, self.image.size)[0]

    def saliency(self) -> Floats:
        """``(h, w)`` on the patch grid, 0 to 1: the maps of all clusters weighted by importance."""
        return combine(self.maps, self.importance)

    def plot(self) -> Figure:
        """A matplotlib figure of the image and its top clusters."""
        return render.figure(self)

    def plot_layers(self) -> Figure:
        """A matplotlib figure of the patches that each token represents, layer by layer."""
        return render.layers_figure(self)

    def save(self, path: str | Path, *, origin: Origin | None = None) -> Path:
        """Write a figure (.png), a page (.html) or the data (.npz, for :meth:`load`).

        ``origin`` is shown in the footer of a page.
        """
        path = Path(path)
        if path.suffix not in (".png", ".html", ".npz"):
            raise UserError(f"cannot save as {path.name!r}; end the name in .png, .html or .npz")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            figure = self.plot()
            write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=160, format="png"))
        elif path.suffix == ".html":
            from visualtokens.explain.html import explanation_page, write_page  # which import this module

            write_page(path, explanation_page(self, origin=origin))
        else:
            write_atomically(path, lambda temporary: _save_npz(self, temporary))
        return path

    @staticmethod
    def load(path: str | Path) -> Explanation:
        """Read what :meth:`save` wrote to a .npz file."""
        return _load_npz(path)


NO_CLASS = -1  # stands for None in a .npz file


def _save_npz(e: Explanation, path: Path) -> None:
    arrays: dict[str, NDArray] = dict(
        image=np.asarray(e.image),
        crop_box=np.array(e.crop_box),
        input_size=np.array(e.input_size),
        probabilities=e.probabilities,
        target=np.array(e.target),
        truth=np.array(NO_CLASS if e.truth is None else e.truth),
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
        layer_names=np.array([layer.name for layer in e.layers], dtype=np.str_),
        layer_forms=np.array([layer.form for layer in e.layers], dtype=np.str_),
        layer_tokens=np.array([layer.tokens for layer in e.layers], dtype=np.int64),
        shown=np.array(e.shown),
    )
    arrays |= {f"layer_{i}": layer.assignment for i, layer in enumerate(e.layers)}
    with path.open("wb") as file:  # given a name, numpy would append .npz
        np.savez_compressed(file, allow_pickle=False, **arrays)


def _load_npz(path: str | Path) -> Explanation:
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
            truth=None if truth == NO_CLASS else truth,
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
            layers=_load_layers(data),
            shown=int(data["shown"]),
        )


def _load_layers(data: Mapping[str, NDArray]) -> tuple[Layer, ...]:
    described = zip(data["layer_names"], data["layer_forms"], data["layer_tokens"], strict=True)
    return tuple(
        Layer(str(name), form.item(), int(tokens), data[f"layer_{i}"])
        for i, (name, form, tokens) in enumerate(described)
    )
