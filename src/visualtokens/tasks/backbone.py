"""Any backbone of timm's registry, which holds ours, as a pyramid of maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import timm
from timm.layers import Format
from torch import Tensor, nn

import visualtokens.models as _registers_our_models  # noqa: F401
from visualtokens.errors import UserError, unknown

FINEST_STRIDE = 4  # finer maps, such as those of a stem, are left out
MOST_LEVELS = 4
# Arguments that fetch or unpickle files, or that are given otherwise.
_RESERVED = (
    *("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"),
    *("features_only", "out_indices", "num_classes", "in_chans"),
)


class Backbone(nn.Module):
    """Images ``(B, 3, H, W)`` to maps ``(B, channels[i], H / strides[i], W / strides[i])``, finest first.

    By default the maps are those of stride 4 and coarser, the last four of them. ``out_indices`` names the
    levels of the backbone instead, such as blocks 3, 5, 7 and 11 of a plain vision transformer.
    """

    def __init__(
        self,
        name: str,
        *,
        pretrained: bool = False,
        out_indices: Sequence[int] | None = None,
        stride_first: bool = False,
        in_chans: int = 3,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        given = dict(options or {})
        if out_indices is not None:
            given["out_indices"] = tuple(out_indices)
        self.body = _create(name, pretrained=pretrained, in_chans=in_chans, options=given)
        if stride_first:
            _stride_first(self.body, name)
        channels, strides = self.body.feature_info.channels(), self.body.feature_info.reduction()
        self._take = list(range(len(strides)))
        if out_indices is None:
            self._take = [i for i, stride in enumerate(strides) if stride >= FINEST_STRIDE][-MOST_LEVELS:]
        if not self._take:
            raise UserError(
                f"backbone {name!r} has no map of stride {FINEST_STRIDE} or more; give out_indices"
            )
        self.channels = tuple(channels[i] for i in self._take)
        self.strides = tuple(strides[i] for i in self._take)
        if list(self.strides) != sorted(self.strides):
            raise UserError(
                f"the maps of backbone {name!r} have the strides {self.strides}; give them fine first"
            )
        self._nhwc = getattr(self.body, "output_fmt", Format.NCHW) == Format.NHWC

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """What timm knows about the backbone: the mean and deviation it expects, among others."""
        return self.body.pretrained_cfg

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.body.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """The parameters that the backbone wants left alone, by the names they have here."""
        return {
            f"{prefix}.{parameter}".removeprefix(".")
            for prefix, module in self.named_modules()
            if module is not self and hasattr(module, "no_weight_decay")
            for parameter in module.no_weight_decay()
        }

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = self.body(images)
        if self._nhwc:
            maps = [x.permute(0, 3, 1, 2) for x in maps]
        return [maps[i] for i in self._take]


def _create(name: str, *, pretrained: bool, in_chans: int, options: Mapping[str, Any]) -> Any:
    if not timm.is_model(name):
        raise unknown("backbone", name, timm.list_models())
    try:
        return timm.create_model(
            name, features_only=True, pretrained=pretrained, in_chans=in_chans, **options
        )
    except (TypeError, AttributeError, RuntimeError, IndexError) as error:
        # An option that the model does not have, a level that it does not have, or no levels at all.
        line = " ".join(str(error).split())[:200]
        raise UserError(f"backbone {name!r} with {dict(options)} gives no maps: {line}") from error


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse arguments of timm.create_model that would read files or that have a place of their own."""
    for name in _RESERVED:
        if name in options:
            raise UserError(f"backbone_args may not hold {name!r}; leave it out")


def _stride_first(body: nn.Module, name: str) -> None:
    """Move the stride of every bottleneck from its 3×3 to the 1×1 convolution before it.

    The first ResNets have it there. timm's, like torchvision's, cost 6 % more in return for accuracy.
    """
    blocks = [m for m in body.modules() if isinstance(m, timm.models.resnet.Bottleneck)]
    if not blocks:
        raise UserError(f"backbone {name!r} has no bottlenecks of ResNet; leave stride_first out")
    for block in blocks:
        block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
