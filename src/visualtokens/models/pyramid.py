"""Base classes with the methods that timm expects of every model: a classifier, and a pyramid of stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.models._features import feature_take_indices
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.models.registry import AnySize


class Classifier(AnySize, nn.Module):
    """A model that computes ``forward_head(forward_features(x))``, with a linear classifier as its head."""

    def add_head(self, num_features: int, num_classes: int, *, global_pool: str, drop_rate: float) -> None:
        """Adds the classifier; the other layers must exist, because it takes their device and dtype."""
        self.num_features = self.head_hidden_size = num_features
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes, global_pool)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the head; ``global_pool`` is ``"avg"``, ``""`` (no pooling) or None (as before)."""
        if global_pool is not None:
            if global_pool not in ("avg", ""):
                raise UserError(f"global_pool={global_pool!r} is neither 'avg' nor '' (no pooling)")
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head: nn.Module = nn.Identity()
        if num_classes > 0:
            like = next(self.parameters())
            head = nn.Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)
            self.init_head(head)
            self.head = head

    def init_head(self, head: nn.Linear) -> None:
        """Initialises a new head; by default as ``nn.Linear`` does."""

    def get_classifier(self) -> nn.Module:
        return self.head

    def no_weight_decay(self) -> set[str]:
        return set()

    def forward_features(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


class Pyramid(Classifier):
    """Stages that each map ``(B, C, H, W)`` to a smaller map, then a linear classifier.

    ``channels`` and ``strides`` describe the output of each stage. ``final`` is applied between the last
    stage and the pooling and returns ``num_features`` channels, by default those of the last stage.
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
        self.feature_info = [
            dict(num_chs=c, reduction=s, module=f"stages.{i}")
            for i, (c, s) in enumerate(zip(channels, strides, strict=True))
        ]
        self.add_head(num_features or channels[-1], num_classes, global_pool=global_pool, drop_rate=drop_rate)

    def init_head(self, head: nn.Linear) -> None:
        _init_linear(head)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Returns layer groups for layer-wise learning rates: stages, or (fine) their blocks."""
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

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Returns the output of ``forward_features`` (or of the last stage run) and the selected maps."""
        require_nchw(output_fmt)
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
        """Removes the stages after the last selected one, and the layers that read the last stage."""
        take, last = feature_take_indices(len(self.stages), indices)
        if prune_norm or last + 1 < len(self.stages):
            self.final = nn.Identity()
        self.stages = self.stages[: last + 1]
        if prune_head:
            self.reset_classifier(0, "")
        return list(take)


def init_weights(model: nn.Module) -> None:
    """Initialises as PVTv2: truncated normal for Linear, fan-out normal for convolutions, zero biases."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            _init_linear(module)
        elif isinstance(module, nn.Conv2d):
            fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
            nn.init.normal_(module.weight, std=(2.0 / fan_out) ** 0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _init_linear(linear: nn.Linear) -> None:
    nn.init.trunc_normal_(linear.weight, std=0.02)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def require_nchw(output_fmt: str) -> None:
    """Raises an error for any other format of ``forward_intermediates``: the intermediates are maps."""
    if output_fmt != "NCHW":
        raise UserError(f"output_fmt={output_fmt!r}: the intermediates are maps, so only 'NCHW'")
