"""The convolutions against torch's own, and the ConvFFN in strips against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.errors import UserError
from visualtokens.layers import ConvFFN, PixelConv, TokenConv, convolutions
from visualtokens.layers.convolutions import make_strips, pixel_groups

GRID = (9, 5)


@pytest.mark.parametrize(
    ("channels", "groups"), [(1024, 16), (128, 2), (127, 1), (64, 1), (1, 1), (152, 2), (320, 5)]
)
def test_pixel_groups(channels: int, groups: int) -> None:
    assert pixel_groups(channels) == groups


@pytest.mark.parametrize(("groups", "train"), [(1, True), (4, True), (4, False)])
def test_token_conv_equals_conv1d_and_batch_norm(groups: int, train: bool) -> None:
    torch.manual_seed(0)
    layer = TokenConv(8, 12, groups=groups).train(train)
    conv = nn.Conv1d(8, 12, 1, groups=groups, bias=False)
    norm = nn.BatchNorm1d(12).train(train)
    conv.weight.data.copy_(layer.weight.unsqueeze(2))
    tokens = torch.randn(3, 5, 8)
    ours, theirs = tokens.clone().requires_grad_(), tokens.clone().requires_grad_()
    out, expected = layer(ours), norm(conv(theirs.mT)).mT
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.weight.grad, conv.weight.grad.squeeze(2), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.norm.running_var, norm.running_var)


def test_convolutions_have_no_bias_and_one_batch_norm() -> None:
    assert {n for n, _ in PixelConv(4, 6).named_parameters()} == {"conv.weight", "norm.weight", "norm.bias"}
    assert {n for n, _ in TokenConv(4, 6).named_parameters()} == {"weight", "norm.weight", "norm.bias"}


def test_token_conv_trains_on_one_image() -> None:
    out = TokenConv(4, 6).train()(torch.randn(1, 16, 4))
    assert torch.allclose(out.mean(1), torch.zeros(1, 6), atol=1e-5)


def test_token_conv_with_synchronised_batch_norm() -> None:
    torch.manual_seed(0)
    layer = TokenConv(8, 12).eval()
    layer.norm.running_mean.normal_()
    tokens = torch.randn(2, 5, 8)
    expected = layer(tokens)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(layer)
    assert isinstance(converted.norm, nn.SyncBatchNorm)
    assert torch.allclose(converted(tokens), expected, atol=1e-6)


def test_groups_must_divide_the_channels() -> None:
    with pytest.raises(UserError, match="groups=3 does not divide 8 and 12 channels"):
        TokenConv(8, 12, groups=3)


def definition(ffn: ConvFFN, x: Tensor, grid: tuple[int, int]) -> Tensor:
    """The ConvFFN on contiguous maps ``(B, C, H, W)``."""
    hidden = ffn.fc1(x).mT.reshape(x.shape[0], -1, *grid).contiguous()
    if ffn.gelu_first:
        hidden = F.gelu(hidden)
    mixed = F.conv2d(hidden, ffn.dwconv.weight, ffn.dwconv.bias, padding=1, groups=hidden.shape[1])
    if ffn.residual:
        mixed = mixed + hidden
    mixed = mixed.flatten(2).mT
    return ffn.fc2(mixed if ffn.gelu_first else F.gelu(mixed))


def assert_same_gradients(ffn: ConvFFN, out: Tensor, expected: Tensor, x: Tensor) -> None:
    inputs = [x, *ffn.parameters()]
    ours, theirs = (torch.autograd.grad(y.square().sum(), inputs) for y in (out, expected))
    for got, wanted in zip(ours, theirs, strict=True):
        assert torch.allclose(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.fixture
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of two rows of 5 patches with 16 hidden channels."""
    monkeypatch.setattr(convolutions, "STRIP_BYTES", 2 * 5 * 16 * 4)


def build(batch: int = 2, grid: tuple[int, int] = GRID, **options: bool) -> tuple[ConvFFN, Tensor]:
    torch.manual_seed(0)
    ffn = ConvFFN(4, expansion=4, **options)
    return ffn, torch.randn(batch, grid[0] * grid[1], 4, requires_grad=True)


def check_against_definition(ffn: ConvFFN, x: Tensor, grid: tuple[int, int]) -> None:
    """Outputs and gradients in training, and outputs in inference, where operations run in place."""
    expected, out, before = definition(ffn, x, grid), ffn(x, grid), x.detach().clone()
    assert torch.allclose(out, expected, atol=1e-6)
    assert_same_gradients(ffn, out, expected, x)
    with torch.inference_mode():
        assert torch.allclose(ffn(x, grid), expected, atol=1e-6)
    assert torch.equal(x, before)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("gelu_first", [False, True])
def test_conv_ffn_equals_its_definition(residual: bool, gelu_first: bool) -> None:
    check_against_definition(*build(residual=residual, gelu_first=gelu_first), GRID)


@pytest.mark.usefixtures("small_strips")
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("gelu_first", [False, True])
def test_strips_equal_the_definition(residual: bool, gelu_first: bool) -> None:
    check_against_definition(*build(residual=residual, gelu_first=gelu_first), GRID)


@pytest.mark.usefixtures("small_strips")
@pytest.mark.parametrize(("batch", "grid"), [(1, (3, 5)), (7, (1, 5)), (9, (2, 5)), (1, (4, 40))])
def test_strips_of_any_shape(batch: int, grid: tuple[int, int]) -> None:
    check_against_definition(*build(batch, grid, residual=True), grid)


@pytest.mark.usefixtures("small_strips")
def test_strips_have_second_derivatives() -> None:
    ffn, x = build(batch=1, grid=(5, 5))
    ffn = ffn.double()
    x = x.detach().double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: ffn(x, (5, 5)), x, fast_mode=True)


@pytest.mark.usefixtures("small_strips")
def test_training_in_strips_saves_no_hidden_map() -> None:
    ffn, x = build()
    saved: list[int] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape[-1])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        ffn(x, GRID)
    assert saved
    assert 16 not in saved


@pytest.mark.usefixtures("small_strips")
def test_strips_inside_a_checkpoint() -> None:
    ffn, x = build()
    out = torch.utils.checkpoint.checkpoint(ffn, x, GRID, use_reentrant=False)
    assert_same_gradients(ffn, out, definition(ffn, x, GRID), x)


@pytest.mark.usefixtures("small_strips")
@pytest.mark.parametrize("train", [False, True])
def test_strips_under_autocast(train: bool) -> None:
    ffn, x = build()
    expected = definition(ffn, x, GRID)
    with torch.set_grad_enabled(train), torch.autocast("cpu", torch.bfloat16):
        out = ffn(x, GRID)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), expected, atol=0.03)
    if train:
        inputs = [x, *ffn.parameters()]
        ours, theirs = (torch.autograd.grad(y.square().sum(), inputs) for y in (out.float(), expected))
        for got, wanted in zip(ours, theirs, strict=True):
            assert (got - wanted).abs().max() < 0.05 * wanted.abs().max()


@pytest.mark.usefixtures("small_strips")
def test_conv_ffn_compiles_as_one_graph() -> None:
    ffn, x = build()
    torch._dynamo.reset()
    out = torch.compile(ffn, fullgraph=True, backend="aot_eager")(x, GRID)
    assert_same_gradients(ffn, out, definition(ffn, x, GRID), x)


@pytest.mark.usefixtures("small_strips")
def test_conv_ffn_exports_with_a_dynamic_batch() -> None:
    """Already one image exceeds a strip, but their number is unknown."""
    ffn, x = build()
    with torch.no_grad():
        program = torch.export.export(
            ffn, (x, GRID), dynamic_shapes=({0: torch.export.Dim.DYNAMIC}, (None, None))
        )
        images = torch.cat([x, x, x])
        assert torch.allclose(program.module()(images, GRID), definition(ffn, images, GRID), atol=1e-6)


@pytest.mark.usefixtures("small_strips")
def test_conv_ffn_under_torch_func() -> None:
    ffn, x = build()
    got = torch.func.grad(lambda x: ffn(x, GRID).square().sum())(x.detach())
    (wanted,) = torch.autograd.grad(definition(ffn, x, GRID).square().sum(), x)
    assert torch.allclose(got, wanted, atol=1e-5)


@pytest.mark.usefixtures("small_strips")
def test_layers_of_a_conv_ffn_can_be_replaced() -> None:
    """As adapters and quantisation do."""

    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.inner(x)

    ffn, x = build()
    expected = definition(ffn, x, GRID)
    ffn.fc2 = Doubled(ffn.fc2)
    assert torch.allclose(ffn(x, GRID), 2 * expected, atol=1e-6)


@settings(max_examples=40)
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
