"""The feed-forward network in strips computes what it computes at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.layers import ConvFFN, convolutions
from visualtokens.layers.convolutions import make_strips


def plain(ffn: ConvFFN, x: Tensor, grid: tuple[int, int]) -> Tensor:
    """The definition, with the map as ``(B, C, H, W)``."""
    hidden = ffn.fc1(x).mT.reshape(x.shape[0], -1, *grid).contiguous()
    if ffn.gelu_first:
        hidden = F.gelu(hidden)
    mixed = F.conv2d(hidden, ffn.dwconv.weight, ffn.dwconv.bias, padding=1, groups=hidden.shape[1])
    if ffn.residual:
        mixed = mixed + hidden
    mixed = mixed.flatten(2).mT
    return ffn.fc2(mixed if ffn.gelu_first else F.gelu(mixed))


def gradients(ffn: ConvFFN, out: Tensor, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out.square().sum(), [x, *ffn.parameters()]))


@pytest.fixture
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of two rows of 5 patches with 16 hidden channels."""
    monkeypatch.setattr(convolutions, "STRIP_BYTES", 2 * 5 * 16 * 4)


def make(
    *, residual: bool = False, gelu_first: bool = False, batch: int = 2, grid: tuple[int, int] = (9, 5)
) -> tuple[ConvFFN, Tensor]:
    torch.manual_seed(0)
    ffn = ConvFFN(4, expansion=4, residual=residual, gelu_first=gelu_first)
    return ffn, torch.randn(batch, grid[0] * grid[1], 4, requires_grad=True)


@pytest.mark.parametrize("residual", [False, True])
def test_equals_the_definition(residual: bool) -> None:
    ffn, x = make(residual=residual)
    assert torch.allclose(ffn(x, (9, 5)), plain(ffn, x, (9, 5)), atol=1e-6)


@pytest.mark.usefixtures("small_strips")
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("batch", "grid"), [(2, (9, 5)), (1, (3, 5)), (7, (1, 5)), (9, (2, 5)), (1, (4, 40))]
)
def test_strips_equal_the_definition(residual: bool, batch: int, grid: tuple[int, int]) -> None:
    ffn, x = make(residual=residual, batch=batch, grid=grid)
    expected = plain(ffn, x, grid)
    out = ffn(x, grid)
    assert torch.allclose(out, expected, atol=1e-6)
    for got, wanted in zip(gradients(ffn, out, x), gradients(ffn, expected, x), strict=True):
        assert torch.allclose(got, wanted, atol=1e-4, rtol=1e-4)
    with torch.inference_mode():
        assert torch.allclose(ffn(x, grid), expected, atol=1e-6)


@pytest.mark.usefixtures("small_strips")
@pytest.mark.parametrize("residual", [False, True])
def test_gelu_first_in_strips_equals_the_definition(residual: bool) -> None:
    ffn, x = make(residual=residual, gelu_first=True)
    expected = plain(ffn, x, (9, 5))
    out = ffn(x, (9, 5))
    assert torch.allclose(out, expected, atol=1e-6)
    for got, wanted in zip(gradients(ffn, out, x), gradients(ffn, expected, x), strict=True):
        assert torch.allclose(got, wanted, atol=1e-4, rtol=1e-4)
    before = x.detach().clone()
    with torch.inference_mode():  # where GELU works in place, on nothing that was given
        assert torch.allclose(ffn(x, (9, 5)), expected, atol=1e-6)
    assert torch.equal(x, before)


@pytest.mark.usefixtures("small_strips")
def test_derivatives_of_strips_are_right() -> None:
    ffn, x = make(batch=1, grid=(7, 5))
    ffn = ffn.double()
    x = x.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ffn(x, (7, 5)), x)
    assert torch.autograd.gradgradcheck(lambda x: ffn(x, (7, 5)), x)


@pytest.mark.usefixtures("small_strips")
def test_training_keeps_only_the_input() -> None:
    ffn, x = make()
    kept: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ffn(x, (9, 5))
    assert all(shape[-1] != 16 for shape in kept)


@pytest.mark.usefixtures("small_strips")
def test_strips_inside_a_checkpoint() -> None:
    ffn, x = make()
    outer = torch.utils.checkpoint.checkpoint(ffn, x, (9, 5), use_reentrant=False)
    expected = plain(ffn, x, (9, 5))
    for got, wanted in zip(gradients(ffn, outer, x), gradients(ffn, expected, x), strict=True):
        assert torch.allclose(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("small_strips")
@pytest.mark.parametrize("train", [False, True])
def test_strips_under_autocast(train: bool) -> None:
    ffn, x = make()
    expected = plain(ffn, x, (9, 5))
    with torch.set_grad_enabled(train), torch.autocast("cpu", torch.bfloat16):
        out = ffn(x, (9, 5))
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), expected, atol=0.03)
    if train:
        wanted = gradients(ffn, expected, x)
        for got, exact in zip(gradients(ffn, out.float(), x), wanted, strict=True):
            assert (got - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.usefixtures("small_strips")
def test_compiles_as_one_graph_with_its_gradients() -> None:
    ffn, x = make()
    torch._dynamo.reset()
    out = torch.compile(ffn, fullgraph=True, backend="aot_eager")(x, (9, 5))
    expected = plain(ffn, x, (9, 5))
    for got, wanted in zip(gradients(ffn, out, x), gradients(ffn, expected, x), strict=True):
        assert torch.allclose(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("small_strips")
def test_transforms_of_torch_func() -> None:
    ffn, x = make()
    got = torch.func.grad(lambda x: ffn(x, (9, 5)).square().sum())(x.detach())
    (wanted,) = torch.autograd.grad(plain(ffn, x, (9, 5)).square().sum(), x)
    assert torch.allclose(got, wanted, atol=1e-5)


@pytest.mark.usefixtures("small_strips")
def test_modules_inside_can_be_replaced() -> None:
    """Adapters and quantisation put their own modules in the place of a Linear."""
    ffn, x = make()
    expected = plain(ffn, x, (9, 5))

    class Doubled(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.inside(x)

    ffn.fc2 = Doubled(ffn.fc2)
    assert torch.allclose(ffn(x, (9, 5)), 2 * expected, atol=1e-6)


@given(st.integers(1, 9), st.integers(1, 300), st.integers(1, 300), st.sampled_from([256, 2048, 8192, 2**20]))
def test_strips_cover_every_row_once(batch: int, height: int, width: int, size: int) -> None:
    covered = torch.zeros(batch, height, dtype=torch.int)
    for strip in make_strips(batch, (height, width), size):
        covered[strip.images, strip.first : strip.last] += 1
        rows = range(height)[strip.rows]
        assert [*rows][strip.inner] == list(range(strip.first, strip.last))
        assert rows.start == max(strip.first - 1, 0)
        assert rows.stop == min(strip.last + 1, height)
        patches = len(range(batch)[strip.images]) * (strip.last - strip.first) * width
        assert patches * size <= convolutions.STRIP_BYTES or strip.last - strip.first == 1
    assert (covered == 1).all()
