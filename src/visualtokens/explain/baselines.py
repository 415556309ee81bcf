"""Saliency methods: cluster importance, and the methods it is compared with.

Each method maps a normalised image ``(3, H, W)`` and a class to a heat map ``(H, W)``, higher where the class
depends more on the pixel. Grad-CAM and integrated gradients need the extra ``explain``.
"""

from __future__ import annotations

import copy
import importlib
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visualtokens.data import Preprocess
from visualtokens.errors import UserError, unknown
from visualtokens.explain.attention_maps import nearest_grid, raw_attention, rollout
from visualtokens.explain.evidence import PathMap, path_map, relevance_map, with_detail
from visualtokens.explain.explainer import MapSource, explain
from visualtokens.explain.importance import Floats
from visualtokens.explain.inputs import as_batch, class_score
from visualtokens.explain.regions import OWN
from visualtokens.explain.render import upsample
from visualtokens.grouping import Tap, record_groupings
from visualtokens.modes import eval_mode
from visualtokens.ops import ungroup

Saliency = Callable[[Tensor, int], Floats]
Grid = tuple[int, int]
RISE_CELLS, RISE_SHARE = 7, 0.5  # Petsiuk et al. (2018): 7×7 cells, half of them shown


@dataclass(frozen=True)
class Setting:
    """The options of the methods, besides the model."""

    preprocess: Preprocess  # its mean and std define black
    layer: int | None = None  # of the clusters, by default the last
    of: MapSource = "groups"  # which maps of the clusters
    batch: int = 16  # images per forward pass
    budget: int = 96  # forward passes of a method; a backward pass counts as two
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
        return explanation.saliency()

    return saliency


def methods_for(model: nn.Module) -> list[str]:
    """The methods of :data:`METHODS`, without clusters for a model that does not group its patches."""
    grouped = any(isinstance(module, Tap) for module in model.modules())
    return [name for name in METHODS if grouped or name != "clusters"]


def pixels(model: nn.Module, setting: Setting) -> Saliency:
    """``saliency()`` of an explanation: the map of the patches with the detail of pixels."""

    def saliency(x: Tensor, target: int) -> Floats:
        found = _path_map(model, x, target, setting)
        return with_detail(found.patches, found.pixels)

    return saliency


def path(model: nn.Module, setting: Setting) -> Saliency:
    """The heat map that pages draw: gradients and attention while patches are hidden."""
    return lambda x, target: upsample(_path_map(model, x, target, setting).patches, *x.shape[1:])


def _path_map(model: nn.Module, x: Tensor, target: int, setting: Setting) -> PathMap:
    score = class_score(model, target, against=None, unit="log-odds")
    found = path_map(model, x, score, seed=setting.seed)
    if found is None:
        kind = type(model).__name__
        raise UserError(f"{kind} has neither attention nor feature maps; leave pixels and path out")
    return found


def shapley_regions(model: nn.Module, setting: Setting) -> Saliency:
    """The Shapley values of regions, per patch."""

    def saliency(x: Tensor, target: int) -> Floats:
        options: dict[str, Any] = dict(budget=setting.budget, batch=setting.batch, layer=setting.layer)
        regions = None if setting.budget >= 2 * OWN + 2 else setting.budget // 2 - 1
        found = explain(
            model,
            x,
            method="shapley",
            preprocess=setting.preprocess,
            target=target,
            regions=regions,
            path=0,
            **options,
        )
        return found.saliency()

    return saliency


def integrated_gradients(model: nn.Module, setting: Setting) -> Saliency:
    """Integrated gradients of the probability along the path from a black image, summed over the channels."""
    captum = _library("captum.attr", "captum")
    model = _frozen_copy(model)
    mean, std = torch.tensor(setting.preprocess.mean), torch.tensor(setting.preprocess.std)
    method = captum.IntegratedGradients(lambda x: model(x).softmax(1))
    steps = max(setting.budget // 3, 1)

    def saliency(x: Tensor, target: int) -> Floats:
        images = as_batch(model, x)
        black = (-mean / std).to(images).view(1, 3, 1, 1).expand_as(images)
        with torch.enable_grad():
            attribution = method.attribute(
                images,
                black,
                target=target,
                n_steps=steps,
                internal_batch_size=setting.batch,
            )  # (1, 3, H, W)
        return attribution[0].sum(0).detach().float().cpu().numpy()

    return saliency


def random_maps(model: nn.Module, setting: Setting) -> Saliency:
    """Random values on a grid of 16-pixel cells, upsampled like cluster maps: the chance level."""

    def saliency(x: Tensor, target: int) -> Floats:
        rng = np.random.default_rng([setting.seed, _number_of(x)])
        noise = rng.random((max(x.shape[1] // 16, 1), max(x.shape[2] // 16, 1)), dtype=np.float32)
        return upsample(noise, *x.shape[1:])

    return saliency


def rise(model: nn.Module, setting: Setting) -> Saliency:
    """RISE (Petsiuk et al., 2018): the mean of random masks, weighted by the probability of what they show.

    A mask is a grid of random cells, one larger than ``RISE_CELLS``, upsampled and cropped at a random place.
    Hidden pixels have the mean colour.
    """

    def saliency(x: Tensor, target: int) -> Floats:
        score = class_score(model, target, against=None, unit="probability")
        rng = np.random.default_rng([setting.seed, _number_of(x)])
        heat = torch.zeros(x.shape[1:])
        left = setting.budget
        with eval_mode(model), torch.no_grad():
            while left > 0:
                masks = torch.stack(
                    [_rise_mask(x, rng) for _ in range(min(left, setting.batch))]
                )  # (B, H, W)
                scores = score(x * masks.unsqueeze(1).to(x.device)).float().cpu()
                heat += (scores.view(-1, 1, 1) * masks).sum(0)
                left -= len(masks)
        return (heat / (setting.budget * RISE_SHARE)).numpy()

    return saliency


def _rise_mask(x: Tensor, rng: np.random.Generator) -> Tensor:
    """``(H, W)``, from 0 to 1."""
    height, width = x.shape[1:]
    cell = math.ceil(height / RISE_CELLS), math.ceil(width / RISE_CELLS)
    cells = torch.from_numpy(rng.random((RISE_CELLS + 1, RISE_CELLS + 1)) < RISE_SHARE).float()
    size = (RISE_CELLS + 1) * cell[0], (RISE_CELLS + 1) * cell[1]
    mask = F.interpolate(cells[None, None], size=size, mode="bilinear", align_corners=False)[0, 0]
    top, left = rng.integers(cell[0]), rng.integers(cell[1])
    return mask[top : top + height, left : left + width]


def _number_of(x: Tensor) -> int:
    """A number that depends on the image, so that random choices do not depend on the order of images."""
    return zlib.crc32(x.cpu().numpy().tobytes())


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
    model = _frozen_copy(model).float()  # the library converts to numpy, which has no bfloat16
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


# Attention.


def last_attention(model: nn.Module, setting: Setting) -> Saliency:
    """The attention weights of the last layer; the same map for every class."""
    return lambda x, target: upsample(raw_attention(model, x).cpu().numpy(), *x.shape[1:])


def attention_rollout(model: nn.Module, setting: Setting) -> Saliency:
    """Attention rollout; the same map for every class."""
    return lambda x, target: upsample(rollout(model, x).cpu().numpy(), *x.shape[1:])


def attention_relevance(model: nn.Module, setting: Setting) -> Saliency:
    """Rollout of gradient-weighted attention, of the probability."""

    def saliency(x: Tensor, target: int) -> Floats:
        score = class_score(model, target, against=None, unit="probability")
        return upsample(relevance_map(model, x, score), *x.shape[1:])

    return saliency


METHODS: dict[str, Callable[[nn.Module, Setting], Saliency]] = {
    "pixels": pixels,
    "path": path,
    "shapley": shapley_regions,
    "clusters": clusters,
    "attention": last_attention,
    "rollout": attention_rollout,
    "relevance": attention_relevance,
    "grad-cam": grad_cam,
    "integrated gradients": integrated_gradients,
    "rise": rise,
    "random": random_maps,
}
"""The methods that faithfulness compares, by name."""
