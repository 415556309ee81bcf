"""One heat map for one image and class: ours, and what it is compared with.

Each method takes the normalised image ``(3, H, W)`` and the class, and gives ``(H, W)``: higher where the
class rests on the place more. The comparators come from captum and grad-cam, the extra ``explain``.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visualtokens.data import Preprocess
from visualtokens.errors import UserError, unknown
from visualtokens.explain.explainer import View, evaluating, explain, input_like, probabilities
from visualtokens.explain.importance import Floats, enlarge
from visualtokens.explain.layers import Attended, form_of, on_patches, record_attention
from visualtokens.grouping import Grouping, Tap, record_groupings
from visualtokens.ops import ungroup

Saliency = Callable[[Tensor, int], Floats]
STEPS = 32  # of the path that integrated gradients follow


@dataclass(frozen=True)
class Setting:
    """What a method may depend on beside the model."""

    preprocess: Preprocess  # its mean and std tell what black is
    layer: int = -1  # of the clusters
    of: View = "groups"  # which of their maps
    batch: int = 16  # images at a time
    seed: int = 0  # of the random maps


def clusters(model: nn.Module, setting: Setting) -> Saliency:
    """Ours: the clusters of one layer, each weighted by the drop of PaCa Sec. 3.5."""

    def saliency(x: Tensor, target: int) -> Floats:
        why = explain(
            model,
            x,
            preprocess=setting.preprocess,
            target=target,
            layer=setting.layer,
            of=setting.of,
            batch=setting.batch,
        )
        return enlarge(why.saliency(), *x.shape[1:])

    return saliency


def integrated_gradients(model: nn.Module, setting: Setting) -> Saliency:
    """Integrated gradients of the probability from a black image, summed over the colours."""
    captum = library("captum.attr", "captum")
    own = own_copy(model)
    mean, std = torch.tensor(setting.preprocess.mean), torch.tensor(setting.preprocess.std)
    method = captum.IntegratedGradients(lambda x: own(x).softmax(1))

    def saliency(x: Tensor, target: int) -> Floats:
        given = as_input(own, x)
        black = (-mean / std).to(given).view(1, 3, 1, 1).expand_as(given)
        with torch.enable_grad():
            found = method.attribute(
                given, black, target=target, n_steps=STEPS, internal_batch_size=setting.batch
            )
        return found[0].sum(0).detach().float().cpu().numpy()

    return saliency


def attention_rollout(model: nn.Module, setting: Setting) -> Saliency:
    """Attention rollout; the same for every class."""

    def saliency(x: Tensor, target: int) -> Floats:
        return enlarge(rollout(model, x).cpu().numpy(), *x.shape[1:])

    return saliency


def random_maps(model: nn.Module, setting: Setting) -> Saliency:
    """Noise in cells of 16 pixels, smoothed like the maps of clusters: what knowing nothing achieves."""

    def saliency(x: Tensor, target: int) -> Floats:
        image = zlib.crc32(x.cpu().numpy().tobytes())  # so that the map does not depend on what came before
        rng = np.random.default_rng([setting.seed, image])
        noise = rng.random((max(x.shape[1] // 16, 1), max(x.shape[2] // 16, 1)), dtype=np.float32)
        return enlarge(noise, *x.shape[1:])

    return saliency


METHODS: dict[str, Callable[[nn.Module, Setting], Saliency]] = {
    "clusters": clusters,
    "grad-cam": lambda model, setting: grad_cam(model),
    "integrated gradients": integrated_gradients,
    "rollout": attention_rollout,
    "random": random_maps,
}


def make_method(name: str, model: nn.Module, setting: Setting) -> Saliency:
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name](model, setting)


# Grad-CAM at the last features that know their places.
#
# Of a ViT with a class token those are in front of the last attention: what is behind it reaches the answer
# no more. In a reduced ViT they are few tokens, and every patch gets the value of the token it belongs to.


def grad_cam(model: nn.Module) -> Callable[[Tensor, int], Floats]:
    """The heat map ``(H, W)`` of an image ``(3, H, W)`` and a class."""
    cams = library("pytorch_grad_cam", "grad-cam")
    targets = library("pytorch_grad_cam.utils.model_targets", "grad-cam")
    own = own_copy(model)
    prefix = int(getattr(own, "num_prefix_tokens", 0))

    def of_patches(x: Tensor, target: int) -> Floats:
        def to_map(features: Tensor) -> Tensor:
            return features if features.ndim == 4 else _fold(features[:, prefix:], x)

        given = as_input(own, x).requires_grad_()  # the gradient must start somewhere: the weights want none
        layer = _feature_layer(own, given)
        with torch.enable_grad(), cams.GradCAM(own, [layer], reshape_transform=to_map) as cam:
            found = cam(given, [targets.ClassifierOutputTarget(target)])
        return found[0]

    def of_tokens(x: Tensor, target: int) -> Floats:
        def in_a_row(features: Tensor) -> Tensor:
            return features[:, prefix:].mT.unsqueeze(2)  # (B, C, 1, K)

        given, goals = as_input(own, x).requires_grad_(), [targets.ClassifierOutputTarget(target)]
        block = _last_with_tokens(own, given)
        layer = own.get_submodule(f"blocks.{block}.norm1")
        with torch.enable_grad(), cams.GradCAM(own, [layer], reshape_transform=in_a_row) as cam:
            with record_groupings(own) as groupings:
                cam(given, goals)
            seen = cam.activations_and_grads
            values, slopes = seen.activations[0].numpy(), seen.gradients[0].numpy()
            row = cam.get_cam_image(given, layer, goals, values, slopes)  # (B, 1, K)
        tokens = torch.from_numpy(row).clamp_min(0).mT  # (B, K, 1)
        behind = list(groupings.values())  # each block
        patches = ungroup(tokens, behind[block - 1].hard()) if block else tokens  # (B, N, 1)
        return enlarge(patches[0].view(behind[0].grid).numpy(), *x.shape[1:])

    return of_tokens if hasattr(own, "reduction") else of_patches


def _feature_layer(model: nn.Module, x: Tensor) -> nn.Module:
    """Of the modules that timm lists as sources of feature maps, the last that gives one tensor for x."""
    infos: Any = getattr(model, "feature_info", None)
    if not infos:
        raise UserError(
            f"{type(model).__name__} does not say where its feature maps are (feature_info); "
            "leave grad-cam out"
        )
    parts = dict(model.named_modules())
    single: list[nn.Module] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            single.append(module)

    handles = [parts[info["module"]].register_forward_hook(note) for info in infos]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    last: Any = single[-1]
    return last.norm1 if hasattr(last, "attn") and hasattr(last, "norm1") else last


def _last_with_tokens(model: Any, x: Tensor) -> int:
    """The last block of a reduced ViT that has any token to attend to."""
    with torch.no_grad(), record_groupings(model) as groupings:
        model(x)
    behind = [grouping.tokens for grouping in groupings.values()]  # each block
    last = max(i for i in range(len(behind)) if i == 0 or behind[i - 1] > 0)
    if not hasattr(model.blocks[last], "norm1"):
        kind = type(model.blocks[last]).__name__
        raise UserError(f"grad-cam reads norm1 of a block, and a reduced {kind} has none; leave grad-cam out")
    return last


def _fold(tokens: Tensor, x: Tensor) -> Tensor:
    """``(B, N, C)`` to ``(B, C, H, W)``, on the grid that is shaped like the image."""
    return tokens.mT.unflatten(2, nearest_grid(tokens.shape[1], x.shape[1] / x.shape[2]))


# Attention rollout (Abnar and Zuidema, 2020), for patches that attend through clusters or tokens too.
#
# Each block mixes patches by ½ (I + A), A being the attention's mean over the heads. Rollout is the product
# of these over all blocks, read at what the classifier pools. It is computed from the last block back, as a
# row times each factor, so no matrix of all patches by all patches is ever multiplied.

Factors = tuple[Tensor, ...]  # of A, left to right; rows sum to 1, and so do those of their product
Grid = tuple[int, int]


def rollout(model: nn.Module, x: Tensor) -> Tensor:
    """``(h, w)`` on the grid of the first attention: how much of what is pooled came from each patch.

    ``x (3, H, W)`` is normalised. A class token, or other tokens before the patches, are followed on the
    way and not part of the result.
    """
    like = input_like(model)
    grouped = any(isinstance(module, Tap) for module in model.modules())
    recording: contextlib.AbstractContextManager[dict[str, Grouping]] = contextlib.nullcontext({})
    if grouped:
        recording = record_groupings(model)
    with evaluating(model), torch.no_grad(), recording as recorded, record_attention(recorded) as attended:
        probabilities(model, x.to(like.device, like.dtype).unsqueeze(0))
    prefix = int(getattr(model, "num_prefix_tokens", 0))
    groupings = on_patches(recorded, (x.shape[1], x.shape[2]))
    steps = _steps(attended, groupings, prefix)
    if not steps:
        raise UserError(f"{type(model).__name__} has no attention over patches that rollout could follow")
    grids = {g.grid[0] * g.grid[1]: g.grid for g in groupings.values()}
    first_token = prefix > 0 and getattr(model, "global_pool", "token") == "token"
    return _follow(steps, _Grids(grids, x.shape[1] / x.shape[2]), prefix, first_token=first_token)


def _steps(attended: Sequence[Attended], groupings: Mapping[str, Grouping], prefix: int) -> list[Factors]:
    """The factors of every attention by which patches reach patches."""
    steps: list[Factors] = []
    before: str | None = None
    read: set[str | None] = set()  # groupings whose clusters the patches attended to
    for one in attended:
        weights, fresh = one.weights[0], one.tap != before  # (N, M)
        before = one.tap
        if one.tap is None:
            steps.append((weights,))
            continue
        grouping = groupings[one.tap]
        square, tokens, form = weights.shape[0] == weights.shape[1], grouping.tokens, form_of(grouping)
        if not square:
            if form == "soft" and weights.shape == grouping.weights.shape[1:]:
                read.add(one.tap)
                steps.append((weights, _made_of(grouping, prefix=0)))
        elif form == "hard" and weights.shape[0] == prefix + tokens:
            steps.append((_belongs_to(grouping, prefix), weights, _made_of(grouping, prefix)))
        elif form == "tessellation" and weights.shape[0] == tokens and fresh:
            steps.append((_belongs_to(grouping, prefix=0), weights, _made_of(grouping, prefix=0)))
        elif form != "soft" or weights.shape[0] != tokens or one.tap in read:
            steps.append((weights,))  # otherwise visual tokens talk, and no patch hears of it here
    return steps


def _made_of(grouping: Grouping, prefix: int) -> Tensor:
    """``(prefix + K, prefix + N)``: the patches that each token is made of."""
    return _extend(_share(grouping.dense()[0].float().T), prefix)


def _belongs_to(grouping: Grouping, prefix: int) -> Tensor:
    """``(prefix + N, prefix + K)``: the tokens that each patch belongs to."""
    return _extend(_share(grouping.dense()[0].float()), prefix)


def _share(weights: Tensor) -> Tensor:
    """Rows that sum to 1."""
    return weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def _extend(weights: Tensor, prefix: int) -> Tensor:
    return torch.block_diag(torch.eye(prefix, device=weights.device), weights) if prefix else weights


class _Grids:
    """The grid of so many patches: as a grouping said, or the nearest to the image's H / W."""

    def __init__(self, known: Mapping[int, Grid], aspect: float) -> None:
        self.known = known
        self.aspect = aspect

    def __call__(self, patches: int) -> Grid:
        return self.known.get(patches) or nearest_grid(patches, self.aspect)


def nearest_grid(patches: int, aspect: float) -> Grid:
    """The (H, W) of so many patches whose H / W is nearest to the image's."""
    rows = [h for h in range(1, patches + 1) if patches % h == 0]
    best = min(rows, key=lambda h: abs(math.log(h * h / patches / aspect)))
    return best, patches // best


def _follow(steps: Sequence[Factors], grids: _Grids, prefix: int, *, first_token: bool) -> Tensor:
    row = steps[-1][0].new_zeros(1, steps[-1][0].shape[0])  # (1, N): what the classifier pools
    if first_token:
        row[0, 0] = 1
    elif steps[-1][0].shape[0] < steps[-1][-1].shape[1]:
        row[:] = 1 / row.shape[1]
    else:
        row[0, prefix:] = 1 / (row.shape[1] - prefix)
    for factors in reversed(steps):
        if factors[0].shape[0] != row.shape[1]:
            row = _refine(row, factors[0].shape[0], grids, prefix)
        mixed = row
        for factor in factors:
            mixed = mixed @ factor
        if mixed.shape[1] > row.shape[1]:  # a head that pools by attention: nothing is passed by
            row = mixed
            continue
        if mixed.shape[1] < row.shape[1]:  # keys that were pooled from a few patches each
            mixed = _refine(mixed, row.shape[1], grids, prefix)
        row = (row + mixed) / 2
    return row[0, prefix:].unflatten(0, grids(row.shape[1] - prefix))


def _refine(row: Tensor, patches: int, grids: _Grids, prefix: int) -> Tensor:
    """From the patches of one stage to the finer ones of the stage before: each hands on evenly."""
    grid, before = grids(row.shape[1] - prefix), grids(patches - prefix)
    spread = F.interpolate(row[:, prefix:].unflatten(1, grid).unsqueeze(1), size=before, mode="nearest-exact")
    spread = spread.flatten(1) * (row[:, prefix:].sum() / spread.sum())
    return torch.cat((row[:, :prefix], spread), dim=1)


# What methods of other libraries need: the library, and a copy of the model to work on.


def library(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{package} is not installed; pip install 'visualtokens[explain]', or leave its method out"
        ) from error


def own_copy(model: nn.Module) -> nn.Module:
    """A copy to take gradients of: the libraries set hooks and clear gradients on what they are given."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def as_input(model: nn.Module, x: Tensor) -> Tensor:
    """The image ``x (3, H, W)`` as a batch of one, of the model's device and type."""
    like = input_like(model)
    return x.to(like.device, like.dtype).unsqueeze(0)
