"""VT-FPN: the feature pyramid of Visual Transformers (Sec. 4, Figure 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from visualtokens.layers import FilterTokenizer, Projector, TokenTransformer
from visualtokens.models.pyramid import channels_last


class VTFPN(nn.Module):
    """The levels talk through tokens instead of sums of enlarged maps.

    Each level of ``channels`` is summed up in ``tokens`` tokens (Eq. 1), one transformer runs over the
    tokens of all levels (Eq. 3, 4), and each level, at ``dim`` channels, reads all of them back (Eq. 5).
    No level is enlarged and no 3×3 convolution runs over pixels.
    """

    def __init__(
        self,
        channels: Sequence[int],
        *,
        dim: int = 256,
        tokens: int = 8,
        token_dim: int = 1024,
        attn_dim: int = 512,
        groups: int = 2,
        hidden: int = 1024,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.tokenizers = nn.ModuleList(
            FilterTokenizer(c, tokens=tokens, token_dim=token_dim, value=True) for c in channels
        )
        self.mixer = TokenTransformer(token_dim, hidden=hidden, attn_dim=attn_dim, groups=groups)
        self.projectors = nn.ModuleList(Projector(c, dim, token_dim=token_dim) for c in channels)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        maps = [channels_last(x) for x in maps]  # where a map and the sequence of its pixels are one memory
        found = [tokenizer(x) for tokenizer, x in zip(self.tokenizers, maps, strict=True)]
        tokens = self.mixer(torch.cat(found, dim=1))  # (B, levels·L, CT)
        return [projector(x, tokens) for projector, x in zip(self.projectors, maps, strict=True)]
