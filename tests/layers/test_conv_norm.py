"""1×1 convolutions with BatchNorm against those of torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from visualtokens.errors import UserError
from visualtokens.layers import PixelConv, TokenConv
from visualtokens.layers.convolutions import pixel_groups


@pytest.mark.parametrize(
    ("channels", "groups"),
    [
        (1024, 16),
        (512, 8),
        (256, 4),
        (128, 2),
        (127, 1),
        (64, 1),
        (8, 1),
        (1, 1),
        (152, 2),
        (320, 5),
        (192, 3),
    ],
)
def test_pixel_groups(channels: int, groups: int) -> None:
    assert pixel_groups(channels) == groups


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("train", [True, False])
def test_token_conv_is_conv1d_and_batch_norm(groups: int, train: bool) -> None:
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


def test_no_bias_and_one_batch_norm_each() -> None:
    assert {n for n, _ in PixelConv(4, 6).named_parameters()} == {"conv.weight", "norm.weight", "norm.bias"}
    assert {n for n, _ in TokenConv(4, 6).named_parameters()} == {"weight", "norm.weight", "norm.bias"}


def test_one_image_trains_because_its_tokens_are_a_batch() -> None:
    out = TokenConv(4, 6).train()(torch.randn(1, 16, 4))
    assert torch.allclose(out.mean(1), torch.zeros(1, 6), atol=1e-5)


def test_synchronised_batch_norm_sees_the_same_channels() -> None:
    torch.manual_seed(0)
    layer = TokenConv(8, 12).eval()
    layer.norm.running_mean.normal_()
    tokens = torch.randn(2, 5, 8)
    expected = layer(tokens)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(layer)
    assert isinstance(converted.norm, nn.SyncBatchNorm)
    assert torch.equal(converted(tokens), expected)


def test_groups_must_divide_the_channels() -> None:
    with pytest.raises(UserError, match="groups=3 does not divide 8 and 12 channels"):
        TokenConv(8, 12, groups=3)
