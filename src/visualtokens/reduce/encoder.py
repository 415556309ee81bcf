"""The transformer inside a model, in the terms of reduction, whichever library the model comes from.

:class:`TimmEncoder` is a timm ``VisionTransformer`` or ``Eva``, whose forward passes reduction replaces; see
:mod:`visualtokens.reduce.families` for the others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

from timm.layers import AttentionPoolLatent, PatchEmbed, RelPosMlp
from timm.layers.attention_pool import AttentionPoolPrr
from timm.models import VisionTransformer
from timm.models.eva import Eva
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.reduce import forward as passes
from visualtokens.reduce.blocks import check_block, reduced_forward
from visualtokens.reduce.state import State

Size = tuple[int, int]
# One step of a forward pass: tokens (B, prefix + n, C), their state, the positions of all patches.
Step = tuple[Tensor, State, Any]
Advanced = tuple[Tensor, State]  # the tokens and their state after a block


class Encoder(ABC):
    """The transformer inside a model. ``module`` has the attribute ``reduction`` as long as it is reduced."""

    root: nn.Module  # the model that contains it, or the module itself
    module: Any
    blocks: Sequence[nn.Module]
    prefix: int  # tokens that are no patches: class token, registers
    dim: int
    image_size: Size  # that the model was created for
    reads_prefix_only: bool  # whether no patch matters after the last attention
    reads_patches: bool  # whether the output depends on the final features of patches
    reading: str = "reads the features of patches"  # what it does then, to complete "this ViT …"
    can_ignore_dropped: bool = True  # whether the head can leave dropped patches out

    @property
    def name(self) -> str:
        return type(self.module).__name__

    @property
    def reduced(self) -> bool:
        return "reduction" in self.module.__dict__

    @property
    def patches(self) -> int:
        """The patches of an image of the model's own size."""
        return math.prod(self.grid(self.image_size))

    @abstractmethod
    def grid(self, size: Size) -> Size:
        """Rows and columns of the patches of an image of ``size`` (H, W)."""

    @abstractmethod
    def install(self, *, joins: bool) -> None:
        """Replace the forward passes; the blocks have their reductions. ``joins``: no pool drops tokens."""

    @abstractmethod
    def uninstall(self) -> None:
        """Restore the forward passes."""

    @abstractmethod
    def embed(self, images: Tensor) -> Step:
        """What the first block is given."""

    @abstractmethod
    def run_block(self, index: int, x: Tensor, state: State, keep: int, positions: Any) -> Advanced:
        """The tokens and the state after block ``index``, which keeps at most ``keep`` tokens."""

    @abstractmethod
    def read_out(self, images: Tensor, x: Tensor, state: State) -> Tensor:
        """The model's output for ``images`` whose tokens after the last block are ``x``."""

    @abstractmethod
    def stem_macs(self, patches: int) -> int:
        """Multiply-adds before the first block."""

    @abstractmethod
    def head_macs(self, patches: int) -> int:
        """Multiply-adds after the last block."""

    @property
    def classes(self) -> int:
        """The number of classes; 0 if the output is no classification, or not known to be one."""
        config = getattr(self.root, "config", None)  # of transformers
        if hasattr(self.root, "classifier") and config is not None:
            return config.num_labels
        return getattr(self.root, "num_classes", 0)

    def output(self, images: Tensor) -> Tensor:
        """Logits, embedding or features ``(B, ·)`` of the whole model."""
        return first_tensor(self.root(images))


OUTPUTS = ("logits", "image_embeds", "pooler_output", "last_hidden_state")  # of transformers, the first found


def first_tensor(output: Any) -> Tensor:
    """The logits, embedding or features ``(B, ·)`` in the output of a model of any library."""
    if isinstance(output, tuple):
        output = output[0]
    if not isinstance(output, Tensor):
        found = (getattr(output, name, None) for name in OUTPUTS)
        output = next(value for value in found if value is not None)
    return output.flatten(1)


class TimmEncoder(Encoder):
    """A timm ``VisionTransformer`` or ``Eva``."""

    def __init__(self, root: nn.Module, vit: Any) -> None:
        self.root, self.module = root, vit
        self.blocks = vit.blocks
        self.prefix, self.dim = vit.num_prefix_tokens, vit.embed_dim
        self.reads_prefix_only = passes.reads_prefix_only(vit)
        self.reads_patches = vit.global_pool != "token" or not vit.num_prefix_tokens
        self.reading = f"with global_pool={vit.global_pool!r} reads them"
        self.can_ignore_dropped = not isinstance(vit.attn_pool, AttentionPoolPrr)
        base = VisionTransformer if isinstance(vit, VisionTransformer) else Eva
        changed = [part for part in passes.REPLACED if getattr(type(vit), part) is not getattr(base, part)]
        if changed:
            raise UserError(
                f"cannot reduce {self.name}: it overrides {base.__name__}.{changed[0]}, "
                "which reduction replaces"
            )
        if not isinstance(vit.patch_drop, (nn.Identity, type(None))):
            raise UserError(
                f"cannot reduce {self.name}: with patch_drop_rate the patches of each token are unknown; "
                "create it with patch_drop_rate=0"
            )
        if not hasattr(vit.patch_embed, "dynamic_feat_size"):
            kind = type(vit.patch_embed).__name__
            raise UserError(f"cannot reduce {self.name}: its {kind} does not report the number of patches")
        for i, block in enumerate(self.blocks):
            check_block(self.name, i, block)

    @property
    def image_size(self) -> Size:  # type: ignore[override]  # set_input_size changes it
        height, width = self.module.patch_embed.img_size
        return height, width

    @property
    def patches(self) -> int:
        return self.module.patch_embed.num_patches

    def grid(self, size: Size) -> Size:
        return self.module.patch_embed.dynamic_feat_size(size)

    def install(self, *, joins: bool) -> None:
        for block in self.blocks:
            block.forward = partial(reduced_forward, block)
        for part in passes.REPLACED:
            if part != "pool" or not joins:
                setattr(self.module, part, partial(getattr(passes, part), self.module))

    def uninstall(self) -> None:
        for part in passes.REPLACED:
            self.module.__dict__.pop(part, None)
        for block in self.blocks:
            del block.forward

    def embed(self, images: Tensor) -> Step:
        return passes.embed(self.module, images, track=not self.reads_prefix_only)

    def run_block(self, index: int, x: Tensor, state: State, keep: int, positions: Any) -> Advanced:
        return passes.run_block(self.module, index, x, state, keep, positions)

    def read_out(self, images: Tensor, x: Tensor, state: State) -> Tensor:
        return passes.read_out(self.module, x, state)

    def stem_macs(self, patches: int) -> int:
        vit = self.module
        if not isinstance(vit.patch_embed, PatchEmbed):
            raise _unknown_cost(vit.patch_embed)
        # learned rotary positions: patch positions times frequencies in every block
        rotary = len(vit.blocks) * patches * vit.embed_dim if getattr(vit, "rope_mixed", False) else 0
        return patches * vit.patch_embed.proj.weight.numel() + rotary

    def head_macs(self, patches: int) -> int:
        """The classifiers, and attention pooling over all patches."""
        vit = self.module
        heads = [vit.head, getattr(vit, "head_dist", None)]
        total = sum(linear_weights(head) for head in heads if head is not None)
        pool = vit.attn_pool
        if pool is None:
            return total
        if not isinstance(pool, AttentionPoolLatent):
            raise _unknown_cost(pool)
        include = getattr(vit, "pool_include_prefix", True)
        n = patches + (vit.num_prefix_tokens if include else 0)
        per_latent = (linear_weights(pool) - pool.kv.weight.numel()) * pool.latent_len
        return total + per_latent + n * pool.kv.weight.numel() + 2 * n * pool.latent_len * vit.embed_dim


def linear_weights(module: nn.Module) -> int:
    """The weights of all linear layers in ``module``: its multiply-adds per token."""
    if isinstance(module, RelPosMlp):  # sees positions, not tokens
        return 0
    own = module.weight.numel() if isinstance(module, nn.Linear) else 0
    if isinstance(module, nn.MultiheadAttention):
        own += module.in_proj_weight.numel()
    return own + sum(map(linear_weights, module.children()))


def _unknown_cost(part: nn.Module) -> UserError:
    kind = type(part).__name__
    return UserError(f"the cost of a {kind} is unknown; count it with visualtokens.bench.count_macs")
