"""Maps from forward and backward passes: gradient × feature, attention relevance, and both along a path."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.explain.attention_maps import Trace, recording_groupings, weighted_by_gradient
from visualtokens.explain.features import Layout, on_grid, recording
from visualtokens.explain.importance import Floats
from visualtokens.explain.inputs import Score, as_batch
from visualtokens.explain.layers import record_attention
from visualtokens.modes import eval_mode

PASS = 3  # a forward and a backward pass, in forward passes
STEPS = 4  # of the path
REMOVED = 0.45  # share of the patches that the path removes in the end
BEND = 1.25  # above 1: the first steps remove less


@dataclass(frozen=True)
class Evidence:
    """What one forward and one backward pass tell about the patches of an image."""

    gradient: Tensor | None  # (h, w): gradient × (feature − that of an image in the mean colour), or None
    relevance: Tensor | None  # (h, w): rollout of gradient-weighted attention; None without attention

    def combined(self) -> Floats | None:
        """``(h, w)``: the mean of both on the finer grid, each with mean 0 and standard deviation 1.

        None if there is neither, or both are constant.
        """
        maps = [one for one in (self.relevance, self.gradient) if one is not None and one.std() > 0]
        if not maps:
            return None
        grid = max((tuple(one.shape) for one in maps), key=lambda shape: shape[0] * shape[1])
        fine = [F.interpolate(one[None, None], size=grid, mode="bilinear")[0, 0] for one in maps]
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
            return Evidence(None, None)
        gradients = torch.autograd.grad(total, [*weights, *raws], allow_unused=True)
        trace = Trace(self.model, x, weighted_by_gradient(recorded, gradients[: len(weights)]), groupings)
        relevance = trace.roll_out() if trace.steps else None
        return Evidence(self._gradient_map(found, gradients[len(weights) :]), relevance)

    def _gradient_map(
        self, found: dict[str, tuple[Tensor, Layout]], gradients: tuple[Tensor | None, ...]
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


def path_map(model: nn.Module, x: Tensor, score: Score, *, steps: int = STEPS) -> Floats | None:
    """``(h, w)``: evidence while the strongest patches are removed step by step.

    One pass sees only what the score depends on now. A second eye, or a second animal, matters once the first
    is hidden. So the patches with the strongest evidence so far turn to the mean colour, the evidence for the
    others is computed again, and so on for ``steps`` steps. The map is the sum of the first evidence and the
    mean of the later ones, in which removed patches count as the strongest. None for a model with neither
    attention nor feature maps. It costs :func:`path_cost` forward passes.
    """
    probe = Probe(model, x, score)
    first = probe(x).combined()
    if first is None:
        return None
    later = np.zeros_like(first)
    removed = np.zeros(first.shape, dtype=bool)
    strongest = first
    for step in range(1, steps + 1):
        removed |= _strongest(np.where(removed, np.inf, strongest), REMOVED * (step / steps) ** BEND)
        hidden = torch.from_numpy(removed).to(x.device, torch.float32)
        hidden = F.interpolate(hidden[None, None], size=tuple(x.shape[1:]), mode="nearest")[0] > 0
        again = probe(torch.where(hidden, torch.zeros((), device=x.device), x)).combined()
        strongest = np.zeros_like(first) if again is None else again
        left = strongest[~removed]
        left = (left - left.mean()) / max(float(left.std()), 1e-12)
        part = np.full(first.shape, left.max(), dtype=first.dtype)
        part[~removed] = left
        later += part / steps
    return first + later


def path_cost(steps: int = STEPS) -> int:
    """The forward passes that a path costs: one of a grey image, then one and a backward pass a step."""
    return 1 + PASS * (1 + steps)


def _strongest(heat: Floats, share: float) -> np.ndarray:
    """``(h, w)``: the ``share`` of the patches with the largest values."""
    count = round(share * heat.size)
    chosen = np.zeros(heat.size, dtype=bool)
    chosen[np.argsort(-heat, axis=None, kind="stable")[:count]] = True
    return chosen.reshape(heat.shape)
