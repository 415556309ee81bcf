"""DeiT between tiny and small, with 318 and 252 channels, as in Token Pooling (Tables 4 and 5).

The network is timm's, for images of any size. ``visualtokens.reduce`` reduces its tokens.
"""

from __future__ import annotations

from typing import Any

from timm.models import VisionTransformer

from visualtokens.models.registry import register_family

DEPTH = 12
DEIT: dict[str, Any] = dict(
    patch_size=16, depth=DEPTH, num_heads=6, dynamic_img_size=True, dynamic_img_pad=True
)
CONFIGS = {"deit_e318": DEIT | dict(embed_dim=318), "deit_e252": DEIT | dict(embed_dim=252)}

register_family(
    __name__,
    VisionTransformer,
    CONFIGS,
    default_cfg=dict(first_conv="patch_embed.proj", pool_size=None),
    levels=DEPTH,
)
