"""Games of an explanation: the score of an image of which only some regions are shown.

What stands in for the hidden regions is an option: the mean colour, black, a blurred image, an in-painting
from the border, or nothing at all, by removing their tokens inside a vision transformer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visualtokens.errors import UserError, unknown
from visualtokens.explain.features import find_encoder
from visualtokens.explain.inputs import Score
from visualtokens.explain.regions import Ints
from visualtokens.explain.values import Game
from visualtokens.reduce.encoder import Encoder

Hide = Literal["mean", "black", "blur", "inpaint", "tokens"]

STRONG_BLUR = 16 / 224  # the sigma that removes a region: its patches keep no detail


def make_game(
    model: nn.Module, x: Tensor, labels: Ints, score: Score, *, hide: Hide, black: Tensor, batch: int
) -> Game:
    """The game whose players are the regions ``labels (h, w)`` of the normalised image ``x (3, H, W)``.

    ``black (3, 1, 1)`` is the normalised black; ``batch`` images run at a time.
    """
    if hide not in get_args(Hide):
        raise unknown("hide", hide, get_args(Hide))
    players = int(labels.max()) + 1
    if hide == "tokens":
        evaluate = _token_evaluation(model, x, labels, score, batch)
    else:
        evaluate = _pixel_evaluation(Filler(x, hide, black), labels, score, batch)
    return Game(players, evaluate)


class Filler:
    """Replaces the hidden pixels of an image."""

    def __init__(self, x: Tensor, hide: Hide, black: Tensor) -> None:
        self.x, self.hide = x, hide
        self.fill: Tensor | None = None  # (3, H, W); None if it depends on what is hidden
        if hide == "blur":
            side = max(x.shape[1:])
            self.fill = gaussian_blur(x, sigma=STRONG_BLUR * side, radius=math.ceil(2.5 * STRONG_BLUR * side))
        elif hide != "inpaint":
            self.fill = (black if hide == "black" else torch.zeros_like(black)).expand_as(x)

    def __call__(self, shown: Tensor) -> Tensor:
        """``(B, 3, H, W)``: the image where ``shown (B, 1, H, W)`` is true, the stand-in elsewhere."""
        if self.fill is None:
            return inpaint(self.x, shown)
        return torch.where(shown, self.x, self.fill)


def pixel_labels(labels: Ints, size: tuple[int, int]) -> Tensor:
    """``(H, W)``: the region of ``labels (h, w)`` that each pixel belongs to."""
    rows = (np.arange(size[0]) * labels.shape[0]) // size[0]
    columns = (np.arange(size[1]) * labels.shape[1]) // size[1]
    return torch.from_numpy(labels[rows[:, None], columns])


def _pixel_evaluation(filler: Filler, labels: Ints, score: Score, batch: int) -> Callable[[Tensor], Tensor]:
    x = filler.x
    region = pixel_labels(labels, (x.shape[1], x.shape[2])).to(x.device)  # (H, W)

    def evaluate(shown: Tensor) -> Tensor:
        parts = [score(filler(part.to(x.device)[:, region].unsqueeze(1))) for part in shown.split(batch)]
        return torch.cat(parts).double().cpu()

    return evaluate


def gaussian_blur(x: Tensor, *, sigma: float, radius: int) -> Tensor:
    """``x (3, H, W)`` with a Gaussian blur."""
    from torchvision.transforms.v2.functional import gaussian_blur as blur

    # one direction after the other: torchvision's kernel of both takes radius² products a pixel
    side = 2 * min(radius, *(side - 1 for side in x.shape[1:])) + 1
    return blur(blur(x, [side, 1], [sigma] * 2), [1, side], [sigma] * 2)


def inpaint(x: Tensor, shown: Tensor) -> Tensor:
    """``(B, 3, H, W)``: the hidden pixels of ``x (3, H, W)`` filled smoothly from the shown ones around them.

    On a pyramid of images, each level halves the one before, averaging the shown pixels only. From the
    coarsest level back, pixels without a shown pixel below them take the colour of the next coarser level.
    An image of which nothing is shown becomes the mean colour.
    """
    weight = shown.to(x.dtype)
    colour = x * weight
    levels = []
    while max(colour.shape[2:]) > 1:
        levels.append((colour, weight))
        colour = F.avg_pool2d(colour, 2, ceil_mode=True, count_include_pad=False)
        weight = F.avg_pool2d(weight, 2, ceil_mode=True, count_include_pad=False)
    fill = colour / weight.clamp_min(1e-6)
    for colour, weight in reversed(levels):
        coarse = F.interpolate(fill, size=colour.shape[2:], mode="bilinear", align_corners=False)
        known = colour / weight.clamp_min(1e-6)
        # a cell with few shown pixels takes part of the colour around it
        fill = torch.lerp(coarse, known, (4 * weight).clamp_max(1))
    return torch.where(shown, x, fill)


# Removal of tokens.


def _token_evaluation(
    model: nn.Module, x: Tensor, labels: Ints, score: Score, batch: int
) -> Callable[[Tensor], Tensor]:
    """Evaluates coalitions by the tokens of their patches alone, in batches of equal numbers of tokens."""
    encoder = removable_encoder(model)
    grid = encoder.grid((x.shape[1], x.shape[2]))
    cells = torch.from_numpy(np.ascontiguousarray(_on_grid(labels, grid))).flatten()  # (N,)

    def evaluate(shown: Tensor) -> Tensor:
        patches = shown[:, cells]  # (M, N)
        counts = patches.sum(1)
        out = torch.empty(len(shown), dtype=torch.float64)
        for count in counts.unique().tolist():
            for part in (counts == count).nonzero().squeeze(1).split(batch):
                kept = patches[part].nonzero()[:, 1].view(len(part), count)  # (B, count)
                images = x.expand(len(part), -1, -1, -1)
                if count == 0 and encoder.reads_patches:  # there is nothing to pool: the mean colour instead
                    out[part] = score(torch.zeros_like(images)).double().cpu()
                    continue
                with tokens_removed(encoder, kept.to(x.device)):
                    out[part] = score(images).double().cpu()
        return out

    return evaluate


def _on_grid(labels: Ints, grid: tuple[int, int]) -> Ints:
    rows = ((np.arange(grid[0]) + 0.5) * labels.shape[0] / grid[0]).astype(int)
    columns = ((np.arange(grid[1]) + 0.5) * labels.shape[1] / grid[1]).astype(int)
    return labels[rows[:, None], columns]


def removable_encoder(model: nn.Module) -> Encoder:
    """The transformer in ``model``; :class:`UserError` if patch tokens cannot be removed inside it."""
    encoder, name = find_encoder(model), type(model).__name__
    if encoder is None:
        raise UserError(f"hide='tokens' needs a vision transformer with global attention, not {name}")
    if encoder.reduced:
        raise UserError(f"hide='tokens': this {name} already merges or drops tokens; give hide='mean'")
    attention = [module for block in encoder.blocks for module in block.modules()]
    if any(getattr(m, n, None) is not None for m in attention for n in RELATIVE):
        raise UserError(f"hide='tokens': {name} has relative positions of the whole grid; give hide='mean'")
    return encoder


RELATIVE = ("relative_position_bias_table", "rel_pos", "rel_pos_h")


@contextlib.contextmanager
def tokens_removed(encoder: Encoder, kept: Tensor) -> Iterator[None]:
    """Run the model with the patches ``kept (B, n)`` only: the other tokens are removed before the blocks.

    Prefix tokens stay. Rotary positions that the blocks are given are those of the kept patches.
    """
    prefix = torch.arange(encoder.prefix, device=kept.device).expand(len(kept), -1)
    index = torch.cat((prefix, kept + encoder.prefix), dim=1)  # (B, prefix + n)
    patches = 0

    def first(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal patches
        patches = args[0].shape[1] - encoder.prefix
        tokens = args[0].gather(1, index.unsqueeze(2).expand(-1, -1, args[0].shape[2]))
        return (tokens, *map(positions, args[1:])), {k: positions(v) for k, v in kwargs.items()}

    def later(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (args[0], *map(positions, args[1:])), {k: positions(v) for k, v in kwargs.items()}

    def positions(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(positions, value))
        if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[-2] == patches:
            if len(kept) > 1:
                raise UserError("hide='tokens': with rotary positions, give batch=1")
            return value.index_select(-2, kept[0])
        return value

    hooks = [first, *[later] * (len(encoder.blocks) - 1)]
    handles = [
        block.register_forward_pre_hook(hook, with_kwargs=True)
        for block, hook in zip(encoder.blocks, hooks, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
