"""Saliency methods: cluster importance, and the methods it is compared with.

Each method maps a normalised image ``(3, H, W)`` and a class to a heat map ``(H, W)``, higher where the class
depends more on the pixel. Grad-CAM and integrated gradients need the extra ``explain``.
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
from visualtokens.explain.explainer import MapSource, explain
from visualtokens.explain.importance import Floats
from visualtokens.explain.inputs import as_batch, class_probabilities
from visualtokens.explain.layers import Attention, form_of, record_attention
from visualtokens.explain.render import upsample
from visualtokens.grouping import Grouping, Tap, record_groupings
from visualtokens.modes import eval_mode
from visualtokens.ops import ungroup

Saliency = Callable[[Tensor, int], Floats]
Grid = tuple[int, int]
PATH_STEPS = 32  # of integrated gradients


@dataclass(frozen=True)
class Setting:
    """The options of the methods, besides the model."""

    preprocess: Preprocess  # its mean and std define black
    layer: int = -1  # of the clusters
    of: MapSource = "groups"  # which maps of the clusters
    batch: int = 16  # images per forward pass
    seed: int = 0  # of the random maps


def make_method(name: str, model: nn.Module, setting: Setting) -> Saliency:
    """The method of :data:`METHODS` with this name, for one model."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name](model, setting)


def clusters(model: nn.Module, setting: Setting) -> Saliency:
    """The clusters of one layer weighted by their importance (PaCa-ViT, Sec. 3.5)."""

    def saliency(x: Tensor, target: int) -> Floats:
        explanation = explain(
            model,
            x,
            method="cluster",
            preprocess=setting.preprocess,
            target=target,
            layer=setting.layer,
            of=setting.of,
            batch=setting.batch,
        )
        return upsample(explanation.saliency(), *x.shape[1:])

    return saliency


def integrated_gradients(model: nn.Module, setting: Setting) -> Saliency:
    """Integrated gradients of the probability along the path from a black image, summed over the channels."""
    captum = _library("captum.attr", "captum")
    model = _frozen_copy(model)
    mean, std = torch.tensor(setting.preprocess.mean), torch.tensor(setting.preprocess.std)
    method = captum.IntegratedGradients(lambda x: model(x).softmax(1))

    def saliency(x: Tensor, target: int) -> Floats:
        images = as_batch(model, x)
        black = (-mean / std).to(images).view(1, 3, 1, 1).expand_as(images)
        with torch.enable_grad():
            attribution = method.attribute(
                images, black, target=target, n_steps=PATH_STEPS, internal_batch_size=setting.batch
            )  # (1, 3, H, W)
        return attribution[0].sum(0).detach().float().cpu().numpy()

    return saliency


def random_maps(model: nn.Module, setting: Setting) -> Saliency:
    """Random values on a grid of 16-pixel cells, upsampled like cluster maps: the chance level."""

    def saliency(x: Tensor, target: int) -> Floats:
        image = zlib.crc32(x.cpu().numpy().tobytes())  # independent of the order of the images
        rng = np.random.default_rng([setting.seed, image])
        noise = rng.random((max(x.shape[1] // 16, 1), max(x.shape[2] // 16, 1)), dtype=np.float32)
        return upsample(noise, *x.shape[1:])

    return saliency


def _library(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{package} is not installed; pip install 'visualtokens[explain]', or leave its method out"
        ) from error


def _frozen_copy(model: nn.Module) -> nn.Module:
    """A copy for libraries that register hooks on the model and clear its gradients."""
    return copy.deepcopy(model).eval().requires_grad_(False)


# Grad-CAM at the last feature map.
#
# With a class token, that is the input of the last attention: patch features after it do not reach the
# output. In a reduced ViT the features are those of a few tokens, and each patch takes its token's value.


def grad_cam(model: nn.Module, setting: Setting) -> Saliency:
    """Grad-CAM of the logit."""
    library = _library("pytorch_grad_cam", "grad-cam")
    target_of = _library("pytorch_grad_cam.utils.model_targets", "grad-cam").ClassifierOutputTarget
    model = _frozen_copy(model)
    prefix = int(getattr(model, "num_prefix_tokens", 0))

    def of_patches(x: Tensor, target: int) -> Floats:
        def to_map(features: Tensor) -> Tensor:
            return features if features.ndim == 4 else _to_grid(features[:, prefix:], x)

        images = as_batch(model, x).requires_grad_()  # the weights are frozen
        layer = _feature_layer(model, images)
        with torch.enable_grad(), library.GradCAM(model, [layer], reshape_transform=to_map) as cam:
            return cam(images, [target_of(target)])[0]

    def of_tokens(x: Tensor, target: int) -> Floats:
        def to_row(features: Tensor) -> Tensor:
            return features[:, prefix:].mT.unsqueeze(2)  # (B, C, 1, K)

        images, targets = as_batch(model, x).requires_grad_(), [target_of(target)]
        block = _last_block_with_tokens(model, images)
        layer = model.get_submodule(f"blocks.{block}.norm1")
        with torch.enable_grad(), library.GradCAM(model, [layer], reshape_transform=to_row) as cam:
            with record_groupings(model) as groupings:
                cam(images, targets)
            kept = cam.activations_and_grads
            activations, gradients = kept.activations[0].numpy(), kept.gradients[0].numpy()
            row = cam.get_cam_image(images, layer, targets, activations, gradients)  # (B, 1, K)
        tokens = torch.from_numpy(row).clamp_min(0).mT  # (B, K, 1)
        outputs = list(groupings.values())  # the grouping after each block
        patches = ungroup(tokens, outputs[block - 1].hard()) if block else tokens  # (B, N, 1)
        return upsample(patches[0].view(outputs[0].grid).numpy(), *x.shape[1:])

    return of_tokens if hasattr(model, "reduction") else of_patches


def _feature_layer(model: nn.Module, x: Tensor) -> nn.Module:
    """The last module of timm's ``feature_info`` that returns a single tensor for ``x (B, 3, H, W)``."""
    infos: Any = getattr(model, "feature_info", None)
    if not infos:
        raise UserError(
            f"{type(model).__name__} has no feature_info to find its feature maps; leave grad-cam out"
        )
    modules = dict(model.named_modules())
    single: list[nn.Module] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            single.append(module)

    handles = [modules[info["module"]].register_forward_hook(note) for info in infos]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    last: Any = single[-1]
    return last.norm1 if hasattr(last, "attn") and hasattr(last, "norm1") else last


def _last_block_with_tokens(model: Any, x: Tensor) -> int:
    """The last block of a reduced ViT whose input has tokens besides the prefix."""
    with torch.no_grad(), record_groupings(model) as groupings:
        model(x)
    tokens = [grouping.tokens for grouping in groupings.values()]  # after each block
    last = max(i for i in range(len(tokens)) if i == 0 or tokens[i - 1] > 0)
    if not hasattr(model.blocks[last], "norm1"):
        kind = type(model.blocks[last]).__name__
        raise UserError(f"grad-cam reads norm1 of a block, and a reduced {kind} has none; leave grad-cam out")
    return last


def _to_grid(tokens: Tensor, x: Tensor) -> Tensor:
    """``(B, N, C)`` to ``(B, C, h, w)``, on the grid with the aspect ratio of the image."""
    return tokens.mT.unflatten(2, nearest_grid(tokens.shape[1], x.shape[1] / x.shape[2]))


def nearest_grid(patches: int, aspect: float) -> Grid:
    """The (h, w) with h · w = ``patches`` whose aspect ratio h / w is nearest to the image's."""
    rows = [h for h in range(1, patches + 1) if patches % h == 0]
    best = min(rows, key=lambda h: abs(math.log(h * h / patches / aspect)))
    return best, patches // best


# Attention rollout (Abnar and Zuidema, 2020), also for patches that attend to clusters or are merged.
#
# A block mixes patches by ½ (I + A), where A is its attention, mean over the heads. Rollout is the product of
# these matrices over all blocks, averaged over the rows that the classifier pools. Starting from that row at
# the last block needs vector-matrix products only.

Factors = tuple[Tensor, ...]  # A as a product, left to right; the rows of each factor sum to 1


def attention_rollout(model: nn.Module, setting: Setting) -> Saliency:
    """Attention rollout; the same map for every class."""

    def saliency(x: Tensor, target: int) -> Floats:
        return upsample(rollout(model, x).cpu().numpy(), *x.shape[1:])

    return saliency


def rollout(model: nn.Module, x: Tensor) -> Tensor:
    """``(h, w)`` on the grid of the first attention: the share of each patch in the pooled feature.

    ``x (3, H, W)`` is a normalised image. Prefix tokens, such as a class token, take part in the product but
    not in the result.
    """
    grouped = any(isinstance(module, Tap) for module in model.modules())
    recording: contextlib.AbstractContextManager[dict[str, Grouping]]
    recording = record_groupings(model) if grouped else contextlib.nullcontext({})
    with eval_mode(model), torch.no_grad(), recording as groupings, record_attention(groupings) as recorded:
        class_probabilities(model, as_batch(model, x))
    prefix = int(getattr(model, "num_prefix_tokens", 0))
    steps = _mixing_steps(recorded, groupings, prefix)
    if not steps:
        raise UserError(f"{type(model).__name__} has no attention over patches that rollout could follow")
    known = {g.grid[0] * g.grid[1]: g.grid for g in groupings.values()}

    def grid_of(patches: int) -> Grid:
        return known.get(patches) or nearest_grid(patches, x.shape[1] / x.shape[2])

    class_token = prefix > 0 and getattr(model, "global_pool", "token") == "token"
    row = _pooled_row(steps[-1], prefix, class_token=class_token)
    for factors in reversed(steps):
        row = _propagate(row, factors, grid_of, prefix)
    return row[0, prefix:].unflatten(0, grid_of(row.shape[1] - prefix))


def _mixing_steps(
    recorded: Sequence[Attention], groupings: Mapping[str, Grouping], prefix: int
) -> list[Factors]:
    """The factors of every attention through which patches reach patches."""
    steps: list[Factors] = []
    previous: str | None = None
    attended: set[str] = set()  # taps whose clusters the patches attend to
    for attention in recorded:
        weights, tap = attention.weights[0], attention.tap  # (N, M)
        first, previous = tap != previous, tap  # whether it is the first call after its tap
        if tap is None:
            steps.append((weights,))
            continue
        grouping = groupings[tap]
        form, tokens, queries = form_of(grouping), grouping.tokens, weights.shape[0]
        if queries != weights.shape[1]:
            if form == "soft" and weights.shape == grouping.weights.shape[1:]:
                attended.add(tap)
                steps.append((weights, _patches_of_tokens(grouping, prefix=0)))
        elif form == "hard" and queries == prefix + tokens:
            through = _tokens_of_patches(grouping, prefix), weights, _patches_of_tokens(grouping, prefix)
            steps.append(through)
        elif form == "tessellation" and queries == tokens and first:
            steps.append((_tokens_of_patches(grouping, 0), weights, _patches_of_tokens(grouping, 0)))
        elif form != "soft" or queries != tokens or tap in attended:
            steps.append((weights,))
        # else visual tokens attend to each other, which mixes no patches here
    return steps


def _tokens_of_patches(grouping: Grouping, prefix: int) -> Tensor:
    """``(prefix + N, prefix + K)``: the share of each token in a patch."""
    return _with_prefix(_rows_to_one(grouping.dense()[0].float()), prefix)


def _patches_of_tokens(grouping: Grouping, prefix: int) -> Tensor:
    """``(prefix + K, prefix + N)``: the share of each patch in a token."""
    return _with_prefix(_rows_to_one(grouping.dense()[0].float().T), prefix)


def _rows_to_one(weights: Tensor) -> Tensor:
    return weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def _with_prefix(weights: Tensor, prefix: int) -> Tensor:
    return torch.block_diag(torch.eye(prefix, device=weights.device), weights) if prefix else weights


def _pooled_row(last: Factors, prefix: int, *, class_token: bool) -> Tensor:
    """``(1, N)``: the weights with which the classifier pools the outputs of the last attention."""
    queries = last[0].shape[0]
    row = last[0].new_zeros(1, queries)
    if class_token:
        row[0, 0] = 1
    elif queries < last[-1].shape[1]:  # an attention-pooling head: its queries are what is pooled
        row[:] = 1 / queries
    else:
        row[0, prefix:] = 1 / (queries - prefix)
    return row


def _propagate(row: Tensor, factors: Factors, grid_of: Callable[[int], Grid], prefix: int) -> Tensor:
    """``row (1, N)`` times ½ (I + A); with the finer patches of an earlier stage, refined to them first."""
    if factors[0].shape[0] != row.shape[1]:
        row = _refine(row, factors[0].shape[0], grid_of, prefix)
    mixed = row
    for factor in factors:
        mixed = mixed @ factor
    if mixed.shape[1] > row.shape[1]:  # an attention-pooling head has no residual connection
        return mixed
    if mixed.shape[1] < row.shape[1]:  # keys pooled from several patches each (PVTv2)
        mixed = _refine(mixed, row.shape[1], grid_of, prefix)
    return (row + mixed) / 2


def _refine(row: Tensor, patches: int, grid_of: Callable[[int], Grid], prefix: int) -> Tensor:
    """Distribute the weight of each coarse patch evenly over the finer patches it covers."""
    coarse = row[:, prefix:].unflatten(1, grid_of(row.shape[1] - prefix)).unsqueeze(1)  # (1, 1, h, w)
    fine = F.interpolate(coarse, size=grid_of(patches - prefix), mode="nearest-exact").flatten(1)
    return torch.cat((row[:, :prefix], fine * (coarse.sum() / fine.sum())), dim=1)


METHODS: dict[str, Callable[[nn.Module, Setting], Saliency]] = {
    "clusters": clusters,
    "grad-cam": grad_cam,
    "integrated gradients": integrated_gradients,
    "rollout": attention_rollout,
    "random": random_maps,
}
"""The methods that faithfulness compares, by name."""
