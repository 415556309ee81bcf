"""One heat map for one image and class: ours, and what it is compared with.

Each method takes the normalised image ``(3, H, W)`` and the class, and gives ``(H, W)``: higher where the
class rests on the place more. The comparators come from captum and grad-cam, the extra ``explain``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from visualtokens.data import Preprocess
from visualtokens.errors import unknown
from visualtokens.explain.borrowed import as_input, library, own_copy
from visualtokens.explain.explainer import View, explain
from visualtokens.explain.geometry import Floats, enlarge
from visualtokens.explain.grad_cam import grad_cam
from visualtokens.explain.rollout import rollout

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
