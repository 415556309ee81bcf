"""The result of ``explain``: regions of an image and their values, to plot, save and load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visualtokens.errors import UserError
from visualtokens.explain import figures, render
from visualtokens.explain.evidence import with_detail
from visualtokens.explain.importance import Floats, combine, scale
from visualtokens.explain.layers import Form, Ints, Layer
from visualtokens.explain.regions import distinct
from visualtokens.explain.render import Box
from visualtokens.explain.subject import Kind
from visualtokens.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from visualtokens.explain.html import Origin


@dataclass(frozen=True, eq=False)
class Variant:
    """The image with only some of its regions."""

    kept: tuple[int, ...]  # the regions that are shown
    score: float  # in the unit of the explanation
    picture: Image.Image  # what the model saw, in the proportions of the photo; removed tokens in grey


@dataclass(frozen=True, eq=False)
class Explanation:
    """K regions of one image, and the value of each for one class.

    The values of ``shapley`` and ``greedy`` sum to ``full - empty``. With ``method="cluster"``, regions are
    clusters that may overlap, and a value is the drop when one of them is masked.
    """

    image: Image.Image  # the original, RGB
    crop_box: Box  # (left, top, right, bottom) of the original that the model saw
    input_size: tuple[int, int]  # (H, W) of the model's input
    probabilities: Floats  # (classes,)
    target: int  # the explained class
    classes: tuple[str, ...] | None  # the class names
    maps: Floats  # (K, h, w) on the patch grid, each from 0 to 1; all 0 for a cluster without a region
    values: Floats  # (K,): how much the score depends on each region
    entropy: Floats  # (K,), in nats: low means concentrated
    order: tuple[int, ...]  # the K regions, most important first
    layer: str  # where the regions come from: a tap, or the layer whose features were grouped
    form: Form  # the kind of grouping: "soft", "tessellation" or "hard"
    regions: Ints  # (h, w): the region with the largest weight on each patch, -1 for none
    truth: int | None = None  # the true class, if known
    attention: Floats | None = None  # (K, h, w), 0 to 1: how the patches attend to each cluster, if they do
    of: str = "groups"  # what `maps` show: "groups" or "attention"
    layers: tuple[Layer, ...] = ()  # all layers that group the patches into tokens, first to last
    shown: int = 6  # how many regions are drawn
    method: str = "cluster"
    hide: str = "black"  # what stands in for hidden regions
    unit: str = "probability"  # of score and values: "probability" or "log-odds"
    against: int | None = None  # the score is the difference from this class
    full: float = 0.0  # the score of the image
    empty: float | None = None  # the score with all regions hidden, if it was measured
    errors: Floats | None = None  # (K,): standard errors of the values, None if they are not estimates
    evaluations: int = 0  # forward passes; a backward pass counts as two
    heat: Floats | None = None  # (h, w): the importance of each patch, if it is known better than by region
    detail: Floats | None = None  # (H, W) of the input: gradient × pixel, if it was computed
    only: Variant | None = None  # the image with its most important regions only
    without: Variant | None = None  # the image without them
    kind: Kind = "image"  # what the score is about: the class of the "image", of an "area", or an "object"
    focus: NDArray[np.bool_] | None = None  # (H, W) of the input: the area or the box of the object

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
        if self.kind == "object":
            return f"Explained object: {target}, where the detector finds it."
        if self.kind == "area":
            assert self.focus is not None
            return f"Explained class: {target}, on the {self.focus.mean():.0%} of the pixels predicted as it."
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
    def score_name(self) -> str:
        """What the score is: "probability", "mean probability", "score × IoU", or a difference."""
        name = {"image": "probability", "area": "mean probability", "object": "score × IoU"}[self.kind]
        if self.unit == "log-odds":
            return "log-odds" if self.against is None else "log ratio"
        return name if self.against is None else f"difference in {name}"

    @property
    def listed(self) -> tuple[int, ...]:
        """The regions that a page numbers: ``top``, and the one that lowers the score most, if any does.

        It is listed if its value is below twice its standard error and 2 % of the score.
        """
        lowest = int(self.values.argmin())
        error = 0.0 if self.errors is None else float(self.errors[lowest])
        least = max(2 * error, 0.02 * abs(self.full - (self.empty or 0.0)))
        lowers = float(self.values[lowest]) < -least and lowest not in self.top
        return (*self.top, lowest) if lowers else self.top

    @property
    def highlighted(self) -> str:
        """The regions of ``only`` by their numbers on a page: "1, 2, 3"."""
        if self.only is None:
            return ""
        number = {k: i for i, k in enumerate(self.listed, start=1)}
        return ", ".join(str(number[k]) for k in sorted(self.only.kept, key=self.order.index) if k in number)

    @property
    def top(self) -> tuple[int, ...]:
        """The regions that are drawn, most important first, without near-duplicates of those before."""
        flat = self.maps.reshape(len(self.maps), -1).astype(np.float64)
        flat = flat - flat.mean(1, keepdims=True)
        unit = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)
        leader = distinct(unit @ unit.T, order=self.order)
        return tuple(k for k in self.order if leader[k] == k)[: self.shown]

    def class_name(self, number: int) -> str:
        """The name of a class, or ``class 7`` without names."""
        return f"class {number}" if self.classes is None else self.classes[number]

    def masked_probability(self, k: int) -> float:
        """The score when cluster k is masked, for the method "cluster"."""
        return float(self.probabilities[self.target] - self.values[k])

    def map_on_image(self, k: int) -> Floats:
        """``(height, width)`` of the original: the map of cluster k inside the crop, 0 outside."""
        return render.place(self.maps[k], self.crop_box, self.image.size)[0]

    def saliency(self) -> Floats:
        """``(H, W)`` of the input, 0 to 1: how much the score depends on each pixel."""
        if self.heat is not None and self.detail is not None:
            return scale(with_detail(self.heat, self.detail))
        return render.upsample(self.patch_saliency(), *self.input_size)

    def patch_saliency(self) -> Floats:
        """``(h, w)`` on the patch grid, 0 to 1: how much the score depends on each patch.

        Unless ``heat`` is known, the maps weighted by values, per patch in the case of disjoint regions.
        """
        if self.heat is not None:
            return scale(self.heat)
        if self.method == "cluster":
            return combine(self.maps, self.values)
        return scale(np.tensordot(self.values / self.maps.sum((1, 2)), self.maps, axes=1))

    def plot(self) -> Figure:
        """A matplotlib figure of the image and its top regions or clusters."""
        return figures.figure(self)

    def plot_layers(self) -> Figure:
        """A matplotlib figure of the patches that each token represents, layer by layer."""
        return figures.layers_figure(self)

    def animate(self, path: str | Path) -> Path:
        """Write an animation (.webp or .gif) of the patches flowing together into tokens, layer by layer."""
        from visualtokens.explain.animation import write_animation  # which imports this module

        return write_animation(path, self)

    def save(
        self,
        path: str | Path,
        *,
        origin: Origin | None = None,
        beside: Explanation | None = None,
        interactive: bool = False,
    ) -> Path:
        """Write a figure (.png), a page (.html) or the data (.npz, for :meth:`load`).

        ``origin`` is shown in the footer of a page; ``beside`` is the explanation of another class of the
        same image, such as the true one, that the page shows as well. On an ``interactive`` page, pointing at
        a patch lights its token in every layer.
        """
        path = Path(path)
        if path.suffix not in (".png", ".html", ".npz"):
            raise UserError(f"cannot save as {path.name!r}; end the name in .png, .html or .npz")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            figure = self.plot()
            write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=160, format="png"))
        elif path.suffix == ".html":
            from visualtokens.explain.html import write_page
            from visualtokens.explain.page import explanation_page  # which imports this module

            page = explanation_page(self, origin=origin, beside=beside, interactive=interactive)
            write_page(path, page)
        else:
            write_atomically(path, lambda temporary: _save_npz(self, temporary))
        return path

    def _repr_html_(self) -> str:
        """What a notebook displays: the class, the values and the token view."""
        from visualtokens.explain.page import explanation_frame  # which imports this module

        return explanation_frame(self)

    @staticmethod
    def load(path: str | Path) -> Explanation:
        """Read what :meth:`save` wrote to a .npz file."""
        return _load_npz(path)


NO_CLASS = -1  # stands for None in a .npz file
SCALARS = ("method", "hide", "unit", "full", "evaluations", "kind")
VARIANTS = ("only", "without")


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
        values=e.values,
        entropy=e.entropy,
        order=np.array(e.order),
        layer=np.array(e.layer),
        form=np.array(e.form),
        regions=e.regions,
        attention=_optional(e.attention),
        of=np.array(e.of),
        layer_names=np.array([layer.name for layer in e.layers], dtype=np.str_),
        layer_forms=np.array([layer.form for layer in e.layers], dtype=np.str_),
        layer_tokens=np.array([layer.tokens for layer in e.layers], dtype=np.int64),
        shown=np.array(e.shown),
        against=np.array(NO_CLASS if e.against is None else e.against),
        empty=_optional(None if e.empty is None else np.array([e.empty])),
        errors=_optional(e.errors),
        heat=_optional(e.heat),
        detail=_optional(e.detail),
        focus=_optional(e.focus),
        **{name: np.array(getattr(e, name)) for name in SCALARS},
    )
    for name in VARIANTS:
        if (variant := getattr(e, name)) is not None:
            arrays |= {
                f"{name}_kept": np.array(variant.kept, dtype=np.int64),
                f"{name}_score": np.array(variant.score),
                f"{name}_picture": np.asarray(variant.picture),
            }
    for i, layer in enumerate(e.layers):
        arrays[f"layer_{i}"] = layer.assignment
        if layer.maps is not None:
            arrays[f"layer_{i}_maps"] = layer.maps
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
            values=data["values"],
            entropy=data["entropy"],
            order=tuple(data["order"].tolist()),
            layer=str(data["layer"]),
            form=data["form"].item(),
            regions=data["regions"],
            attention=_given(data["attention"]),
            of=str(data["of"]),
            layers=_load_layers(data),
            shown=int(data["shown"]),
            against=None if int(data["against"]) == NO_CLASS else int(data["against"]),
            empty=data["empty"].item() if data["empty"].size else None,
            errors=_given(data["errors"]),
            heat=_given(data["heat"]),
            detail=_given(data["detail"]) if "detail" in data else None,
            focus=_given(data["focus"]),
            only=_load_variant(data, "only"),
            without=_load_variant(data, "without"),
            **{name: data[name].item() for name in SCALARS},
        )


def _optional(array: NDArray | None) -> NDArray:
    return np.empty(0, dtype=np.float32) if array is None else array


def _given(array: NDArray) -> NDArray | None:
    return array if array.size else None


def _load_variant(data: Mapping[str, NDArray], name: str) -> Variant | None:
    if f"{name}_kept" not in data:
        return None
    kept, picture = data[f"{name}_kept"].tolist(), Image.fromarray(data[f"{name}_picture"])
    return Variant(tuple(kept), float(data[f"{name}_score"]), picture)


def _load_layers(data: Mapping[str, NDArray]) -> tuple[Layer, ...]:
    described = zip(data["layer_names"], data["layer_forms"], data["layer_tokens"], strict=True)
    return tuple(
        Layer(str(name), form.item(), int(tokens), data[f"layer_{i}"], data.get(f"layer_{i}_maps"))
        for i, (name, form, tokens) in enumerate(described)
    )
