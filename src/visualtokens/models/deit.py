"""DeiT between tiny and small, as Token Pooling uses it: 318 and 252 wide (Tables 4 and 5).

The network is timm's own, for images of any size. ``visualtokens.reduce`` makes it work on fewer tokens.
"""

from __future__ import annotations

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import VisionTransformer

from visualtokens.models.registry import register_family

DEPTH = 12
DEIT: dict[str, Any] = dict(patch_size=16, depth=DEPTH, num_heads=6)
DEIT |= dict(dynamic_img_size=True, dynamic_img_pad=True)
CONFIGS = {"deit_e318": DEIT | dict(embed_dim=318), "deit_e252": DEIT | dict(embed_dim=252)}

_IMAGENET_CFG = dict(
    num_classes=1000,
    input_size=(3, 224, 224),
    crop_pct=0.9,
    interpolation="bicubic",
    mean=IMAGENET_DEFAULT_MEAN,
    std=IMAGENET_DEFAULT_STD,
    first_conv="patch_embed.proj",
    classifier="head",
    fixed_input_size=False,
)

register_family(__name__, VisionTransformer, CONFIGS, default_cfg=_IMAGENET_CFG, levels=DEPTH)
