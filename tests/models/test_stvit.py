"""STViT and its partners without convolutions: cost, options, memory."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import visualtokens
from visualtokens.bench import count_macs, count_parameters
from visualtokens.errors import UserError
from visualtokens.layers import SuperTokenAttention
from visualtokens.papers.models import released_stvit_macs


def on_meta(name: str, **options: object) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **options).eval()


@pytest.mark.parametrize(
    ("name", "mparams", "gmacs_224", "gmacs_384"),
    [
        ("stvit_small", 25.50, 4.37, 14.16),
        ("stvit_base", 51.69, 9.87, 31.49),
        ("stvit_large", 94.97, 15.60, 49.75),
    ],
)
def test_cost_of_table_1(name: str, mparams: float, gmacs_224: float, gmacs_384: float) -> None:
    model = on_meta(name)
    assert round(count_parameters(model) / 1e6, 2) == mparams
    assert round(released_stvit_macs(model, (224, 224)) / 1e9, 2) == gmacs_224
    assert round(released_stvit_macs(model, (384, 384)) / 1e9, 2) == gmacs_384
    assert count_macs(model, (224, 224)) / 1e9 == pytest.approx(gmacs_224, rel=1e-2)  # products alone


@pytest.mark.parametrize(
    ("name", "mparams", "gmacs"),
    [
        ("stvit_iso_96", 30.26, 4.36),
        ("stvit_iso_64", 24.17, 3.98),
        ("stvit_iso_64_norpe", 24.13, 3.98),
        ("swin_iso_96", 28.29, 4.49),
        ("swin_iso_64", 23.08, 4.13),
        ("swin_iso_64_global", 23.11, 4.30),
    ],
)
def test_cost_of_table_2(name: str, mparams: float, gmacs: float) -> None:
    model = timm.create_model(name)  # timm's Swin makes its masks from values
    assert round(count_parameters(model) / 1e6, 2) == mparams
    count = released_stvit_macs if name.startswith("stvit") else count_macs
    assert round(count(model, (224, 224)) / 1e9, 2) == gmacs


def test_super_tokens_are_recorded_in_the_sampling_stages_only() -> None:
    model = timm.create_model("stvit_small", num_classes=3).eval()
    with torch.no_grad(), visualtokens.record_groupings(model) as found:
        model(torch.randn(2, 3, 96, 160))
    assert len(found) == 3 + 5  # of the two stages with cells of more than one token
    first = next(iter(found.values()))
    assert (first.grid, first.weights.shape) == ((24, 40), (2, 24 * 40, 9))
    assert torch.allclose(first.weights.sum(2), torch.ones(()), atol=1e-5)
    assert first.dense().shape == (2, 24 * 40, 3 * 5)


def test_a_batch_worked_through_in_parts_gives_the_same_and_is_recorded_whole() -> None:
    model = timm.create_model("stvit_small", depths=(1, 1, 1, 1), num_classes=3).eval()
    images = torch.randn(5, 3, 224, 224)
    with torch.no_grad():
        together = model(images)
        alone = torch.cat([model(image[None]) for image in images])
        assert torch.allclose(together, alone, atol=1e-5)
        with visualtokens.record_groupings(model) as found:
            model(images)
    assert [len(grouping.weights) for grouping in found.values()] == [5, 5]


def test_border_of_the_whole_model() -> None:
    for border in ("exact", "released"):
        model = timm.create_model("stvit_small", border=border, num_classes=3)
        attentions = [module for module in model.modules() if isinstance(module, SuperTokenAttention)]
        assert {attention.border for attention in attentions} == {border}
    with pytest.raises(UserError, match="neither 'released' nor 'exact'"):
        timm.create_model("stvit_small", border="periodic")


def test_no_attention_matrix_at_1024() -> None:
    """Stage 3 has 64×64 tokens there: its attention matrices would take 5 · 4096² numbers."""
    model = timm.create_model("stvit_small").eval()
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.numel())
            return out

    fake = FakeTensorMode(allow_non_fake_inputs=True)  # shapes alone matter
    with torch.no_grad(), fake, Watch():
        model(torch.empty(1, 3, 1024, 1024))
    assert largest < 5 * 4096**2
