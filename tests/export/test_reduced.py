"""Every reduction method in the formats: the same answers, ties included, whatever the batch size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from torch import Tensor, nn

import visualtokens
from tests.export.test_runtime import DESCRIBED
from visualtokens.errors import UserError
from visualtokens.export.formats import save_program
from visualtokens.export.metadata import Metadata
from visualtokens.ops.seeds import highest
from visualtokens.reduce import METHODS

RANDOM = ("importance", "random")


def vit(**options: object) -> nn.Module:
    """A vision transformer of 16 patches with attention far from uniform."""
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2} | options
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


class Highest(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        return highest(scores, 7)


def test_onnx_breaks_ties_by_the_lowest_index(tmp_path: Path) -> None:
    scores = torch.randint(0, 4, (50, 23), generator=torch.Generator().manual_seed(0)).float()
    program = torch.onnx.export(
        Highest(), (scores,), dynamo=True, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), verbose=False
    )
    assert program is not None
    program.save(tmp_path / "highest.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "highest.onnx")
    found = session.run(None, {session.get_inputs()[0].name: scores.numpy()})[0]
    expected = np.argsort(-scores.numpy(), axis=1, kind="stable")[:, :7]
    assert found.tolist() == expected.tolist() == highest(scores, 7).tolist()


class Assigning(nn.Module):
    """Slices that are replaced: a suffix, a prefix, a middle, with negative bounds, and with a step."""

    def forward(self, x: Tensor) -> Tensor:
        out = [x.clone() for _ in range(6)]
        out[0][..., 1:].add_(1)
        out[1][:, :2] = 0
        out[2][:, :, 1:3] *= 2
        out[3][:, 1:-1] = 5
        out[4][:, :, ::2] = 3
        out[5][:, 0:100] = 1
        return torch.stack(out)


def test_onnx_replaces_slices(tmp_path: Path) -> None:
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(Assigning(), (torch.randn(2, 4, 5),), dynamic_shapes=shapes)
    save_program(program, tmp_path / "slices.onnx", Metadata(**DESCRIBED))
    session = onnxruntime.InferenceSession(tmp_path / "slices.onnx")
    x = torch.randn(3, 4, 5)
    (found,) = session.run(None, {"images": x.numpy()})
    assert np.array_equal(found, Assigning()(x).numpy())


class Adding(nn.Module):
    """Rows that are added to a few others."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0]) % 3
        return x.new_zeros(3, x.shape[1]).index_add_(0, rows, x)


def test_onnx_adds_rows_without_a_race(tmp_path: Path) -> None:
    """onnxruntime loses sums of ScatterND on several threads; see ``_index_put``."""
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(Adding(), (torch.randn(6, 64),), dynamic_shapes=shapes)
    save_program(program, tmp_path / "rows.onnx", Metadata(**DESCRIBED))
    kinds = {node.op_type for node in onnx.load(tmp_path / "rows.onnx").graph.node}
    assert "ScatterElements" in kinds
    assert "ScatterND" not in kinds
    session = onnxruntime.InferenceSession(tmp_path / "rows.onnx")
    x = torch.randint(-9, 9, (1000, 64)).float()
    (found,) = session.run(None, {"images": x.numpy()})
    assert np.array_equal(found, Adding()(x).numpy())


class AddingElsewhere(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0]) % 3
        return x.new_zeros(3, 3, x.shape[1]).index_put_((rows, rows), x, accumulate=True)


def test_sums_that_onnxruntime_would_lose_are_refused(tmp_path: Path) -> None:
    program = torch.export.export(AddingElsewhere(), (torch.randn(6, 4),))
    with pytest.raises(UserError, match=r"rows of a matrix only; choose format pt2"):
        save_program(program, tmp_path / "rows.onnx", Metadata(**DESCRIBED))


SLOW = pytest.mark.slow
EXACT = [m for m in METHODS if m not in RANDOM]


@pytest.mark.parametrize(
    "method", [m if m in ("weighted_kmedoids", "conv") else pytest.param(m, marks=SLOW) for m in EXACT]
)
def test_reduced_models_export_to_onnx(method: str, tmp_path: Path) -> None:
    model = visualtokens.reduce(vit(depth=1), method, keep=[4 if method == "conv" else 5])
    made = visualtokens.export(model, tmp_path / "model.onnx")
    assert made.difference < 1e-5
    assert made.metadata.source["reduction"]["method"] == method


@pytest.mark.parametrize("method", EXACT)
def test_reduced_models_export_as_programs(method: str, tmp_path: Path) -> None:
    model = visualtokens.reduce(vit(depth=1), method, keep=[4])
    assert visualtokens.export(model, tmp_path / "model.pt2").difference == 0


@pytest.mark.parametrize("options", [{"init": "significance"}, {"carry": False}])
def test_options_of_a_reduction_export(options: dict[str, object], tmp_path: Path) -> None:
    model = visualtokens.reduce(
        vit(depth=1, class_token=False, global_pool="avg"), "weighted_kmedoids", keep=[4], **options
    )
    assert visualtokens.export(model, tmp_path / "model.pt2").difference == 0


@pytest.mark.parametrize("method", RANDOM)
def test_random_methods_are_refused(method: str, tmp_path: Path) -> None:
    model = visualtokens.reduce(vit(), method, keep=[9, 4])
    with pytest.raises(UserError, match=rf"are random \(method '{method}'\)"):
        visualtokens.export(model, tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


def test_equal_tokens_are_reduced_in_the_same_way(tmp_path: Path) -> None:
    """A grey image has only equal tokens but for their positions, and without those all scores tie."""
    model = visualtokens.reduce(vit(pos_embed="none", depth=1), "weighted_merge", keep=[9])
    made = visualtokens.export(model, tmp_path / "model.onnx", images=torch.zeros(3, 3, 32, 32))
    assert made.difference < 1e-5


def test_dynamic_size_of_a_reduced_model_is_refused(tmp_path: Path) -> None:
    model = visualtokens.reduce(vit(), "merge", keep=[9, 4])
    with pytest.raises(UserError, match="cannot be exported with a dynamic size"):
        visualtokens.export(model, tmp_path / "model.pt2", dynamic=("batch", "size"))
