"""What every pyramid of this library has in common: the conventions that timm's users rely on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.models._features import feature_take_indices
from torch import Tensor, nn


class Pyramid(nn.Module):
    """Stages that each turn a map ``(B, C, H, W)`` into a smaller one, then a linear classifier.

    ``channels`` and ``strides`` describe the output of each stage. ``final`` is what comes between the last
    stage and the pooling, and gives ``num_features`` channels; without it those of the last stage.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        *,
        channels: Sequence[int],
        strides: Sequence[int],
        in_chans: int,
        num_classes: int,
        global_pool: str,
        drop_rate: float,
        final: nn.Module | None = None,
        num_features: int | None = None,
    ) -> None:
        super().__init__()
        self.in_chans = in_chans
        self.stages = nn.ModuleList(stages)
        self.final = final or nn.Identity()
        self.num_features = self.head_hidden_size = num_features or channels[-1]
        self.feature_info = [
            dict(num_chs=c, reduction=s, module=f"stages.{i}")
            for i, (c, s) in enumerate(zip(channels, strides, strict=True))
        ]
        self.head_drop = nn.Dropout(drop_rate)
        self.num_classes = -1
        self.reset_classifier(num_classes, global_pool)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        if global_pool is not None:
            if global_pool not in ("avg", ""):
                raise ValueError(f"global_pool={global_pool!r} is neither 'avg' nor '' (no pooling)")
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head: nn.Module = nn.Identity()
        if num_classes > 0:
            like = next(self.stages.parameters())
            head = nn.Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)
            self.head = _init_linear(head)

    def get_classifier(self) -> nn.Module:
        return self.head

    def no_weight_decay(self) -> set[str]:
        return set()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups for layer-wise learning rates: a stage, or (fine) each of its blocks."""
        if coarse:
            return dict(stem=r"^stages\.0\.embed", blocks=r"^stages\.(\d+)")
        return dict(
            stem=r"^stages\.0\.embed",
            blocks=[
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^stages\.(\d+)\.embed", (0,)),
                (r"^stages\.(\d+)\.norm", (99999,)),
            ],
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpointing = enable  # type: ignore[assignment]

    def forward_features(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.final(x)  # (B, C, H, W)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.global_pool:
            x = self.head_drop(x.mean(dim=(2, 3)))  # (B, C)
            return x if pre_logits else self.head(x)
        if pre_logits or self.num_classes == 0:
            return x
        return self.head(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # (B, classes, H, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The outputs of the chosen stages; and what ``forward_features`` gives, or where it stopped."""
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt={output_fmt!r}: a pyramid gives maps, so only 'NCHW'")
        take, last = feature_take_indices(len(self.stages), indices)
        intermediates = []
        for i, stage in enumerate(self.stages):
            if stop_early and i > last:
                break
            x = stage(x)
            if i in take:
                intermediates.append(x)
        if intermediates_only:
            return intermediates
        stopped = stop_early and last + 1 < len(self.stages)
        return x if stopped else self.final(x), intermediates

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages after the last one asked for, and what reads the last stage."""
        take, last = feature_take_indices(len(self.stages), indices)
        if prune_norm or last + 1 < len(self.stages):
            self.final = nn.Identity()
        self.stages = self.stages[: last + 1]
        if prune_head:
            self.reset_classifier(0, "")
        return list(take)


def channels_last(x: Tensor) -> Tensor:
    """The memory layout in which sequence and map are the same (see ``layers.maps``)."""
    return x.contiguous(memory_format=torch.channels_last)


def init_weights(model: nn.Module) -> None:
    """PVTv2's initialisation: truncated normal for Linear, fan-out normal for convolutions."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            _init_linear(module)
        elif isinstance(module, nn.Conv2d):
            fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
            nn.init.normal_(module.weight, std=(2.0 / fan_out) ** 0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _init_linear(linear: nn.Linear) -> nn.Linear:
    nn.init.trunc_normal_(linear.weight, std=0.02)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear
