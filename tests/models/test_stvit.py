"""STViT and Swin of the same size: published costs, chunks of a batch, options, memory."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import visualtokens
from visualtokens.bench import count_macs, count_parameters
from visualtokens.layers import SuperTokenAttention, convolutions
from visualtokens.papers.counting import released_stvit_macs

from ..ops.helpers import LargestTensor


def on_meta(name: str, **options: object) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **options).eval()


@pytest.mark.parametrize(
    ("name", "mparams"),
    [
        ("stvit_small", 25.50),
        ("stvit_base", 51.69),
        ("stvit_large", 94.97),
        ("stvit_iso_96", 30.26),
        ("stvit_iso_64", 24.17),
        ("stvit_iso_64_norpe", 24.13),
        ("swin_iso_96", 28.29),
        ("swin_iso_64", 23.08),
        ("swin_iso_64_global", 23.11),
    ],
)
def test_parameters_of_tables_1_and_2(name: str, mparams: float) -> None:
    assert round(count_parameters(on_meta(name)) / 1e6, 2) == mparams


def test_multiply_adds_of_table_1() -> None:
    """The other rows are compared with the published figures in ``tests/papers``."""
    model = on_meta("stvit_small")
    assert round(released_stvit_macs(model, (224, 224)) / 1e9, 2) == 4.37
    assert count_macs(model, (224, 224)) / 1e9 == pytest.approx(4.37, rel=1e-2)  # products alone


def test_multiply_adds_of_swin_in_table_2() -> None:
    model = timm.create_model("swin_iso_64_global")  # not on meta: timm computes the masks from values
    assert round(count_macs(model, (224, 224)) / 1e9, 2) == 4.30


def test_groupings_of_the_stages_with_super_tokens() -> None:
    model = timm.create_model("stvit_small", depths=(2, 1, 1, 1), num_classes=3).eval()
    with torch.no_grad(), visualtokens.record_groupings(model) as groupings:
        model(torch.randn(2, 3, 96, 160))
    assert len(groupings) == 2 + 1  # stages 3 and 4 use plain attention
    first = next(iter(groupings.values()))
    assert (first.grid, first.weights.shape) == ((24, 40), (2, 24 * 40, 9))
    assert torch.allclose(first.weights.sum(2), torch.ones(()), atol=1e-5)
    assert first.dense().shape == (2, 24 * 40, 3 * 5)


def test_chunked_batch_equals_single_images_and_is_recorded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "STRIP_BYTES", 2 * 4 * 64 * 16 * 16 * 4)  # two images of stage 1
    model = timm.create_model("stvit_small", depths=(1, 1, 1, 1), num_classes=3).eval()
    images = torch.randn(5, 3, 64, 64)
    with torch.no_grad():
        assert model.stages[0].images_per_chunk(images) == 2
        together = model(images)
        alone = torch.cat([model(image[None]) for image in images])
        assert torch.allclose(together, alone, atol=1e-5)
        with visualtokens.record_groupings(model) as groupings:
            model(images)
    assert [len(grouping.weights) for grouping in groupings.values()] == [5, 5]


def test_border_is_that_of_every_block() -> None:
    for border in ("exact", "released"):
        model = on_meta("stvit_small", border=border)
        attentions = [module for module in model.modules() if isinstance(module, SuperTokenAttention)]
        assert {attention.border for attention in attentions} == {border}


def test_no_attention_matrix_at_1024() -> None:
    """Stage 3 has 64×64 tokens, so its attention weights would be 5 · 4096² numbers."""
    model = timm.create_model("stvit_small", depths=(1, 1, 1, 1)).eval()
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # shapes alone matter
    with torch.no_grad(), fake, LargestTensor() as recorder:
        model(torch.empty(1, 3, 1024, 1024))
    assert 0 < recorder.numel < 5 * 4096**2
