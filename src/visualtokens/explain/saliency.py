"""One heat map for one image and class: ours, and what it is compared with.

Each method takes the normalised image ``(3, H, W)`` and the class, and gives ``(H, W)``: higher where the
class rests on the place more. The comparators come from captum and grad-cam, the extra ``explain``.
"""

from __future__ import annotations

import copy
import importlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from visualtokens.data import Preprocess
from visualtokens.errors import UserError, unknown
from visualtokens.explain.classifier import input_like
from visualtokens.explain.explainer import View, explain
from visualtokens.explain.geometry import Floats, place
from visualtokens.explain.rollout import nearest_grid, rollout

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
        return _enlarge(why.saliency(), x)

    return saliency


def grad_cam(model: nn.Module, setting: Setting) -> Saliency:
    """Grad-CAM at the last map of features (of a ViT with a class token: before its last attention)."""
    library = _library("pytorch_grad_cam", "grad-cam")
    targets = _library("pytorch_grad_cam.utils.model_targets", "grad-cam")
    own = _own_copy(model)
    prefix = int(getattr(own, "num_prefix_tokens", 0))

    def saliency(x: Tensor, target: int) -> Floats:
        def to_map(features: Tensor) -> Tensor:
            return features if features.ndim == 4 else _fold(features[:, prefix:], x)

        # The gradient must start somewhere: the copy's weights want none.
        given = _as_input(own, x).unsqueeze(0).requires_grad_()
        layer = _feature_layer(own, given)
        with torch.enable_grad(), library.GradCAM(own, [layer], reshape_transform=to_map) as cam:
            found = cam(given, [targets.ClassifierOutputTarget(target)])
        return found[0]

    return saliency


def integrated_gradients(model: nn.Module, setting: Setting) -> Saliency:
    """Integrated gradients of the probability from a black image, summed over the colours."""
    library = _library("captum.attr", "captum")
    own = _own_copy(model)
    mean, std = torch.tensor(setting.preprocess.mean), torch.tensor(setting.preprocess.std)
    method = library.IntegratedGradients(lambda x: own(x).softmax(1))

    def saliency(x: Tensor, target: int) -> Floats:
        given = _as_input(own, x).unsqueeze(0)
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
        return _enlarge(rollout(model, x).cpu().numpy(), x)

    return saliency


def random_maps(model: nn.Module, setting: Setting) -> Saliency:
    """Noise in cells of 16 pixels, smoothed like the maps of clusters: what knowing nothing achieves."""

    def saliency(x: Tensor, target: int) -> Floats:
        image = zlib.crc32(x.cpu().numpy().tobytes())  # so that the map does not depend on what came before
        rng = np.random.default_rng([setting.seed, image])
        noise = rng.random((max(x.shape[1] // 16, 1), max(x.shape[2] // 16, 1)), dtype=np.float32)
        return _enlarge(noise, x)

    return saliency


METHODS: dict[str, Callable[[nn.Module, Setting], Saliency]] = {
    "clusters": clusters,
    "grad-cam": grad_cam,
    "integrated gradients": integrated_gradients,
    "rollout": attention_rollout,
    "random": random_maps,
}


def make_method(name: str, model: nn.Module, setting: Setting) -> Saliency:
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name](model, setting)


def _enlarge(heat: Floats, x: Tensor) -> Floats:
    height, width = x.shape[1:]
    return place(heat, (0, 0, width, height), (width, height))[0]


def _library(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{package} is not installed; pip install 'visualtokens[explain]', or leave its method out"
        ) from error


def _own_copy(model: nn.Module) -> nn.Module:
    """A copy to take gradients of: the libraries set hooks and clear gradients on what they are given."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def _as_input(model: nn.Module, x: Tensor) -> Tensor:
    like = input_like(model)
    return x.to(like.device, like.dtype)


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
    # In a block of a ViT what is behind the last attention reaches the class token no more.
    return last.norm1 if hasattr(last, "attn") and hasattr(last, "norm1") else last


def _fold(tokens: Tensor, x: Tensor) -> Tensor:
    """``(B, N, C)`` to ``(B, C, H, W)``, on the grid that is shaped like the image."""
    return tokens.mT.unflatten(2, nearest_grid(tokens.shape[1], x.shape[1] / x.shape[2]))
