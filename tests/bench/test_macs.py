"""Counted multiply-adds against explicit formulas."""

import copy
import math

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from visualtokens.bench.macs import count_macs, count_parameters, macs_by_module
from visualtokens.errors import UserError

B, C, H, W = 2, 8, 6, 5
N = H * W


class Apply(nn.Module):
    """A model that applies a function to the images."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(modules)

    def forward(self, x):
        return self.function(x, *self.parts)


def count(function, *modules):
    return count_macs(Apply(function, *modules), (H, W), batch=B, channels=C)


def tokens(x):
    return x.flatten(2).mT  # (B, N, C)


CONVOLUTIONS = {
    "plain": (nn.Conv2d(C, 12, 3, padding=1), B * 12 * C * 9 * N),
    "stride": (nn.Conv2d(C, 12, 3, stride=2, padding=1), B * 12 * C * 9 * 3 * 3),
    "no padding": (nn.Conv2d(C, 12, 3), B * 12 * C * 9 * 4 * 3),
    "dilated, same": (nn.Conv2d(C, 12, 3, dilation=2, padding="same"), B * 12 * C * 9 * N),
    "depth-wise": (nn.Conv2d(C, C, 3, padding=1, groups=C), B * C * 9 * N),
    "grouped": (nn.Conv2d(C, 12, 3, padding=1, groups=4), B * 12 * (C // 4) * 9 * N),
    "1x1": (nn.Conv2d(C, 3, 1, bias=False), B * 3 * C * N),
    "transposed": (nn.ConvTranspose2d(C, 6, 2, stride=2), B * C * 6 * 4 * N),
    "transposed, grouped": (nn.ConvTranspose2d(C, 6, 3, stride=2, groups=2), B * C * 3 * 9 * N),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    layer, expected = CONVOLUTIONS[name]
    assert count(lambda x, conv: conv(x), layer) == expected


def test_one_dimensional_convolutions():
    assert count(lambda x, conv: conv(x.flatten(2)), nn.Conv1d(C, 7, 1)) == B * 7 * C * N
    assert (
        count(lambda x, conv: conv(x.flatten(2)), nn.ConvTranspose1d(C, 6, 2, stride=2)) == B * C * 6 * 2 * N
    )


PRODUCTS = {
    "Linear on 4-D": (lambda x: F.linear(x.permute(0, 2, 3, 1), torch.ones(5, C)), B * N * C * 5),
    "Linear on 3-D": (lambda x: F.linear(tokens(x), torch.ones(5, C), torch.ones(5)), B * N * C * 5),
    "Linear on 1-D": (lambda x: F.linear(x[0, :, 0, 0], torch.ones(5, C), torch.ones(5)), C * 5),
    "matmul": (lambda x: tokens(x) @ tokens(x).mT, B * N * N * C),
    "matmul, broadcast": (lambda x: tokens(x) @ torch.ones(C, 5), B * N * C * 5),
    "matmul, vector": (lambda x: tokens(x) @ torch.ones(C), B * N * C),
    "matrix, vector": (lambda x: tokens(x)[0] @ torch.ones(C), N * C),
    "addmv": (lambda x: torch.addmv(torch.ones(N), tokens(x)[0], torch.ones(C)), N * C),
    "dot": (lambda x: x[0, :, 0, 0] @ torch.ones(C), C),
    "bmm": (lambda x: torch.bmm(tokens(x), tokens(x).mT), B * N * N * C),
    "baddbmm": (lambda x: torch.baddbmm(torch.ones(B, N, N), tokens(x), tokens(x).mT), B * N * N * C),
    "addbmm": (lambda x: torch.addbmm(torch.ones(N, N), tokens(x), tokens(x).mT), B * N * N * C),
    "addmm": (lambda x: torch.addmm(torch.ones(N, 5), tokens(x)[0], torch.ones(C, 5)), N * C * 5),
    "einsum": (lambda x: torch.einsum("bnc,bmc->bnm", tokens(x), tokens(x)), B * N * N * C),
    "einsum, heads": (
        lambda x: torch.einsum("bnhd,bmhd->bhnm", *[tokens(x).unflatten(2, (2, 4))] * 2),
        B * 2 * N * N * 4,
    ),
    "tensordot": (lambda x: torch.tensordot(x, torch.ones(C, 5), dims=([1], [0])), B * N * C * 5),
    "cdist": (lambda x: torch.cdist(tokens(x), tokens(x)[:, :3]), B * N * 3 * C),
    "cdist by product": (
        lambda x: torch.cdist(tokens(x), tokens(x), compute_mode="use_mm_for_euclid_dist"),
        B * N * N * C,
    ),
    "elementwise": (lambda x: torch.softmax(x * x + x.exp(), 1), 0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_matrix_products(name):
    function, expected = PRODUCTS[name]
    assert count(function) == expected


def test_bilinear():
    assert count(lambda x, f: f(tokens(x), tokens(x)), nn.Bilinear(C, C, 3)) == B * N * C * C * 3


@pytest.mark.parametrize(
    ("layer", "gates", "batch_first"), [(nn.RNN, 1, True), (nn.GRU, 3, False), (nn.LSTM, 4, True)]
)
def test_recurrent(layer, gates, batch_first):
    def read(x, f):
        steps = tokens(x)  # (B, N, C)
        return f(steps if batch_first else steps.transpose(0, 1))

    one = C * gates * 5 + 5 * gates * 5  # from the input and from the state, of 5 channels
    assert count(read, layer(C, 5, batch_first=batch_first)) == B * N * one
    both = one + one + (2 * 5) * gates * 5 + 5 * gates * 5 + (2 * 5) * gates * 5 + 5 * gates * 5
    deep = layer(C, 5, num_layers=2, bidirectional=True, batch_first=batch_first)
    assert count(read, deep) == B * N * both


HEADS, D, M = 2, 4, 7


def explicit(x, bias=None):
    q = tokens(x).unflatten(2, (HEADS, D)).transpose(1, 2)  # (B, heads, N, D)
    k = v = q[:, :, :M]
    logits = q @ k.mT * D**-0.5
    return torch.softmax(logits if bias is None else logits + bias, 3) @ v


def fused(x, **options):
    q = tokens(x).unflatten(2, (HEADS, D)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q[:, :, :M], q[:, :, :M], **options)


ATTENTION = {
    "cross": {},
    "bias": {"attn_mask": torch.zeros(B, HEADS, N, M)},
    "bias, broadcast": {"attn_mask": torch.zeros(1, 1, N, M)},
    "mask": {"attn_mask": torch.ones(N, M, dtype=torch.bool)},
    "causal": {"is_causal": True},
    "scale": {"scale": 1.0},
}


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_fused_attention_counts_like_two_products(options, context):
    expected = 2 * B * HEADS * N * M * D
    with context():
        assert count(lambda x: fused(x, **options)) == count(explicit) == expected


def test_attention_with_data_dependent_control_flow():
    """Real tensors would use fused kernels, which hide their products."""

    def branch(x):
        return fused(x) if x.sum().item() == x.sum().item() else x

    assert count(branch) == 2 * B * HEADS * N * M * D


def test_data_dependent_shapes():
    def select(x):
        positive = tokens(x)[0][x[0, 0].flatten() > 0]  # (selected, C)
        return positive @ torch.ones(C, 5)

    assert 0 < count(select) < N * C * 5


MHA = 4 * N * C * C + 2 * N * N * C  # per image: q, k, v, output; the two products of attention
ENCODER = MHA + 2 * N * C * 16


@pytest.mark.parametrize("weights", [False, True])
def test_multihead_attention(weights):
    layer = nn.MultiheadAttention(C, HEADS, batch_first=True)
    assert count(lambda x, f: f(*[tokens(x)] * 3, need_weights=weights), layer) == B * MHA


def test_transformer_encoder_with_a_fused_fast_path():
    layer = nn.TransformerEncoderLayer(C, HEADS, dim_feedforward=16, batch_first=True)
    assert count(lambda x, f: f(tokens(x)), layer) == B * ENCODER
    stack = nn.TransformerEncoder(layer, 3)
    with torch.inference_mode():
        assert count(lambda x, f: f(tokens(x)), stack) == 3 * B * ENCODER
    assert torch.backends.mha.get_fastpath_enabled()


def sparse(x):
    return torch.sparse.mm(tokens(x)[0].to_sparse(), torch.ones(C, 5))


def native_attention(x):
    weight, bias = torch.ones(3 * C, C), torch.ones(3 * C)
    return torch._native_multi_head_attention(*[tokens(x)] * 3, C, 2, weight, bias, weight[:C], bias[:C])


@pytest.mark.parametrize("operation", [sparse, native_attention])
def test_products_without_a_formula_are_an_error(operation):
    with torch.no_grad(), pytest.raises(UserError, match="cannot count the multiply-adds inside aten::"):
        count(operation)


def test_an_unknown_custom_operation_is_an_error():
    @torch.library.custom_op("visualtokens_test::custom", mutates_args=())
    def custom(x: torch.Tensor) -> torch.Tensor:
        return x @ x.mT

    with pytest.raises(UserError, match="visualtokens_test::custom"):
        count(custom)


def test_reference_models():
    """The published figures of He et al. and Touvron et al."""
    with torch.device("meta"):
        resnet, deit = timm.create_model("resnet50"), timm.create_model("deit_tiny_patch16_224")
    assert count_parameters(resnet) == 25_557_032
    assert count_macs(resnet, (224, 224)) == 4_089_184_256
    width, n = 192, 197
    blocks = 12 * (12 * n * width**2 + 2 * n**2 * width)
    assert count_macs(deit, (224, 224)) == 196 * 768 * width + blocks + 1000 * width


def test_any_shape_and_batch():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    one = count_macs(model, (9, 20), channels=1)
    assert one == 4 * 9 * 7 * 18 + 40
    assert count_macs(model, (9, 20), batch=5, channels=1) == 5 * one


def test_half_precision_and_compiled_models():
    model = nn.Conv2d(3, 4, 1)
    expected = 3 * 4 * 64
    assert count_macs(model.bfloat16(), (8, 8)) == expected
    assert count_macs(torch.compile(model.float()), (8, 8)) == expected


def test_the_model_is_unchanged():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)
            self.conv = nn.Conv2d(3, 4, 1).eval()

        def forward(self, x):
            self.last = self.conv(self.norm(x))
            return self.last

    model = Stateful()
    before = copy.deepcopy(model.state_dict())
    count_macs(model, (8, 8))
    assert (model.training, model.norm.training, model.conv.training) == (True, True, False)
    assert not hasattr(model, "last")
    assert all(torch.equal(before[k], v) and v.device.type == "cpu" for k, v in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_tensors_that_are_neither_parameters_nor_buffers():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.ones(8, 8)

        def forward(self, x):
            return x @ self.table

    assert count_macs(Table(), (8, 8)) == 3 * 8 * 8 * 8


def test_errors_of_the_model_are_raised():
    with pytest.raises(RuntimeError, match="channels"):
        count_macs(nn.Conv2d(4, 4, 1), (8, 8))
    with pytest.raises(UserError, match="0×8"):
        count_macs(nn.Conv2d(3, 4, 1), (0, 8))


def test_by_module():
    model = timm.create_model("paca_vit_nano", num_classes=10)
    total = count_macs(model, (32, 32))
    shallow = macs_by_module(model, (32, 32))
    assert shallow[""] == total
    assert list(shallow) == ["", "stages", "head"]
    assert shallow["head"] == 128 * 10
    assert shallow["stages"] + shallow["head"] == total
    deep = macs_by_module(model, (32, 32), depth=None)
    stages = [deep[f"stages.{i}"] for i in range(4)]
    assert sum(stages) == deep["stages"] == shallow["stages"]
    assert deep["stages.0.embed.conv"] == math.prod((3, 3, 3, 32, 16, 16))
    assert set(deep) <= {name for name, _ in model.named_modules()}
    assert min(deep.values()) > 0


def test_parameters_count_once_and_buffers_never():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    assert count_parameters(model) == 3 * 4 + 4 + 2 * 4
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    assert count_parameters(tied) == 16
