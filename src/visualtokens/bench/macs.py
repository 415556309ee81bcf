"""Multiply-adds of convolutions and matrix products, and numbers of parameters.

One multiply-add (MAC) is one FLOP in the papers. Biases, norms, activations, softmax and interpolation are
not counted. Both products of attention count in full, masked or not. Distances (``torch.cdist``) count as the
matrix product that computes them, N·M·C.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from visualtokens.errors import UserError
from visualtokens.modes import eval_mode

Shape = torch.Size
aten = torch.ops.aten


def count_parameters(model: nn.Module) -> int:
    """Number of learnable values. Shared parameters count once, buffers do not count."""
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, size: tuple[int, int], *, batch: int = 1, channels: int = 3) -> int:
    """Multiply-adds of one forward pass in evaluation mode on images of ``size`` (H, W).

    The count depends on shapes only, so the pass runs on fake tensors without arithmetic. A model with
    data-dependent control flow runs on random images instead. The model may be on the meta device and is
    not changed. A matrix product without a known formula is an error, not a zero.
    """
    return macs_by_module(model, size, depth=0, batch=batch, channels=channels)[""]


def macs_by_module(
    model: nn.Module, size: tuple[int, int], *, depth: int | None = 1, batch: int = 1, channels: int = 3
) -> dict[str, int]:
    """:func:`count_macs` of each submodule with a count above zero, by its name; ``""`` is the whole model.

    ``depth`` is the number of name levels, None for all. A product that a module computes itself, outside
    its children, counts for the module.
    """
    if min(*size, batch, channels) < 1:
        raise UserError(
            f"cannot count on a {batch}×{channels}×{size[0]}×{size[1]} input; give sizes of 1 or more"
        )
    shape = (batch, channels, *size)
    model = getattr(model, "_orig_mod", model)  # the model inside torch.compile's wrapper
    try:
        counts = _count_without_values(model, shape)
    except (RuntimeError, TypeError):
        # The model has a data-dependent branch or shape, or cannot be copied, so it must run on real tensors.
        # If the model itself is faulty, the second run raises its error.
        if any(p.is_meta for p in model.parameters()):
            raise
        counts = _count_with_values(model, shape)
    root = type(model).__name__
    called = {_below(key, root): sum(ops.values()) // 2 for key, ops in counts.items() if key != "Global"}
    called[""] = sum(counts.get("Global", {}).values()) // 2
    wanted = {n: m for n, m in model.named_modules() if depth is None or _level(n) <= depth}
    totals = {name: _total(name, module, called) for name, module in wanted.items()}
    return {name: total for name, total in totals.items() if total or name == ""}


def _total(name: str, module: nn.Module, called: dict[str, int]) -> int:
    """Count of a module; a container that is never called counts the sum of its children."""
    if name in called:
        return called[name]
    prefix = f"{name}." if name else ""
    return sum(_total(prefix + child, part, called) for child, part in module.named_children())


def _level(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _below(key: str, root: str) -> str:
    """``name`` in the model, from ``Class.name`` in the counter."""
    return key.removeprefix(root).removeprefix(".")


Counts = dict[str, dict[Any, int]]


def _count_without_values(model: nn.Module, shape: tuple[int, ...]) -> Counts:
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def empty_like(x: Tensor) -> Tensor:
        with fake:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")

    # A copy that shares no tensor with the model, so that the pass cannot change the model.
    fakes: dict[int, Tensor] = {id(b): empty_like(b) for b in model.buffers()}
    # Without gradients: the counter would register hooks on them.
    fakes |= {id(p): nn.Parameter(empty_like(p), requires_grad=False) for p in model.parameters()}
    fake_model = copy.deepcopy(model, fakes)
    with fake:
        images = torch.empty(shape, dtype=_dtype(model))
        return _count(fake_model, images)


def _count_with_values(model: nn.Module, shape: tuple[int, ...]) -> Counts:
    like = next(model.parameters(), torch.empty(0))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return _count(model, noise.to(like.device, _dtype(model)))


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def _count(model: nn.Module, images: Tensor) -> Counts:
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    # The counter passes on operations that it cannot decompose, so the guard around it sees what runs.
    with eval_mode(model), _plain_operations(), torch.no_grad(), _Guard(counter), counter:
        model(images)
    return counter.get_flop_counts()


@contextlib.contextmanager
def _plain_operations() -> Iterator[None]:
    """Attention as two matrix products, and modules uncompiled, instead of fused kernels."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


# FLOPs (twice the multiply-adds) of matrix products that torch's counter does not know.


def _mv(matrix: Shape, vector: Shape, **_: Any) -> int:
    return 2 * math.prod(matrix)


def _addmv(bias: Shape, matrix: Shape, vector: Shape, **_: Any) -> int:
    return 2 * math.prod(matrix)


def _dot(x: Shape, y: Shape, **_: Any) -> int:
    return 2 * math.prod(x)


def _addbmm(bias: Shape, x: Shape, y: Shape, **_: Any) -> int:
    return 2 * math.prod(x) * y[-1]


def _int_mm(x: Shape, y: Shape, **_: Any) -> int:
    return 2 * math.prod(x) * y[-1]


def _distance(x: Shape, y: Shape, *_options: Any, out_shape: Shape, **_: Any) -> int:
    return 2 * math.prod(out_shape) * x[-1]


def _trilinear(x: Shape, weight: Shape, y: Shape, *_options: Any, **_: Any) -> int:
    """nn.Bilinear: each of the out·in1·in2 weights is used once per pair of inputs."""
    return 2 * (math.prod(x) // x[-1]) * math.prod(weight)


def _rnn_layer(x: Shape, weight_input: Shape, weight_state: Shape, *_options: Any, **_: Any) -> int:
    """One layer of a recurrent network, one direction, on ``x (steps, batch, features)``."""
    return 2 * x[0] * x[1] * (math.prod(weight_input) + math.prod(weight_state))


FORMULAS: dict[Any, Any] = {
    aten.mv: _mv,
    aten.addmv: _addmv,
    aten.dot: _dot,
    aten.vdot: _dot,
    aten.addbmm: _addbmm,
    aten._int_mm: _int_mm,
    aten._cdist_forward: _distance,
    aten._euclidean_dist: _distance,
    aten._trilinear: _trilinear,
    aten.mkldnn_rnn_layer: _rnn_layer,
}

# Names of operations that multiply matrices; without a formula they are refused.
PRODUCT = re.compile(
    r"(^|_)(mm|addmm|bmm|baddbmm|matmul|gemm|linear|(de)?conv(olution)?(\dd)?|rnn|attention|encoder_layer)(_|$)"
)
KNOWN = ("aten", "prim", "prims", "torchvision")


class _Guard(TorchDispatchMode):
    """Raises an error for operations whose products the counter cannot see."""

    supports_higher_order_operators = True

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()
        self.counted = counter.flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = getattr(func, "_overloadpacket", func)
        if operation not in self.counted:
            namespace, name = getattr(func, "namespace", "aten"), operation.__name__
            if PRODUCT.search(name) or namespace not in KNOWN:
                raise UserError(
                    f"cannot count the multiply-adds inside {namespace}::{name}; "
                    f"count the model without it, or give it a formula in visualtokens.bench.macs.FORMULAS"
                )
        return func(*args, **(kwargs or {}))
