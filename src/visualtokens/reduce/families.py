"""The supported kinds of models, and how those that are not a timm ``VisionTransformer`` are reduced.

Of such a model only the blocks are replaced (:class:`BlockEncoder`): each takes and returns features of all
patches, as before, and hands its tokens to the next block with them. What the model does before, between and
after its blocks stays as it is, so that hidden states, pooling and heads need no code here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers import RelPosMlp
from timm.models import VisionTransformer
from timm.models._features import FeatureGetterNet
from timm.models.eva import Eva
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.reduce.attention import NOWHERE, Decomposed, Positions
from visualtokens.reduce.blocks import attentions, check_block, reduced_forward
from visualtokens.reduce.encoder import Advanced, Encoder, Size, Step, TimmEncoder, linear_weights
from visualtokens.reduce.state import State, patch_positions, spread


def encoder_of(model: nn.Module) -> Encoder:
    """The transformer in ``model``; a UserError with the reason if it cannot be reduced."""
    found = _inside(model)
    if isinstance(found, VisionTransformer | Eva):
        return TimmEncoder(model, found)
    name = _qualified(found)
    if name in REFUSED:
        raise UserError(f"cannot reduce {type(found).__name__}: {REFUSED[name]}")
    return BlockEncoder(model, found, FAMILIES[name])


def _inside(model: nn.Module) -> nn.Module:
    """The transformer: ``model`` itself, or the only one inside a wrapper of a known library."""
    if _is_known(model):
        return model
    inner = [child for child in model.modules() if _is_known(child)]
    name = type(model).__name__
    wrapper = isinstance(model, FeatureGetterNet) or type(model).__module__.startswith(WRAPPERS)
    if len(inner) == 1 and wrapper:
        return inner[0]
    if len(inner) > 1 and wrapper:
        raise UserError(f"cannot reduce {name}: it has {len(inner)} vision transformers; reduce one of them")
    advice = "; reduce the model inside, then wrap it again" if inner else ""
    if type(model).__module__ in HIERARCHICAL:
        raise UserError(
            f"cannot reduce {name}: its blocks attend within windows or on several scales, so its tokens "
            "must form a grid"
        )
    raise UserError(f"cannot reduce {name}: it is not a vision transformer of a supported kind{advice}")


def _is_known(module: nn.Module) -> bool:
    name = _qualified(module)
    return isinstance(module, VisionTransformer | Eva) or name in FAMILIES or name in REFUSED


def _qualified(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


class Family(NamedTuple):
    """Where a kind of model has what reduction needs, as dotted names of attributes."""

    blocks: str
    image_size: str
    patch_size: str
    dim: str
    prefix: Any  # (module) -> tokens that are no patches
    reads_patches: bool = True  # by its own head, or by the classifiers that are built on it
    pooling: str | None = None  # an attention pooling over all patches, with one query


class Carried(NamedTuple):
    """What a block hands to the next one, as an attribute of the features that it returns."""

    tokens: Tensor | None  # (B, prefix + K, C); None: the features themselves, as long as nothing was pooled
    state: State
    keep: tuple[int, ...]  # tokens after each block


CARRIED = "visualtokens_carried"


class BlockEncoder(Encoder):
    """A model whose blocks are called one after the other: ``x = block(x, …)``."""

    reads_prefix_only = False  # what the code around the blocks does with the patches is not known

    def __init__(self, root: nn.Module, module: Any, family: Family) -> None:
        self.root, self.module, self.family = root, module, family
        self.blocks = list(_get(module, family.blocks))
        self.prefix = family.prefix(module)
        self.dim = _get(module, family.dim)
        self.image_size = _pair(_get(module, family.image_size))
        self.reads_patches = family.reads_patches
        self.can_ignore_dropped = not family.reads_patches
        if isinstance(getattr(module, "patch_dropout", None), nn.Module) and not isinstance(
            module.patch_dropout, nn.Identity
        ):
            raise UserError(
                f"cannot reduce {self.name}: with patch_dropout the patches of each token are unknown; "
                "create it with patch_dropout=0"
            )
        for i, block in enumerate(self.blocks):
            check_block(self.name, i, block)
            _check_global(self.name, i, block, self.grid(self.image_size))

    def grid(self, size: Size) -> Size:
        height, width = _pair(_get(self.module, self.family.patch_size))
        return size[0] // height, size[1] // width

    def install(self, *, joins: bool) -> None:
        for i, block in enumerate(self.blocks):
            block.forward = partial(_run, self, i)

    def uninstall(self) -> None:
        for block in self.blocks:
            del block.forward

    def begin(self, x: Tensor) -> State:
        """The state before the first block for ``x (B, prefix + N, C)``."""
        grid = self._grid_of(x.shape[1] - self.prefix)
        return State(grid=grid, cells=grid, track=True)

    def _grid_of(self, patches: int) -> Size:
        """The grid of an image from its number of patches: the model's own, or a square."""
        own = self.grid(self.image_size)
        if math.prod(own) == patches:
            return own
        side = math.isqrt(patches)
        if side**2 != patches:
            raise UserError(
                f"{patches} patches do not form a square, and this {self.name} does not tell their rows and "
                f"columns; give square images, or images of {self.image_size[0]}×{self.image_size[1]}"
            )
        return side, side

    def embed(self, images: Tensor) -> Step:
        def stop(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            raise _Reached(x, args, kwargs)

        with self._replaced([stop]):
            try:
                self.root(images)
            except _Reached as reached:
                x = _flat(reached.x)
                return x, self.begin(x), (reached.args, reached.kwargs)
        raise UserError(f"the forward pass of this {type(self.root).__name__} does not run its first block")

    def run_block(self, index: int, x: Tensor, state: State, keep: int, positions: Any) -> Advanced:
        args, kwargs = positions
        block = self.blocks[index]
        return reduced_forward(block, x, state, keep, _positions(block, state.grid, args, kwargs))

    def read_out(self, images: Tensor, x: Tensor, state: State) -> Tensor:
        features = spread(x, state, self.prefix)

        def first(before: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return features.reshape(before.shape)

        def same(before: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return before

        with self._replaced([first, *[same] * (len(self.blocks) - 1)]):
            return self.output(images)

    @contextmanager
    def _replaced(self, forwards: Sequence[Any]) -> Iterator[None]:
        """Run these instead of the first blocks."""
        before = [block.__dict__.get("forward") for block in self.blocks]
        try:
            for block, forward in zip(self.blocks, forwards, strict=False):
                block.forward = forward
            yield
        finally:
            for block, forward in zip(self.blocks, before, strict=True):
                block.__dict__.pop("forward", None)
                if forward is not None:
                    block.forward = forward

    def stem_macs(self, patches: int) -> int:
        conv = next(m for m in self.module.modules() if isinstance(m, nn.Conv2d))
        mlps = [m for m in self.module.modules() if isinstance(m, RelPosMlp)]  # once per pass, for all images
        places = sum(m.rel_coords_log[..., 0].numel() * linear_weights(m.mlp) for m in mlps)
        return patches * conv.weight.numel() + places

    def head_macs(self, patches: int) -> int:
        """The linear layers of ``module`` after the blocks, of which all but ``pooling`` see one token."""
        own = linear_weights(self.module) - sum(map(linear_weights, self.blocks))
        if isinstance(getattr(self.module, "proj", None), nn.Parameter):  # open_clip
            own += self.module.proj.numel()
        pool = None if self.family.pooling is None else getattr(self.module, self.family.pooling, None)
        if pool is not None:  # keys and values of all patches, then the products with one query
            own += 2 * self.dim**2 * (patches - 1) + 2 * patches * self.dim
        return own


class _Reached(Exception):
    """The input of the first block."""

    def __init__(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.x, self.args, self.kwargs = x, args, kwargs


def _run(encoder: BlockEncoder, index: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replaces the forward of block ``index``: features of all patches in, features of all patches out."""
    carried: Carried | None = getattr(x, CARRIED, None)
    if index == 0:
        tokens = _flat(x)
        state = encoder.begin(tokens)
        keep = encoder.module.reduction.schedule.tokens(math.prod(state.grid))
    elif carried is None:
        raise UserError(
            f"block {index} was given other features than block {index - 1} returned, so their tokens are "
            "unknown; this happens under reentrant gradient checkpointing: give use_reentrant=False"
        )
    else:
        tokens = _flat(x) if carried.tokens is None else carried.tokens
        state, keep = carried.state, carried.keep
    block = encoder.blocks[index]
    positions = _positions(block, state.grid, args, kwargs)
    tokens, state = reduced_forward(block, tokens, state, keep[index], positions)
    features = spread(tokens, state, encoder.prefix)
    out = features.view(x.shape)
    setattr(out, CARRIED, Carried(None if features is tokens else tokens, state, keep))
    return out


def _flat(x: Tensor) -> Tensor:
    """``(B, N, C)``, also from ``(B, H, W, C)``."""
    return x.flatten(1, -2)


MASKS = ("attention_mask", "attn_mask", "k_x", "v_x")


def _positions(block: Any, grid: Size, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Positions:
    """The positions in the arguments of a block and in the block itself; a mask is refused."""
    masks = [*args, *(kwargs.get(name) for name in MASKS)]
    if any(isinstance(mask, Tensor) for mask in masks):
        raise UserError(
            "attention masks (padding, images of several sizes) refer to patches, which a reduced model "
            "merges or drops; restore it first, or give images of one size without a mask"
        )
    if kwargs.get("position_embeddings") is not None:  # DINOv3: cosines and sines, (N, D) each
        return Positions(rope=torch.cat(kwargs["position_embeddings"], dim=-1))
    attn: Any = attentions(block)[0]
    if getattr(attn, "use_rel_pos", False):  # SAM
        if (len(attn.rel_pos_h), len(attn.rel_pos_w)) != (2 * grid[0] - 1, 2 * grid[1] - 1):
            own = (len(attn.rel_pos_h) + 1) // 2, (len(attn.rel_pos_w) + 1) // 2
            raise UserError(f"a grid of {grid} patches; the relative positions of this model are for {own}")
        place = patch_positions(grid, attn.rel_pos_h.device)
        return Positions(decomposed=Decomposed(attn.rel_pos_h, attn.rel_pos_w, place))
    relative = _own_relative(attn)
    shared = kwargs.get("shared_rel_pos_bias", kwargs.get("shared_rel_pos"))
    if shared is not None:
        shared = shared if shared.ndim == 4 else shared.unsqueeze(0)  # (1, heads, N, N)
        relative = shared if relative is None else relative + shared
    return NOWHERE if relative is None else Positions(relative=relative)


def _own_relative(attn: Any) -> Tensor | None:
    """The relative position bias ``(1, heads, N, N)`` that an attention module of timm has itself."""
    if getattr(attn, "relative_position_bias_table", None) is not None:  # BEiT
        return attn._get_rel_pos_bias()
    return None if getattr(attn, "rel_pos", None) is None else attn.rel_pos.get_bias()


def _check_global(model: str, index: int, block: Any, grid: Size) -> None:
    """Refuse blocks whose attention depends on the grid in a way that tokens cannot follow."""
    attn: Any = attentions(block)[0]
    reason, window = None, getattr(block, "window_size", 0)
    if window and grid != (window, window):  # one window with all patches is global
        reason = f"attends within windows of {window}, which tokens do not form"
    elif getattr(attn, "rope", None) is not None:
        reason = "has rotary positions of its own"
    elif getattr(attn, "batch_first", True) is False:
        reason = "puts the batch second"
    if reason:
        raise UserError(f"cannot reduce {model}: the {type(block).__name__} of block {index} {reason}")


def _get(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


def _pair(value: Any) -> Size:
    height, width = (value, value) if isinstance(value, int) else value
    return int(height), int(width)


def _hf(blocks: str, prefix: Any, **options: Any) -> Family:
    return Family(blocks, "config.image_size", "config.patch_size", "config.hidden_size", prefix, **options)


def _timm(prefix: Any, **options: Any) -> Family:
    return Family("blocks", "patch_embed.img_size", "patch_embed.patch_size", "embed_dim", prefix, **options)


def _registers(module: Any) -> int:
    return 1 + module.config.num_register_tokens


WRAPPERS = ("transformers.", "open_clip.", "visualtokens.")
_MODELS = "transformers.models"
_REGISTERS = f"{_MODELS}.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegisters"
FAMILIES: dict[str, Family] = {
    f"{_MODELS}.vit.modeling_vit.ViTModel": _hf("layers", lambda _: 1, reads_patches=False),
    f"{_MODELS}.deit.modeling_deit.DeiTModel": _hf("layers", lambda _: 2, reads_patches=False),
    f"{_MODELS}.clip.modeling_clip.CLIPVisionModel": _hf("encoder.layers", lambda _: 1),
    f"{_MODELS}.siglip.modeling_siglip.SiglipVisionModel": _hf("encoder.layers", lambda _: 0, pooling="head"),
    f"{_MODELS}.dinov2.modeling_dinov2.Dinov2Model": _hf("encoder.layer", lambda _: 1),
    f"{_MODELS}.dinov2.modeling_dinov2.Dinov2Backbone": _hf("encoder.layer", lambda _: 1),
    f"{_REGISTERS}Model": _hf("encoder.layer", _registers),
    f"{_REGISTERS}Backbone": _hf("encoder.layer", _registers),
    f"{_MODELS}.dinov3_vit.modeling_dinov3_vit.DINOv3ViTModel": _hf("model.layer", _registers),
    f"{_MODELS}.dinov3_vit.modeling_dinov3_vit.DINOv3ViTBackbone": _hf("model.layer", _registers),
    "torchvision.models.vision_transformer.VisionTransformer": Family(
        "encoder.layers", "image_size", "patch_size", "hidden_dim", lambda _: 1, reads_patches=False
    ),
    "open_clip.transformer.VisionTransformer": Family(
        "transformer.resblocks", "image_size", "patch_size", "transformer.width", lambda _: 1
    ),
    "timm.models.beit.Beit": _timm(lambda _: 1),
    "timm.models.vision_transformer_relpos.VisionTransformerRelPos": _timm(lambda m: m.num_prefix_tokens),
    "timm.models.vision_transformer_sam.VisionTransformerSAM": _timm(lambda _: 0),
}
REFUSED = {
    f"{_MODELS}.siglip2.modeling_siglip2.Siglip2VisionModel": "it pads images of several sizes and masks the "
    "padding; use a SigLIP 2 checkpoint of a fixed size, which transformers loads as SiglipVisionModel",
}
# Modules of models with windows or stages.
HIERARCHICAL = {
    *(f"timm.models.{name}" for name in ("swin_transformer", "swin_transformer_v2", "hiera", "mvitv2")),
    *(f"timm.models.{name}" for name in ("pvt_v2", "twins", "maxxvit", "davit", "nest", "focalnet")),
    *(f"{_MODELS}.{name}.modeling_{name}" for name in ("swin", "swinv2", "hiera", "pvt", "pvt_v2")),
    "torchvision.models.swin_transformer",
}
