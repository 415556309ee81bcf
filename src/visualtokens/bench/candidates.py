"""What can be compared, and how it is made to run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import timm
import torch
from torch import Tensor, nn

import visualtokens.models  # noqa: F401  registers our models with timm
from visualtokens.bench.timing import synchronize
from visualtokens.errors import UserError, unknown

Mode = Literal["eager", "channels_last", "compile", "train"]
Run = Callable[[], object]


@dataclass(frozen=True)
class Candidate:
    """Something to compare under a name: a model, or any function of a batch of images."""

    name: str
    model: Callable[[Tensor], object]


def collect(candidates: Sequence[str | Candidate], size: tuple[int, int]) -> list[Candidate]:
    """The candidates, models given by name built for images of ``size``. Nobody else's model is touched."""
    if not candidates:
        raise UserError("there is nothing to compare; give at least one model")
    names = [c if isinstance(c, str) else c.name for c in candidates]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name!r} is given {names.count(name)} times; give every candidate its own name")
    return [Candidate(c, build(c, size)) if isinstance(c, str) else _own(c) for c in candidates]


def build(name: str, size: tuple[int, int]) -> nn.Module:
    """The untrained model of that name, ours or timm's, for images of ``size``."""
    if ":" in name:  # a folder or a repository (local-dir:run, hf-hub:…), which only timm can look into
        return timm.create_model(name)
    if not timm.is_model(name):
        raise unknown("model", name, timm.list_models())
    config = timm.get_pretrained_cfg(name)
    if config.fixed_input_size and tuple(config.input_size[1:]) != tuple(size):
        return timm.create_model(name, img_size=size)
    return timm.create_model(name)


def _own(candidate: Candidate) -> Candidate:
    """A copy of a given model: training would leave gradients and statistics in the original."""
    if isinstance(candidate.model, nn.Module):
        return Candidate(candidate.name, copy.deepcopy(candidate.model))
    return candidate


def prepare(candidate: Candidate, images: Tensor, mode: Mode) -> Run:
    """A function that runs the candidate once on the images and waits until it is done."""
    if mode not in get_args(Mode):
        raise unknown("mode", mode, get_args(Mode))
    model = candidate.model
    if isinstance(model, nn.Module):
        model.to(images.device).train(mode == "train")
    if mode == "train":
        return _training(candidate, images)
    if mode == "channels_last":
        images = images.contiguous(memory_format=torch.channels_last)
        if isinstance(model, nn.Module):
            model.to(memory_format=torch.channels_last)
    forward = torch.compile(model, dynamic=False) if mode == "compile" else model

    def run() -> object:
        with torch.inference_mode():
            output = forward(images)
        synchronize(images.device)
        return output

    return run


def _training(candidate: Candidate, images: Tensor) -> Run:
    """Forward, and backward from the sum of the output; no optimizer."""
    model = candidate.model
    if not isinstance(model, nn.Module):
        raise UserError(f"candidate {candidate.name!r} is a function and cannot train; give an nn.Module")

    def run() -> object:
        output = model(images)
        if not isinstance(output, Tensor):
            raise UserError(
                f"candidate {candidate.name!r} returns {type(output).__name__}; to train, return a Tensor"
            )
        output.sum().backward()
        model.zero_grad(set_to_none=True)  # so that every run starts with the weights alone
        synchronize(images.device)
        return None

    return run
