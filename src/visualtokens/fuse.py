"""Models for inference: BatchNorm, layer scale and residual depth-wise convolutions folded into weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from timm.layers import LayerScale2d
from timm.models.resnet import BasicBlock, Bottleneck
from torch import nn

from visualtokens.errors import UserError
from visualtokens.layers import ConvFFN, PixelConv, ResidualConv
from visualtokens.layers.folded import Folded, FoldedConv, FoldedLinear, of_norm, of_scale
from visualtokens.models.stvit import Block
from visualtokens.models.vt_resnet import VTResNet


def fuse(model: nn.Module) -> nn.Module:
    """Fold what can be folded, in place, and return the model. Outputs stay the same but for rounding.

    A BatchNorm goes into the convolution before it or the Linear behind it, a layer scale into the Linear
    before it, and x + dwconv(x) becomes one depth-wise kernel: in STViT, VT-ResNet and PaCa-ViT. What no
    rule knows stays as it is and computes what it did.

    For inference only: a fused model refuses to train and to load weights, and gives no gradients to the
    weights that were folded. Its ``state_dict()`` is that of the model before. Call it before
    ``torch.compile``; :func:`unfuse` takes it back.
    """
    if model.training:
        raise UserError("only a model in evaluation mode can be fused; call model.eval() first")
    if any(isinstance(module, Folded) for module in model.modules()):
        raise UserError("this model is fused already; call visualtokens.unfuse(model) first to do it again")
    for module in list(model.modules()):
        for kind, fold in RULES:
            if isinstance(module, kind):
                fold(module)
    if not any(isinstance(module, Folded) for module in model.modules()):
        raise UserError(f"{type(model).__name__} has nothing that can be fused; use it as it is")
    return model


def unfuse(model: nn.Module) -> nn.Module:
    """Undo :func:`fuse`, in place, exactly; return the model, still in evaluation mode."""
    found = False
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Folded):
                found = True
                setattr(module, name, child.restore())
                if isinstance(module, ConvFFN) and isinstance(child, FoldedConv):
                    module.residual = child.residual
    if not found:
        raise UserError("this model is not fused; there is nothing to undo")
    return model


def _fold_norms(module: nn.Module, *pairs: tuple[str, str]) -> None:
    """Fold each BatchNorm into the convolution that it follows."""
    for conv_name, norm_name in pairs:
        conv, norm = module.get_submodule(conv_name), module.get_submodule(norm_name)
        if type(conv) is nn.Conv2d and type(norm) is nn.BatchNorm2d:
            setattr(module, conv_name, FoldedConv(conv, after=of_norm(norm)))
            setattr(module, norm_name, Folded(norm))


def _fold_sequence(module: nn.Module) -> None:
    names = [name for name, _ in module.named_children()]
    _fold_norms(module, *itertools.pairwise(names))


def _fold_residual_ffn(ffn: Any) -> None:
    if ffn.residual:
        ffn.dwconv = FoldedConv(ffn.dwconv, residual=True)
        ffn.residual = False


def _fold_stvit_block(block: Any) -> None:
    """Everything between its LayerNorm, its attention and its GELU.

    Every Linear, also where nothing stands around it: folded ones are faster.
    """
    attn, ffn = block.attn.mix, block.ffn
    if isinstance(block.cpe, ResidualConv):
        block.cpe = FoldedConv(block.cpe, residual=True)
    before = after1 = after2 = None
    if isinstance(block.norm2, nn.BatchNorm2d):
        before, block.norm2 = of_norm(block.norm2), Folded(block.norm2)
    if isinstance(block.scale1, LayerScale2d):
        after1, block.scale1 = of_scale(block.scale1.gamma), Folded(block.scale1)
    if isinstance(block.scale2, LayerScale2d):
        after2, block.scale2 = of_scale(block.scale2.gamma), Folded(block.scale2)
    attn.qkv, attn.proj = FoldedLinear(attn.qkv), FoldedLinear(attn.proj, after=after1)
    ffn.fc1, ffn.fc2 = FoldedLinear(ffn.fc1, before=before), FoldedLinear(ffn.fc2, after=after2)


BASIC = [("conv1", "bn1"), ("conv2", "bn2")]

RULES: list[tuple[type[nn.Module], Callable[[nn.Module], None]]] = [
    (nn.Sequential, _fold_sequence),
    (PixelConv, lambda module: _fold_norms(module, ("conv", "norm"))),
    (VTResNet, lambda module: _fold_norms(module, ("conv1", "bn1"))),
    (BasicBlock, lambda module: _fold_norms(module, *BASIC)),
    (Bottleneck, lambda module: _fold_norms(module, *BASIC, ("conv3", "bn3"))),
    (ConvFFN, _fold_residual_ffn),
    (Block, _fold_stvit_block),
]
