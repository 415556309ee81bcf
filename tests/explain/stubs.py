"""Models with known clusters, a hand-written explanation, slow references, and a parser of HTML pages."""

from __future__ import annotations

import math
from functools import partial
from html.parser import HTMLParser

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from visualtokens.data import Preprocess
from visualtokens.explain import Explanation, explain
from visualtokens.grouping import Grouping, Tap

explain_clusters = partial(explain, method="cluster")

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def preprocess(height: int, width: int, *, crop: float = 1.0) -> Preprocess:
    return Preprocess((height, width), MEAN, STD, crop)


def noise_image(width: int, height: int, *, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(60, 256, (height, width, 3), dtype=np.uint8))


class FixedMaps(nn.Module):
    """Its clusters are the given maps (K, h, w) for every image; ``score`` is the logit of class 1."""

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
        score = self.score(self.dropout(self.pixels(x)))  # (B,)
        return torch.stack((torch.zeros_like(score), score), dim=1)

    def pixels(self, x: Tensor) -> Tensor:
        """Undo the normalisation: 0 is black."""
        return x * x.new_tensor(STD).view(3, 1, 1) + x.new_tensor(MEAN).view(3, 1, 1)

    def score(self, pixels: Tensor) -> Tensor:
        return pixels.mean((1, 2, 3)) * 4


class OneRegion(FixedMaps):
    """The logit of class 1 depends on the brightness of one rectangle only."""

    def __init__(self, maps: Tensor, rows: slice, columns: slice) -> None:
        super().__init__(maps)
        self.region = rows, columns

    def score(self, pixels: Tensor) -> Tensor:
        return 8 * pixels[:, :, self.region[0], self.region[1]].mean((1, 2, 3)) - 2


class SoftClusters(nn.Module):
    """Two layers of clusters that depend on the image, and a nonlinear classifier; random weights."""

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
    """Shares each patch of 4×4 pixels among the up to nine cells of 2×2 patches around it."""

    def __init__(self) -> None:
        super().__init__()
        self.tap = Tap()
        self.embed = nn.Conv2d(3, 9, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.embed(x)  # (B, 9, h, w)
        h, w = logits.shape[2:]
        rows, columns = h // 2, w // 2
        index = torch.full((h * w, 9), -1)  # -1: a cell outside the grid
        for n in range(h * w):
            for j in range(9):
                row, column = n // w // 2 + j // 3 - 1, n % w // 2 + j % 3 - 1
                if 0 <= row < rows and 0 <= column < columns:
                    index[n, j] = row * columns + column
        weights = logits.flatten(2).mT.masked_fill(index < 0, -torch.inf).softmax(2)  # (B, N, 9)
        self.tap(weights, (h, w), torch.ones(len(x), rows * columns), index.expand(len(x), -1, -1))
        score = x.mean((1, 2, 3))
        return torch.stack((score, -score), dim=1)


class HardTokens(nn.Module):
    """One layer per assignment (4, 4) of patches to tokens."""

    def __init__(self, *assignments: list[int], tokens: list[int]) -> None:
        super().__init__()
        self.assignments, self.tokens = assignments, tokens
        self.taps = nn.ModuleList(Tap() for _ in assignments)

    def forward(self, x: Tensor) -> Tensor:
        for tap, assignment, tokens in zip(self.taps, self.assignments, self.tokens, strict=True):
            grouping = Grouping.hard_from(torch.tensor(assignment).expand(len(x), -1), tokens, (4, 4))
            tap(grouping.weights, grouping.grid, grouping.size, grouping.index)
        score = x.mean((1, 2, 3))
        return torch.stack((score, -score), dim=1)


def one_hot_maps(height: int = 2, width: int = 2) -> Tensor:
    """One cluster per patch: (h·w, h, w)."""
    return torch.eye(height * width).view(-1, height, width)


def slow_upsample(heat: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear interpolation between cell centres, one pixel at a time."""
    rows, columns = heat.shape
    out = np.zeros((height, width))
    for i in range(height):
        for j in range(width):
            y = min(max((i + 0.5) * rows / height - 0.5, 0), rows - 1)
            x = min(max((j + 0.5) * columns / width - 0.5, 0), columns - 1)
            top, left = math.floor(y), math.floor(x)
            bottom, right = min(top + 1, rows - 1), min(left + 1, columns - 1)
            dy, dx = y - top, x - left
            above = (1 - dx) * heat[top, left] + dx * heat[top, right]
            below = (1 - dx) * heat[bottom, left] + dx * heat[bottom, right]
            out[i, j] = (1 - dy) * above + dy * below
    return out


def explanation(**changes: object) -> Explanation:
    """A small explanation, written by hand."""
    fields: dict = dict(
        image=noise_image(30, 20),
        crop_box=(5.0, 0.0, 25.0, 20.0),
        input_size=(16, 16),
        probabilities=np.array([0.05, 0.85, 0.1], dtype=np.float32),
        target=1,
        classes=None,
        maps=np.eye(4, dtype=np.float32).reshape(4, 2, 2),
        values=np.array([0.02, 0.42, -0.05, 0.001], dtype=np.float32),
        entropy=np.array([0.0, 0.5, 0.1, 0.2], dtype=np.float32),
        order=(1, 0, 3, 2),
        layer="blocks.0.tap",
        form="soft",
        regions=np.arange(4).reshape(2, 2),
        shown=3,
        full=0.85,
    )
    return Explanation(**(fields | changes))


class Page(HTMLParser):
    """An HTML document: checks that tags are closed in order, and collects tags and text."""

    VOID = frozenset({"meta", "img", "br", "hr", "input", "wbr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)

    def find(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def check_self_contained(text: str) -> Page:
    """Parse a page and check that it loads nothing, runs nothing and describes its images."""
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert page.find("html")[0]["lang"] == "en"
    assert len(page.find("title")) == len(page.find("h1")) == 1
    assert {a.get("name") for a in page.find("meta")} >= {"viewport", "color-scheme"}
    assert not page.find("script")
    assert not page.find("link")
    assert not page.find("iframe")
    assert "@import" not in text
    assert "url(" not in text
    anchors = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(anchors) == len(set(anchors))
    for tag, attrs in page.tags:
        for key, value in attrs.items():
            assert not key.startswith("on")
            if key in ("src", "href", "srcset", "data"):
                assert value is not None
                inside = key == "href" and value.removeprefix("#") in anchors
                assert inside or value.startswith("data:image/"), (tag, value[:80])
    for img in page.find("img"):
        assert img["alt"]
    return page
