"""What an explanation holds, and how it is looked at and kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from visualtokens.errors import UserError
from visualtokens.explain.geometry import Box, Floats, place

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Explanation:
    """Which clusters one layer formed on one image, and how much each mattered to one class."""

    image: Image.Image  # the original, RGB
    crop_box: Box  # (left, top, right, bottom) of the original that the model saw
    input_size: tuple[int, int]  # (H, W) of the model's input
    probabilities: Floats  # (classes,)
    target: int  # the class that is explained
    classes: tuple[str, ...] | None  # their names
    maps: Floats  # (K, h, w) on the patch grid, each from 0 to 1; all 0 where a cluster has no region
    importance: Floats  # (K,): the drop of the target's probability when the cluster is blacked out
    entropy: Floats  # (K,), in nats: low is concentrated
    order: tuple[int, ...]  # the K clusters, most important first
    layer: str  # the name of the tap that recorded the grouping
    shown: int = 6  # how many clusters are drawn

    @property
    def predicted(self) -> int:
        """The most probable class."""
        return int(self.probabilities.argmax())

    @property
    def target_is_prediction(self) -> bool:
        """Whether the explained class is also the predicted one, as it is by default."""
        return self.target == self.predicted

    @property
    def top(self) -> tuple[int, ...]:
        """The clusters that are drawn, most important first."""
        return self.order[: self.shown]

    def class_name(self, number: int) -> str:
        return f"class {number}" if self.classes is None else self.classes[number]

    def masked_probability(self, k: int) -> float:
        """The target's probability when cluster k is blacked out."""
        return float(self.probabilities[self.target] - self.importance[k])

    def map_on_image(self, k: int) -> Floats:
        """``(height, width)`` of the original: cluster k from 0 to 1 inside the crop, 0 outside."""
        return place(self.maps[k], self.crop_box, self.image.size)[0]

    def plot(self) -> Figure:
        """A matplotlib figure of the image and its top clusters."""
        from visualtokens.explain.render import figure

        return figure(self)

    def save(self, path: str | Path) -> Path:
        """Write a picture (.png), a page (.html) or the data (.npz, for :meth:`load`)."""
        path = Path(path)
        if path.suffix not in (".png", ".html", ".npz"):
            raise UserError(f"cannot save as {path.name!r}; end the name in .png, .html or .npz")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            self.plot().savefig(path, dpi=160)
        elif path.suffix == ".html":
            from visualtokens.explain.report import explanation_page

            path.write_text(explanation_page(self), encoding="utf-8")
        else:
            self._save_npz(path)
        return path

    def _save_npz(self, path: Path) -> None:
        np.savez_compressed(
            path,
            image=np.asarray(self.image),
            crop_box=np.array(self.crop_box),
            input_size=np.array(self.input_size),
            probabilities=self.probabilities,
            target=np.array(self.target),
            classes=np.array(self.classes or (), dtype=np.str_),
            maps=self.maps,
            importance=self.importance,
            entropy=self.entropy,
            order=np.array(self.order),
            layer=np.array(self.layer),
            shown=np.array(self.shown),
        )

    @classmethod
    def load(cls, path: str | Path) -> Explanation:
        """Read what :meth:`save` wrote to a .npz file."""
        with np.load(path, allow_pickle=False) as data:
            left, top, right, bottom = data["crop_box"].tolist()
            height, width = data["input_size"].tolist()
            return cls(
                image=Image.fromarray(data["image"]),
                crop_box=(left, top, right, bottom),
                input_size=(height, width),
                probabilities=data["probabilities"],
                target=int(data["target"]),
                classes=tuple(data["classes"].tolist()) or None,
                maps=data["maps"],
                importance=data["importance"],
                entropy=data["entropy"],
                order=tuple(data["order"].tolist()),
                layer=str(data["layer"]),
                shown=int(data["shown"]),
            )
