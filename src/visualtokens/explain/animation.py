"""Layers as an animation: the patches of an image flow together into tokens."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from visualtokens.errors import UserError
from visualtokens.explain.explanation import Explanation
from visualtokens.explain.importance import Floats
from visualtokens.explain.layers import Ints
from visualtokens.explain.render import drawn_layers
from visualtokens.files import write_atomically

FORMATS = {".webp": "WEBP", ".gif": "GIF"}
SIDE = 448  # pixels of the longer side
STEPS = 10  # frames between two layers
PAUSE = 6  # frames on a layer
SECOND_PER_FRAME = 0.06
BACKGROUND = (22, 22, 26)
GAP = 0.94  # the share of its cell that a token fills, so that neighbours can be told apart


@dataclass(frozen=True)
class Stage:
    """Where the patches are drawn at one layer: all patches of a token at its centre, in its colour."""

    centres: Floats  # (N, 2): x, y in pixels
    sides: Floats  # (N,): of the square of a token, whose area is that of its patches
    colours: Floats  # (N, 3), 0 to 255
    visible: Floats  # (N,): 0 for dropped patches


def write_animation(path: str | Path, explanation: Explanation) -> Path:
    """Write the animation as .webp or .gif; make its folder."""
    path = Path(path)
    if path.suffix not in FORMATS:
        raise UserError(f"cannot animate as {path.name!r}; end the name in {' or '.join(FORMATS)}")
    pictures = frames(explanation)
    path.parent.mkdir(parents=True, exist_ok=True)
    options = dict(quality=80, method=2) if path.suffix == ".webp" else {}

    def write(temporary: Path) -> None:
        pictures[0].save(
            temporary,
            format=FORMATS[path.suffix],
            save_all=True,
            append_images=pictures[1:],
            duration=round(1000 * SECOND_PER_FRAME),
            loop=0,
            **options,
        )

    write_atomically(path, write)
    return path


def frames(explanation: Explanation) -> list[Image.Image]:
    """The photo, its patches, and their way into the tokens of each layer; the last layer stays longest.

    A model whose layers keep all patches shows them flowing into the regions of the explanation.
    """
    photo = _cropped(explanation)
    assignments = [layer.assignment for layer in drawn_layers(explanation)] or [explanation.regions]
    grid = assignments[0].shape
    patches = np.arange(grid[0] * grid[1]).reshape(grid)
    stages = [_stage(photo, labels) for labels in (patches, *assignments) if labels.shape == grid]
    out = [photo] * PAUSE
    mosaic = _draw(stages[0], photo.size)
    out += [Image.blend(photo, mosaic, (i + 1) / STEPS) for i in range(STEPS)]
    for before, after in itertools.pairwise(stages):
        out += [_draw(_between(before, after, _ease((i + 1) / STEPS)), photo.size) for i in range(STEPS)]
        out += [out[-1]] * PAUSE
    return out + [out[-1]] * (2 * PAUSE)


def _cropped(explanation: Explanation) -> Image.Image:
    """What the model saw, with its longer side at ``SIDE``; padding is black."""
    left, top, right, bottom = explanation.crop_box
    scale = SIDE / max(right - left, bottom - top)
    size = max(round((right - left) * scale), 1), max(round((bottom - top) * scale), 1)
    part = explanation.image.crop((round(left), round(top), round(right), round(bottom)))
    return part.resize(size, Image.Resampling.BICUBIC)


def _stage(photo: Image.Image, labels: Ints) -> Stage:
    """All patches of a token at the mean of their positions, in their mean colour."""
    h, w = labels.shape
    cell = np.array([photo.width / w, photo.height / h])
    rows, columns = np.divmod(np.arange(h * w), w)
    own = (np.stack((columns, rows), axis=1) + 0.5) * cell  # (N, 2)
    colours = np.asarray(photo.resize((w, h), Image.Resampling.BOX), dtype=np.float64).reshape(-1, 3)
    token = labels.ravel()
    kept = token >= 0
    counts = np.bincount(token[kept], minlength=max(int(token.max()) + 1, 1))
    mean = (
        np.stack(
            [
                np.bincount(token[kept], column[kept], minlength=len(counts))
                for column in (*own.T, *colours.T)
            ],
            axis=1,
        )
        / np.maximum(counts, 1)[:, None]
    )  # (K, 5)
    at = np.where(kept, token, 0)
    centres = np.where(kept[:, None], mean[at, :2], own)
    shown = np.where(kept[:, None], mean[at, 2:], colours)
    sides = np.sqrt(np.where(kept, counts[at], 1) * cell[0] * cell[1]) * GAP
    return Stage(centres, sides, shown, kept.astype(np.float64))


def _between(before: Stage, after: Stage, share: float) -> Stage:
    def mix(a: Floats, b: Floats) -> Floats:
        return a + share * (b - a)

    return Stage(
        mix(before.centres, after.centres),
        mix(before.sides, after.sides),
        mix(before.colours, after.colours),
        mix(before.visible, after.visible),
    )


def _ease(share: float) -> float:
    """Slow at both ends."""
    return share * share * (3 - 2 * share)


def _draw(stage: Stage, size: tuple[int, int]) -> Image.Image:
    """Squares of the tokens on a dark background, the large ones below; dropped patches fade."""
    image = Image.new("RGB", size, BACKGROUND)
    pen = ImageDraw.Draw(image)
    colours = stage.visible[:, None] * stage.colours + (1 - stage.visible[:, None]) * np.array(BACKGROUND)
    squares = np.concatenate((stage.centres, stage.sides[:, None], colours), axis=1).round(1)
    squares = np.unique(squares, axis=0)  # patches of one token are drawn once
    for x, y, side, *colour in squares[np.argsort(-squares[:, 2], kind="stable")].tolist():
        box = (x - side / 2, y - side / 2, x + side / 2, y + side / 2)
        pen.rounded_rectangle(box, radius=side / 6, fill=tuple(map(round, colour)))
    return image
