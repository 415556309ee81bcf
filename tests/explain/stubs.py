"""Small models with a known answer, and slow, obvious references."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from visualtokens.data import Preprocess
from visualtokens.explain import Explanation
from visualtokens.grouping import Tap

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def preprocess(height: int, width: int, *, crop: float = 1.0) -> Preprocess:
    return Preprocess((height, width), MEAN, STD, crop)


class FixedMaps(nn.Module):
    """Its clusters are the given maps (K, h, w) whatever the image; ``score`` is the logit of class 1."""

    def __init__(self, maps: Tensor) -> None:
        super().__init__()
        self.register_buffer("maps", maps)
        self.tap = Tap()
        self.dropout = nn.Dropout(0.5)
        self.batches: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.batches.append(len(x))
        maps: Tensor = self.get_buffer("maps")
        self.tap(maps.flatten(1).T.expand(len(x), -1, -1), tuple(maps.shape[1:]))
        score = self.score(self.dropout(self.picture(x)))  # (B,)
        return torch.stack((torch.zeros_like(score), score), dim=1)

    def picture(self, x: Tensor) -> Tensor:
        """From the normalised input back to 0 (black) to 1."""
        return x * x.new_tensor(STD).view(3, 1, 1) + x.new_tensor(MEAN).view(3, 1, 1)

    def score(self, picture: Tensor) -> Tensor:
        return picture.mean((1, 2, 3)) * 4


class OneRegion(FixedMaps):
    """Says class 1 as far as one rectangle of the picture is bright, and looks nowhere else."""

    def __init__(self, maps: Tensor, rows: slice, columns: slice) -> None:
        super().__init__(maps)
        self.region = rows, columns

    def score(self, picture: Tensor) -> Tensor:
        return 8 * picture[:, :, self.region[0], self.region[1]].mean((1, 2, 3)) - 2


class Learned(nn.Module):
    """Two layers of clusters that depend on the image, and a nonlinear decision; random weights."""

    def __init__(self, *, clusters: int = 5, classes: int = 3) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, stride=4)
        self.norm = nn.BatchNorm2d(8)
        self.assign = nn.ModuleList(nn.Conv2d(8, clusters, 1) for _ in range(2))
        self.taps = nn.ModuleList(Tap() for _ in range(2))
        self.head = nn.Linear(8 * clusters, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x)).tanh() * 3  # (B, 8, h, w)
        tokens = x.new_zeros(())
        for assign, tap in zip(self.assign, self.taps, strict=True):
            weights = assign(x).flatten(2).softmax(2).mT  # (B, N, K)
            tap(weights, tuple(x.shape[2:]))
            tokens = tokens + weights.mT @ x.flatten(2).mT  # (B, K, 8)
        return self.head(tokens.flatten(1)) * 4


def quarters(height: int = 2, width: int = 2) -> Tensor:
    """One cluster per cell: (h·w, h, w)."""
    return torch.eye(height * width).view(-1, height, width)


def upsample(cells: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear between the centres of the cells, one pixel at a time."""
    rows, columns = cells.shape
    out = np.zeros((height, width))
    for i in range(height):
        for j in range(width):
            y = min(max((i + 0.5) * rows / height - 0.5, 0), rows - 1)
            x = min(max((j + 0.5) * columns / width - 0.5, 0), columns - 1)
            top, left = math.floor(y), math.floor(x)
            bottom, right = min(top + 1, rows - 1), min(left + 1, columns - 1)
            dy, dx = y - top, x - left
            above = (1 - dx) * cells[top, left] + dx * cells[top, right]
            below = (1 - dx) * cells[bottom, left] + dx * cells[bottom, right]
            out[i, j] = (1 - dy) * above + dy * below
    return out


def explanation(**changes: object) -> Explanation:
    """A small one, written by hand."""
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    fields: dict = dict(
        image=Image.fromarray(pixels),
        crop_box=(5.0, 0.0, 25.0, 20.0),
        input_size=(16, 16),
        probabilities=np.array([0.05, 0.85, 0.1], dtype=np.float32),
        target=1,
        classes=None,
        maps=np.eye(4, dtype=np.float32).reshape(4, 2, 2),
        importance=np.array([0.02, 0.42, -0.05, 0.001], dtype=np.float32),
        entropy=np.array([0.0, 0.5, 0.1, 0.2], dtype=np.float32),
        order=(1, 0, 3, 2),
        layer="blocks.0.tap",
        shown=3,
    )
    return Explanation(**(fields | changes))
