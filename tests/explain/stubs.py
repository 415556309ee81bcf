"""Small models with a known answer, and slow, obvious references."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from visualtokens.data import Preprocess
from visualtokens.explain import Explanation
from visualtokens.grouping import Grouping, Tap

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


class SuperTokens(nn.Module):
    """Shares each patch of 4×4 pixels among up to nine cells of 2×2 patches, and looks at one quarter.

    ``index`` names cells outside the map by -1, as the sparse form of a grouping may.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tap = Tap()
        self.embed = nn.Conv2d(3, 4, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        features = self.embed(x)  # (B, 4, h, w)
        weights, index, tokens = neighbour_weights(features)
        self.tap(weights, (x.shape[2] // 4, x.shape[3] // 4), torch.ones(len(x), tokens), index)
        score = x[:, :, : x.shape[2] // 2, : x.shape[3] // 2].mean((1, 2, 3))
        return torch.stack((score, -score), dim=1)


def neighbour_weights(features: Tensor) -> tuple[Tensor, Tensor, int]:
    """Random weights ``(B, N, 9)`` for the cells around each patch, their numbers, and how many there are."""
    b, _, h, w = features.shape
    rows, columns = h // 2, w // 2
    index = torch.full((h * w, 9), -1)
    for n in range(h * w):
        for j in range(9):
            row, column = n // w // 2 + j // 3 - 1, n % w // 2 + j % 3 - 1
            if 0 <= row < rows and 0 <= column < columns:
                index[n, j] = row * columns + column
    logits = features.flatten(2).mT.repeat(1, 1, 3)[..., :9] * 3  # (B, N, 9)
    logits = logits + torch.nn.functional.one_hot(torch.tensor(4), 9) * 2  # mostly its own cell
    weights = logits.masked_fill(index < 0, -torch.inf).softmax(2)
    return weights, index.expand(b, -1, -1), rows * columns


class Merging(nn.Module):
    """Three layers that leave fewer and fewer tokens of a 4×4 grid, as their assignments say.

    Every tap tells the token of each patch. With ``rows`` it tells that of each token of the layer before,
    as a row without a place in the image.
    """

    ASSIGNMENTS = (
        [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 4],  # 16 patches to 5 tokens
        [0, 1, 2, 3, 4],  # nothing
        [0, 1, 0, 1, -1],  # two pairs, and one is dropped
    )
    TOKENS = (5, 5, 2)

    def __init__(self, *, rows: bool = False) -> None:
        super().__init__()
        self.rows = rows
        self.taps = nn.ModuleList(Tap() for _ in self.ASSIGNMENTS)

    def forward(self, x: Tensor) -> Tensor:
        source: list[int] = list(range(16))
        for tap, assignment, tokens in zip(self.taps, self.ASSIGNMENTS, self.TOKENS, strict=True):
            source = [-1 if s < 0 else assignment[s] for s in source]
            told = assignment if self.rows else source
            grid = (4, 4) if len(told) == 16 else (1, len(told))
            found = Grouping.hard_from(torch.tensor(told).expand(len(x), -1), tokens, grid)
            tap(found.weights, found.grid, found.size, found.index)
        score = x[:, :, -4:].mean((1, 2, 3))
        return torch.stack((score, -score), dim=1)

    @classmethod
    def slow(cls, depth: int) -> list[list[int]]:
        """The token of each patch after ``depth`` + 1 layers, (4, 4)."""
        out = []
        for patch in range(16):
            token = patch
            for assignment in cls.ASSIGNMENTS[: depth + 1]:
                token = -1 if token < 0 else assignment[token]
            out.append(token)
        return [out[i : i + 4] for i in range(0, 16, 4)]


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
        form="soft",
        assignment=np.arange(4).reshape(2, 2),
        shown=3,
    )
    return Explanation(**(fields | changes))
