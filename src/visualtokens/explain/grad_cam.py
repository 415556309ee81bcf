"""Grad-CAM at the last features that know their places.

Of a ViT with a class token those are in front of the last attention: what is behind it reaches the answer
no more. In a reduced ViT they are few tokens, and every patch gets the value of the token it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.explain.borrowed import as_input, library, own_copy
from visualtokens.explain.geometry import Floats, enlarge
from visualtokens.explain.rollout import nearest_grid
from visualtokens.grouping import record_groupings
from visualtokens.ops import ungroup


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
