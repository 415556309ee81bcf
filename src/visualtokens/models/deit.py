"""DeiT between tiny and small, with 318 and 252 channels, as in Token Pooling (Tables 4 and 5).

The network is timm's, for images of any size. ``visualtokens.reduce`` reduces its tokens.
"""

from __future__ import annotations

from typing import Any

from timm.layers import to_2tuple
from timm.models import VisionTransformer

from visualtokens.models.registry import ImageSize, check_size, record_size, register_family
from visualtokens.models.released import ReleasedNames

DEPTH = 12
DEIT: dict[str, Any] = dict(
    patch_size=16, depth=DEPTH, num_heads=6, dynamic_img_size=True, dynamic_img_pad=True
)
CONFIGS = {"deit_e318": DEIT | dict(embed_dim=318), "deit_e252": DEIT | dict(embed_dim=252)}


class DeiT(ReleasedNames, VisionTransformer):
    """timm's vision transformer; ``img_size`` is the size for which position embeddings are learned."""

    def __init__(
        self, *, img_size: ImageSize = 224, patch_size: int | tuple[int, int] = 16, **options: Any
    ) -> None:
        size = check_size(img_size, least=max(to_2tuple(patch_size)))
        super().__init__(img_size=size, patch_size=patch_size, **options)

    def set_input_size(
        self, img_size: ImageSize | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Resamples the position embeddings for ``img_size`` and the patch embedding for ``patch_size``."""
        patch = to_2tuple(patch_size or self.patch_embed.patch_size)
        size = check_size(self.patch_embed.img_size if img_size is None else img_size, least=max(patch))
        super().set_input_size(img_size=size, patch_size=patch)
        record_size(self, size)


register_family(
    __name__,
    DeiT,
    CONFIGS,
    default_cfg=dict(first_conv="patch_embed.proj", pool_size=None),
    levels=DEPTH,
)
