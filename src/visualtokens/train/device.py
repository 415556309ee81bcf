"""Choosing where to compute."""

from __future__ import annotations

import torch

from visualtokens.errors import UserError


def pick_device(name: str) -> torch.device:
    """The device called ``name``; ``"auto"`` is the accelerator of this machine, or its CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"unknown device {name!r}; choose auto, cpu, cuda, cuda:1 or mps") from error
    if device.type == "cpu":
        return device
    if accelerator is None or accelerator.type != device.type:
        has = "no accelerator" if accelerator is None else f"only {accelerator.type}"
        raise UserError(f"device {name!r} is not available: this machine has {has}; use auto or cpu")
    if device.index is not None and device.index >= torch.accelerator.device_count():
        count = torch.accelerator.device_count()
        raise UserError(f"device {name!r} does not exist: the last one is {device.type}:{count - 1}")
    return device
