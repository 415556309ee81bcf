"""Maps of gradients: gradient × feature, attention relevance, and both while patches are hidden."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.explain.attention_maps import Trace, recording_groupings, weighted_by_gradient
from visualtokens.explain.features import Layout, on_grid, recording
from visualtokens.explain.importance import Floats
from visualtokens.explain.inputs import Score, as_batch
from visualtokens.explain.layers import record_attention
from visualtokens.explain.render import upsample
from visualtokens.modes import eval_mode

Bools = NDArray[np.bool_]

PASS = 3  # a forward and a backward pass, in forward passes
PAIRS = 3  # of random halves of the image
CELLS = 7  # a side, that the halves consist of, as in RISE (Petsiuk et al., 2018)
STEPS = 8  # of the path
REMOVED = 0.45  # share of the patches that the path removes in the end
BEND = 1.25  # above 1: the first steps remove less
DETAIL = 0.5  # weight of single pixels beside their patches


@dataclass(frozen=True)
class Evidence:
    """What one forward and one backward pass tell about the patches of an image."""

    gradient: Tensor | None  # (h, w): gradient × (feature − that of an image in the mean colour), or None
    relevance: Tensor | None  # (h, w): rollout of gradient-weighted attention; None without attention
    pixels: Tensor | None  # (H, W): gradient × pixel, summed over the colours

    @property
    def grid(self) -> tuple[int, ...] | None:
        """The finer grid of the two; None if there is neither."""
        shapes = [tuple(one.shape) for one in (self.relevance, self.gradient) if one is not None]
        return max(shapes, key=math.prod, default=None)

    def combined(self) -> Floats | None:
        """``(h, w)``: the mean of both on the finer grid, each with mean 0 and standard deviation 1.

        None if there is neither, or both are constant.
        """
        maps = [one for one in (self.relevance, self.gradient) if one is not None and one.std() > 0]
        if not maps:
            return None
        fine = [F.interpolate(one[None, None], size=self.grid, mode="bilinear")[0, 0] for one in maps]
        return torch.stack([_standard(one) for one in fine]).mean(0).cpu().numpy()


def _standard(one: Tensor) -> Tensor:
    return (one - one.mean()) / one.std().clamp_min(torch.finfo(one.dtype).tiny)


class Probe:
    """Evidence for the score of one image and of changed versions of it."""

    def __init__(self, model: nn.Module, x: Tensor, score: Score) -> None:
        self.model, self.score = model, score
        grey = as_batch(model, torch.zeros_like(x))
        with eval_mode(model), torch.no_grad(), recording(model, grey) as found:
            score(grey)
        self.grey = {name: on_grid(raw, layout) for name, (raw, layout) in found.items()}

    def __call__(self, x: Tensor) -> Evidence:
        """The evidence of ``x (3, H, W)``."""
        images = as_batch(self.model, x).detach().requires_grad_()
        with (
            eval_mode(self.model),
            torch.enable_grad(),
            recording_groupings(self.model) as groupings,
            recording(self.model, images) as found,
            record_attention(groupings, graph=True) as recorded,
        ):
            total = self.score(images).sum()
        weights = [one.weights for one in recorded]
        raws = [raw for raw, _ in found.values()]
        if not weights and not raws:
            return Evidence(None, None, None)
        of_images, *gradients = torch.autograd.grad(total, [images, *weights, *raws], allow_unused=True)
        pixels = None if of_images is None else (x * of_images[0].to(x)).sum(0)
        trace = Trace(self.model, x, weighted_by_gradient(recorded, gradients[: len(weights)]), groupings)
        relevance = trace.roll_out() if trace.steps else None
        return Evidence(self._gradient_map(found, gradients[len(weights) :]), relevance, pixels)

    def _gradient_map(
        self, found: dict[str, tuple[Tensor, Layout]], gradients: Sequence[Tensor | None]
    ) -> Tensor | None:
        """Mean over the layers, each on the finest grid of the later half of them."""
        maps = [
            ((on_grid(raw, layout) - self.grey[name]) * on_grid(gradient, layout)).sum(2)
            for (name, (raw, layout)), gradient in zip(found.items(), gradients, strict=True)
            if gradient is not None
        ]
        if not maps:
            return None
        grid = max((tuple(one.shape) for one in maps[len(maps) // 2 :]), key=lambda shape: shape[0])
        fine = [F.interpolate(one[None, None], size=grid, mode="bilinear")[0, 0] for one in maps]
        return torch.stack(fine).mean(0)


def gradient_map(model: nn.Module, x: Tensor, score: Score) -> Floats:
    """``(h, w)``: gradient × (feature − that of an image in the mean colour), mean over the layers."""
    found = Probe(model, x, score)(x).gradient
    if found is None:
        raise UserError(
            f"no layer of {type(model).__name__} has features for every patch (a ViT that is reduced from "
            "its first block on has none); give method='shapley'"
        )
    return found.cpu().numpy()


def relevance_map(model: nn.Module, x: Tensor, score: Score) -> Floats:
    """``(h, w)``: rollout of the attention that raises the score."""
    found = Probe(model, x, score)(x).relevance
    if found is None:
        raise UserError(f"{type(model).__name__} has no attention over patches that could be followed")
    return found.cpu().numpy()


@dataclass(frozen=True)
class PathMap:
    """The heat map of an image, of its patches and its pixels."""

    patches: Floats  # (h, w)
    pixels: Floats  # (H, W): gradient × pixel


def path_map(
    model: nn.Module, x: Tensor, score: Score, *, steps: int = STEPS, seed: int = 0
) -> PathMap | None:
    """Evidence of patches beside random others, and while the strongest are removed step by step.

    One pass over the whole image sees only what the score depends on now. A second eye, or a second animal,
    matters once the first is hidden. So the evidence is that of several versions of the image, in which
    hidden patches have the mean colour:

    1. the mean of the whole image and of ``PAIRS`` random halves and their complements, each over the patches
       that it shows;
    2. the mean of ``steps`` steps of a path: the strongest patches so far are hidden, the evidence of the
       others is computed again, and so on. Hidden patches count as the strongest.

    The map of the patches is the sum of both; that of the pixels is the mean of gradient × pixel over all
    versions. None for a model with neither attention nor feature maps, or if the score depends on no patch.
    It costs :func:`path_cost` forward passes.
    """
    probe = Probe(model, x, score)
    grid = (evidence := probe(x)).grid
    if grid is None:
        return None
    whole = evidence.combined()
    pixels = [evidence.pixels]

    def shown(patches: Bools) -> Floats | None:
        """The evidence with these patches only, with mean 0 and standard deviation 1 over them."""
        visible = torch.from_numpy(patches).to(x.device, torch.float32)
        visible = F.interpolate(visible[None, None], size=tuple(x.shape[1:]), mode="nearest")[0] > 0
        evidence = probe(torch.where(visible, x, torch.zeros((), device=x.device)))
        pixels.append(evidence.pixels)
        found = evidence.combined()
        if found is None or not patches.any():
            return None
        return (found - found[patches].mean()) / max(float(found[patches].std()), 1e-12)

    total, times = np.zeros(grid, dtype=np.float32), np.zeros(grid, dtype=np.float32)
    for patches in (np.ones(grid, dtype=bool), *_random_halves(grid, seed)):
        found = whole if patches.all() else shown(patches)
        if found is not None:
            total[patches] += found[patches]
            times[patches] += 1
    if not total.any():
        return None
    first: Floats = total / np.maximum(times, 1)
    later = np.zeros_like(first)
    removed = np.zeros(first.shape, dtype=bool)
    strongest: Floats = first
    for step in range(1, steps + 1):
        removed |= _strongest(np.where(removed, np.inf, strongest), REMOVED * (step / steps) ** BEND)
        again = shown(~removed)
        strongest = np.zeros_like(first) if again is None else again
        later += np.where(removed, strongest[~removed].max(), strongest) / steps
    known = [one for one in pixels if one is not None]
    detail = torch.stack(known).mean(0) if known else torch.zeros(x.shape[1:])
    return PathMap(first + later, detail.cpu().numpy())


def with_detail(patches: Floats, pixels: Floats) -> Floats:
    """``(H, W)``: a map of patches with the detail of ``pixels (H, W)``, the sum of both, standardised.

    A patch has pixels that raise the score and others that do not. Their order changes how soon the score
    rises or falls when pixels are shown or hidden one after the other.
    """
    return _standardised(upsample(patches, *pixels.shape)) + DETAIL * _standardised(pixels)


def _standardised(values: Floats) -> Floats:
    return (values - values.mean()) / max(float(values.std()), 1e-12)


def path_cost(steps: int = STEPS) -> int:
    """The forward passes of :func:`path_map`: one of a grey image, the others with a backward pass."""
    return 1 + PASS * (1 + 2 * PAIRS + steps)


def _random_halves(grid: tuple[int, ...], seed: int) -> Iterator[Bools]:
    """``PAIRS`` random halves of ``CELLS``×``CELLS`` cells, in patches ``(h, w)``, and their complements."""
    rng = np.random.default_rng(seed)
    for _ in range(PAIRS):
        cells = torch.from_numpy(rng.random((CELLS, CELLS)) < 0.5).float()
        half = F.interpolate(cells[None, None], size=grid, mode="nearest-exact")[0, 0].numpy() > 0
        yield half
        yield ~half


def _strongest(heat: Floats, share: float) -> Bools:
    """``(h, w)``: the ``share`` of the patches with the largest values."""
    count = round(share * heat.size)
    chosen = np.zeros(heat.size, dtype=bool)
    chosen[np.argsort(-heat, axis=None, kind="stable")[:count]] = True
    return chosen.reshape(heat.shape)
