"""Changes to a trained model: folding layers for inference, and another number of clusters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from timm.layers import LayerScale2d
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.errors import UserError
from visualtokens.layers import Clustering, ConvFFN, PixelConv, ResidualConv
from visualtokens.models.stvit import Block
from visualtokens.models.vt_resnet import VTResNet
from visualtokens.ops import kmedoids


def fuse(model: nn.Module) -> nn.Module:
    """Folds layers of a model in place for faster inference, and returns it; outputs differ only by rounding.

    >>> model = visualtokens.fuse(visualtokens.create_model("stvit_small").eval())

    In STViT and VT-ResNet, BatchNorm is folded into the convolution before it or the Linear after it, a layer
    scale into the Linear before it, and x + dwconv(x) becomes one depth-wise convolution. Other layers are
    not changed. PaCa-ViT is refused: folding does not make it faster.

    A fused model is for inference only: training it and loading weights raise an error, and folded weights
    get no gradient. Its ``state_dict()`` is that of the original model. Call ``fuse`` before
    ``torch.compile``; :func:`unfuse` reverses it.
    """
    if model.training:
        raise UserError("only a model in evaluation mode can be fused; call model.eval() first")
    if _is_fused(model):
        raise UserError("the model is already fused; call visualtokens.unfuse(model) first to fuse it again")
    for module in list(model.modules()):
        for kind, fold in RULES:
            if isinstance(module, kind):
                fold(module)
    if not _is_fused(model):
        raise UserError(f"{type(model).__name__} has no layers that can be fused; use it as it is")
    return model


def unfuse(model: nn.Module) -> nn.Module:
    """Reverses :func:`fuse` in place, exactly, and returns the model, still in evaluation mode."""
    if not _is_fused(model):
        raise UserError("the model is not fused, so there is nothing to reverse")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Folded):
                setattr(module, name, child.restore())
                if isinstance(module, ConvFFN) and isinstance(child, FoldedConv):
                    module.residual = child.residual
    return model


@torch.no_grad()
def set_clusters(model: nn.Module, clusters: int, *, split: float = 0.1, seed: int = 0) -> str:
    """Changes the number of clusters of a trained PaCa-ViT in place, and returns a summary of the change.

    >>> model = visualtokens.create_model("paca_vit_b0")
    >>> visualtokens.set_clusters(model, 98)
    '49 clusters become 98: repeated, with noise on the copies; train before use'

    ``model`` may also be a stage or block; every clustering in it gets ``clusters`` clusters. A cluster is
    one row of a linear layer, and no other weight depends on their number.

    - **More clusters**: the rows are repeated in turn. Gaussian noise of ``split`` times the scale of the
      weights, drawn from ``seed``, is added to the copies, so that training can separate them. With
      ``split=0`` and a multiple of the old number, the outputs do not change.
    - **Fewer clusters**: the k-medoids of the rows are kept.

    The parameters are new, so create the optimizer afterwards. To load the resulting weights, create the
    model with the same number: ``create_model("paca_vit_b0", clusters=(98, 98, 98, 0))``.
    """
    if clusters < 1:
        raise UserError(f"clusters={clusters}; give at least 1")
    if split < 0:
        raise UserError(f"split={split}; give 0 for equal copies, or a small positive number")
    layers = [module for module in model.modules() if isinstance(module, Clustering)]
    if not layers:
        raise UserError(f"{type(model).__name__} has no learned clusters; give a PaCa-ViT or a part of one")
    generator = torch.Generator().manual_seed(seed)
    old_counts = sorted({layer.clusters for layer in layers})
    for layer in layers:
        if layer.clusters != clusters:
            _resize(layer, clusters, split, generator)
    return "; ".join(_summary(old, clusters, split) for old in old_counts)


# What fuse folds in each kind of module.


def _is_fused(model: nn.Module) -> bool:
    return any(isinstance(module, Folded) for module in model.modules())


def _fold_norms(module: nn.Module, *pairs: tuple[str, str]) -> None:
    """Folds each BatchNorm into the convolution before it; pairs of other layers are not changed."""
    for conv_name, norm_name in pairs:
        conv, norm = module.get_submodule(conv_name), module.get_submodule(norm_name)
        if type(conv) is nn.Conv2d and type(norm) is nn.BatchNorm2d:
            setattr(module, conv_name, FoldedConv(conv, after=_norm_affine(norm)))
            setattr(module, norm_name, Folded(norm))


def _fold_sequence(module: nn.Module) -> None:
    names = [name for name, _ in module.named_children()]
    _fold_norms(module, *itertools.pairwise(names))


def _fold_stvit_block(block: Any) -> None:
    """Folds BatchNorm, layer scales and the residual convolution of a block.

    All Linear layers are replaced, even those without a neighbour to fold: FoldedLinear is faster.
    """
    attn, ffn = block.attn.mix, block.ffn
    if isinstance(block.cpe, ResidualConv):
        block.cpe = FoldedConv(block.cpe, residual=True)
    before = after1 = after2 = None
    if isinstance(block.norm2, nn.BatchNorm2d):
        before, block.norm2 = _norm_affine(block.norm2), Folded(block.norm2)
    if isinstance(block.scale1, LayerScale2d):
        after1, block.scale1 = _scale_affine(block.scale1.gamma), Folded(block.scale1)
    if isinstance(block.scale2, LayerScale2d):
        after2, block.scale2 = _scale_affine(block.scale2.gamma), Folded(block.scale2)
    attn.qkv, attn.proj = FoldedLinear(attn.qkv), FoldedLinear(attn.proj, after=after1)
    ffn.fc1, ffn.fc2 = FoldedLinear(ffn.fc1, before=before), FoldedLinear(ffn.fc2, after=after2)
    if getattr(ffn, "residual", False):  # a ConvFFN
        ffn.dwconv, ffn.residual = FoldedConv(ffn.dwconv, residual=True), False


BASIC = [("conv1", "bn1"), ("conv2", "bn2")]

RULES: list[tuple[type[nn.Module], Callable[[nn.Module], None]]] = [
    (nn.Sequential, _fold_sequence),
    (PixelConv, lambda module: _fold_norms(module, ("conv", "norm"))),
    (VTResNet, lambda module: _fold_norms(module, ("conv1", "bn1"))),
    (BasicBlock, lambda module: _fold_norms(module, *BASIC)),
    (Bottleneck, lambda module: _fold_norms(module, *BASIC, ("conv3", "bn3"))),
    (Block, _fold_stvit_block),
]


class Affine(NamedTuple):
    """x · scale + shift per channel, in float64."""

    scale: Tensor  # (C,)
    shift: Tensor  # (C,)


def _norm_affine(norm: nn.BatchNorm2d) -> Affine:
    """Returns what BatchNorm computes in evaluation mode."""
    if norm.running_mean is None or norm.running_var is None:
        raise UserError("a BatchNorm without running statistics normalises by its batch and cannot be folded")
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -norm.running_mean.double() * scale
    return Affine(scale, shift if norm.bias is None else shift + norm.bias.detach().double())


def _scale_affine(gamma: Tensor) -> Affine:
    """Returns what a layer scale ``gamma (C,)`` computes."""
    scale = gamma.detach().double()
    return Affine(scale, torch.zeros_like(scale))


# The folded layers.


class Folded(nn.Module):
    """Identity placeholder for a folded layer; base of the layers that others are folded into.

    Keeps the parameters and buffers of the original under their names, so that ``state_dict()`` does not
    change. The folded weights are computed once from these values, so the layer cannot train or load weights.
    """

    folded_weight: Tensor
    folded_bias: Tensor

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, parameter in original.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in original.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self._original = (original,)  # the tuple keeps it from being registered as a child
        self.training = False
        self.register_load_state_dict_pre_hook(_refuse_to_load)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def train(self, mode: bool = True) -> Folded:
        if mode:
            raise UserError("a fused model cannot train; call visualtokens.unfuse(model) first")
        return self

    def restore(self) -> nn.Module:
        """Returns the original layer with the current parameters and buffers, which may have moved device."""
        (original,) = self._original
        for name in original._parameters:
            if original._parameters[name] is not None:
                original._parameters[name] = self._parameters[name]
        for name in original._buffers:
            if original._buffers[name] is not None:
                original._buffers[name] = self._buffers[name]
        return original.train(False)

    def extra_repr(self) -> str:
        return type(self._original[0]).__name__

    def _set_folded(self, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> None:
        self.register_buffer("folded_weight", weight.to(dtype), persistent=False)
        self.register_buffer("folded_bias", bias.to(dtype), persistent=False)


def _refuse_to_load(*_: Any) -> None:
    raise UserError("a fused model cannot load weights; call visualtokens.unfuse(model) first")


class FoldedLinear(Folded):
    """after(linear(before(x))) on ``(..., C_in)``."""

    def __init__(
        self, linear: nn.Linear, *, before: Affine | None = None, after: Affine | None = None
    ) -> None:
        super().__init__(linear)
        weight, bias = linear.weight.detach().double(), _bias(linear)
        if before is not None:
            bias = bias + weight @ before.shift
            weight = weight * before.scale
        if after is not None:
            weight, bias = weight * after.scale.unsqueeze(1), bias * after.scale + after.shift
        self._set_folded(weight, bias, linear.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cpu:
            return F.linear(x, self.folded_weight, self.folded_bias)
        # On a CPU, F.linear writes the output twice: the bias, then the product added to it.
        return (x @ self.folded_weight.mT).add_(self.folded_bias)


class FoldedConv(Folded):
    """after(conv(x)) on ``(B, C_in, H, W)``; with ``residual``, after(x + conv(x)) for a depth-wise conv."""

    def __init__(self, conv: nn.Conv2d, *, after: Affine | None = None, residual: bool = False) -> None:
        super().__init__(conv)
        self.residual = residual
        self.stride, self.padding, self.dilation = conv.stride, conv.padding, conv.dilation
        self.groups = conv.groups
        weight, bias = conv.weight.detach().double(), _bias(conv)
        if residual:
            weight = weight.clone()
            weight[:, :, conv.kernel_size[0] // 2, conv.kernel_size[1] // 2] += 1
        if after is not None:
            weight, bias = weight * after.scale.view(-1, 1, 1, 1), bias * after.scale + after.shift
        self._set_folded(weight, bias, conv.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.folded_weight, self.folded_bias
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


def _bias(layer: nn.Linear | nn.Conv2d) -> Tensor:
    if layer.bias is None:
        return layer.weight.new_zeros(layer.weight.shape[0], dtype=torch.float64)
    return layer.bias.detach().double()


# What set_clusters does to one clustering.


def _resize(layer: Clustering, clusters: int, split: float, generator: torch.Generator) -> None:
    old = layer.assign
    rows = _source_rows(old.weight, clusters)  # (clusters,)
    weight = old.weight[rows]  # (clusters, width)
    copies = weight[layer.clusters :]
    noise = torch.randn(copies.shape, generator=generator).to(copies)
    copies += split * old.weight.square().mean().sqrt() * noise
    layer.assign = nn.Linear(
        old.in_features, clusters, bias=old.bias is not None, device=weight.device, dtype=weight.dtype
    )
    layer.assign.weight.copy_(weight)
    if old.bias is not None:
        layer.assign.bias.copy_(old.bias[rows])
    layer.assign.requires_grad_(old.weight.requires_grad)


def _source_rows(weight: Tensor, clusters: int) -> Tensor:
    """Returns the old row that each of the new clusters starts from."""
    count = weight.shape[0]
    if clusters < count:
        return kmedoids(weight.unsqueeze(0), clusters).indices[0].sort().values
    return torch.arange(clusters, device=weight.device) % count


def _summary(old: int, new: int, split: float) -> str:
    if new == old:
        return f"{old} clusters: unchanged"
    if new < old:
        return f"{old} clusters become {new}, the most representative ones; train before use"
    if split:
        return f"{old} clusters become {new}: repeated, with noise on the copies; train before use"
    if new % old == 0:
        return f"{old} clusters become {new}: each {new // old} times; the outputs do not change"
    return f"{old} clusters become {new}: {new % old} are repeated once more than the rest; train before use"
