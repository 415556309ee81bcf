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


def windows(model: nn.Module) -> list[tuple[int, int]]:
    """The window of the relative positions in the first block of each stage."""
    return [stage.blocks[0].attn.mix.position.window for stage in model.stages]


def test_relative_positions_follow_the_input_size() -> None:
    model = on_meta("stvit_iso_64")
    assert windows(model) == [(7, 7), (7, 7), (14, 14), (7, 7)]
    assert windows(on_meta("stvit_iso_64", img_size=(224, 448))) == [(7, 14), (7, 14), (14, 28), (7, 14)]
    assert windows(on_meta("stvit_iso_64", img_size=96, cells=(6, 3, 1, 1))) == [
        (4, 4),
        (4, 4),
        (6, 6),
        (3, 3),
    ]
    model.set_input_size(img_size=(33, 65))  # padded
    assert windows(model) == [(2, 3), (2, 3), (3, 5), (2, 3)]
    assert model.stages[2].blocks[1].attn.mix.position.table.shape == (5, 5, 9)


SWINS = ["swin_iso_64", "swin_iso_64_global", "swin_iso_64_norpe"]


def small_swin(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    small = dict(channels=(16, 32, 64, 96), depths=(2, 1, 2, 1), heads=(1, 2, 2, 3), num_classes=3)
    return timm.create_model(name, **(small | options)).eval()


@pytest.mark.parametrize("name", SWINS)
def test_swin_resized_to_its_own_size_is_unchanged(name: str) -> None:
    """timm's default windows are an eighth of the grid of patches: 7 of 56."""
    model, images = small_swin(name), torch.randn(1, 3, 224, 224)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        before = model(images)
        model.set_input_size(img_size=224)
        assert torch.equal(model(images), before)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", SWINS)
def test_swin_windows_follow_the_input_size(name: str) -> None:
    model = small_swin(name)
    model.set_input_size(img_size=(128, 256))
    stages = [stage.blocks[-1].window_size for stage in model.layers]
    whole = (8, 16) if "global" in name else (4, 8)
    assert stages == [(4, 8), (4, 8), whole, (4, 8)]
    assert model.layers[0].blocks[1].shift_size == (2, 4)
    tables = [key for key in dict(model.named_parameters()) if key.endswith("bias_table")]
    assert len(tables) == (0 if "norpe" in name else 6)
    model.set_input_size(img_size=96, window_size=5)  # from windows that are not square
    assert [stage.blocks[-1].window_size for stage in model.layers] == [
        (5, 5),
        (5, 5),
        (6, 6) if "global" in name else (5, 5),
        (3, 3),
    ]
    assert torch.isfinite(model(torch.randn(2, 3, 96, 96))).all()


def test_swin_windows_over_the_whole_map_are_built_for_the_input_size() -> None:
    assert small_swin("swin_iso_64_global").layers[2].blocks[0].window_size == (14, 14)
    model = small_swin("swin_iso_64_global", img_size=(100, 164))  # 7×11 of 25×41 patches, rounded up
    assert model.layers[2].blocks[0].window_size == (7, 11)
    maps = model.forward_intermediates(torch.randn(1, 3, 100, 164), intermediates_only=True)
    assert [tuple(x.shape[2:]) for x in maps] == [(25, 41), (13, 21), (7, 11), (4, 6)]


def test_interpolated_positions_are_linear_in_the_offset() -> None:
    """A bias that grows linearly with the offset still does after the windows have changed."""
    model = small_swin("swin_iso_64")
    attn = model.layers[0].blocks[0].attn
    rows = torch.arange(-6.0, 7).repeat_interleave(13)
    attn.relative_position_bias_table.data.copy_(rows.unsqueeze(1))
    model.set_input_size(img_size=(224, 448), window_size=(4, 10))
    table = attn.relative_position_bias_table.view(7, 19)
    assert torch.allclose(table[:, 0], torch.linspace(-6, 6, 7), atol=0.3)
    assert torch.allclose(table, table[:, :1].expand(-1, 19), atol=1e-5)
    bias = attn._get_rel_pos_bias()[0, 0]  # (40, 40), of queries and keys at row n // 10
    assert bias[39, 0] == table[6, 18]
    assert bias[0, 39] == table[0, 0]
