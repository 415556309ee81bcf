"""Models for inference: BatchNorm, layer scale and residual depth-wise convolutions folded into weights."""

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
from visualtokens.layers import ConvFFN, PixelConv, ResidualConv
from visualtokens.layers.paca import Clustering
from visualtokens.models.stvit import Block
from visualtokens.models.vt_resnet import VTResNet
from visualtokens.ops import kmedoids


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


# Layers with what stands around them folded into their weights, for inference.
#
# A folded layer takes the place of another and keeps that one's parameters and buffers under their names, so
# that the model's ``state_dict()`` stays what it was. What it computes with is made once, from those values:
# so it neither trains nor loads weights.

MANY = 3000  # rows from which on a 1×1 convolution is faster than a matrix product


class Affine(NamedTuple):
    """x · scale + shift, per channel, in float64."""

    scale: Tensor  # (C,)
    shift: Tensor  # (C,)


def of_norm(norm: nn.BatchNorm2d) -> Affine:
    """What BatchNorm does in evaluation."""
    if norm.running_mean is None or norm.running_var is None:
        raise UserError("a BatchNorm without running statistics normalises by its batch and cannot be folded")
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -norm.running_mean.double() * scale
    return Affine(scale, shift if norm.bias is None else shift + norm.bias.detach().double())


def of_scale(gamma: Tensor) -> Affine:
    """What a layer scale does."""
    scale = gamma.detach().double()
    return Affine(scale, torch.zeros_like(scale))


class Folded(nn.Module):
    """In the place of a layer that another one does the work of: hands its input on."""

    folded_weight: Tensor
    folded_bias: Tensor

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, parameter in original.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in original.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self._original = (original,)  # in a tuple, so that it is not a child
        self.training = False
        self.register_load_state_dict_pre_hook(_refuse_to_load)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def train(self, mode: bool = True) -> Folded:
        if mode:
            raise UserError("a fused model cannot train; call visualtokens.unfuse(model) first")
        return self

    def restore(self) -> nn.Module:
        """The layer that was here, with its values where they are now."""
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


class FoldedLinear(Folded):
    """after(linear(before(x)))."""

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
        _keep(self, linear.weight, weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cpu:
            return F.linear(x, self.folded_weight, self.folded_bias)
        # On a CPU, F.linear writes the bias first and then adds the product to it. These write only once.
        if x.numel() < MANY * x.shape[-1] or torch.compiler.is_compiling():
            return (x @ self.folded_weight.mT).add_(self.folded_bias)
        pixels = x.reshape(1, 1, -1, x.shape[-1]).permute(0, 3, 1, 2)  # (1, C, 1, N), channels-last
        y = F.conv2d(pixels, self.folded_weight[:, :, None, None], self.folded_bias)
        return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], -1)


class FoldedConv(Folded):
    """after(conv(x)); with ``residual``, after(x + conv(x)) of a depth-wise convolution."""

    def __init__(self, conv: nn.Conv2d, *, after: Affine | None = None, residual: bool = False) -> None:
        super().__init__(conv)
        self.residual = residual
        self.stride, self.padding, self.dilation, self.groups = (
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.groups,
        )
        weight, bias = conv.weight.detach().double(), _bias(conv)
        if residual:
            weight = weight.clone()
            weight[:, :, conv.kernel_size[0] // 2, conv.kernel_size[1] // 2] += 1
        if after is not None:
            weight, bias = weight * after.scale.view(-1, 1, 1, 1), bias * after.scale + after.shift
        _keep(self, conv.weight, weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(
            x,
            self.folded_weight,
            self.folded_bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )


def _bias(layer: nn.Linear | nn.Conv2d) -> Tensor:
    if layer.bias is None:
        return layer.weight.new_zeros(layer.weight.shape[0], dtype=torch.float64)
    return layer.bias.detach().double()


def _keep(folded: Folded, like: Tensor, weight: Tensor, bias: Tensor) -> None:
    folded.register_buffer("folded_weight", weight.to(like.dtype), persistent=False)
    folded.register_buffer("folded_bias", bias.to(like.dtype), persistent=False)


def _refuse_to_load(*_: Any) -> None:
    raise UserError("a fused model cannot load weights; call visualtokens.unfuse(model) first")


# Another number of clusters for a trained PaCa-ViT, for instance for larger images.


@torch.no_grad()
def set_clusters(model: nn.Module, clusters: int, *, split: float = 0.1, seed: int = 0) -> str:
    """Give every clustering in ``model`` (a model, a stage, a block) this many clusters; says what it did.

    What a cluster looks for is one row of a linear layer; nothing else in the model depends on how many
    there are. **More** clusters: the rows are repeated in turn, and the copies moved away from their
    originals by ``split`` times the scale of the weights, so that training can tell them apart. With
    ``split=0`` and a multiple of the old number the model computes what it did. **Fewer**: the k-medoids
    of the rows stay, those that stand best for the rest. The same number changes nothing.

    The parameters are new, so make the optimizer afterwards. To load such weights into a new model, create
    it with that number: ``create_model("paca_vit_b0", clusters=(98, 98, 98, 0))``.
    """
    if clusters < 1:
        raise UserError(f"clusters={clusters}; give at least 1")
    if split < 0:
        raise UserError(f"split={split}; give 0 for equal copies, or a small positive number")
    layers = [module for module in model.modules() if isinstance(module, Clustering)]
    if not layers:
        raise UserError(f"{type(model).__name__} learns no clusters; give a PaCa-ViT or one of its parts")
    generator = torch.Generator().manual_seed(seed)
    before = sorted({layer.clusters for layer in layers})
    for layer in layers:
        if layer.clusters != clusters:
            _resize(layer, clusters, split, generator)
    return "; ".join(_sentence(old, clusters, split) for old in before)


def _resize(layer: Clustering, clusters: int, split: float, generator: torch.Generator) -> None:
    old = layer.assign
    rows = _rows(old.weight, clusters)  # (clusters,): which old row each new one comes from
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


def _rows(weight: Tensor, clusters: int) -> Tensor:
    count = weight.shape[0]
    if clusters < count:
        return kmedoids(weight.unsqueeze(0), clusters).indices[0].sort().values
    return torch.arange(clusters, device=weight.device) % count


def _sentence(old: int, new: int, split: float) -> str:
    if new == old:
        return f"{old} clusters stay: nothing changed"
    if new < old:
        return f"{old} clusters become {new}, those that stand best for the rest; train before use"
    if split:
        return f"{old} clusters become {new}: repeated, and the copies moved apart; train before use"
    if new % old == 0:
        return f"{old} clusters become {new}: each {new // old} times; the outputs stay the same"
    return f"{old} clusters become {new}: {new % old} count once more than the others; train before use"
