"""STViT without convolution stem, projection, CPE and ConvFFN, for the comparison with Swin (Table II)."""

from __future__ import annotations

from typing import Any

from visualtokens.models.registry import register_family
from visualtokens.models.stvit import STViT

ISO: dict[str, Any] = dict(stem="patch", convolutions=False, projection=0)
RPE: dict[str, Any] = dict(windows=(7, 7, 14, 7))  # of super tokens, for images of 224×224
NARROW: dict[str, Any] = dict(channels=(64, 128, 320, 512), depths=(3, 5, 9, 3), heads=(1, 2, 5, 8))

CONFIGS: dict[str, dict[str, Any]] = {
    "stvit_iso_96": ISO | RPE | dict(channels=(96, 192, 384, 768), depths=(2, 2, 6, 2), heads=(3, 6, 12, 24)),
    "stvit_iso_64": ISO | RPE | NARROW,
    "stvit_iso_64_norpe": ISO | NARROW,
}

register_family(
    __name__,
    STViT,
    CONFIGS,
    default_cfg=dict(first_conv="stages.0.embed.proj"),
)
