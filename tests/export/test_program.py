"""Exported files: what they hold, how they are verified, and what is refused."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from timm.models import VisionTransformer
from torch import Tensor, nn

import visualtokens
from visualtokens.data import Preprocess
from visualtokens.errors import UserError
from visualtokens.export import read_metadata, verification
from visualtokens.export.program import Captured, capture_model

PLAIN = Preprocess((16, 16), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


class Net(nn.Module):
    """Colours to two numbers, at any size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.conv(images).relu().mean((2, 3)))


def run_onnx(path: Path, images: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(path)
    return session.run(None, {session.get_inputs()[0].name: images})[0]


def test_onnx_file_holds_everything(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    made = visualtokens.export(Net(), path, preprocess=PLAIN, classes=["cat", "dög"])
    assert made.path == path
    assert made.bytes == path.stat().st_size
    assert made.compared == 8
    assert list(tmp_path.iterdir()) == [path]
    found = read_metadata(path)
    assert found == made.metadata
    assert (found.classes, found.size, found.dynamic, found.input) == (
        ["cat", "dög"],
        [16, 16],
        ["batch"],
        "images",
    )
    assert found.preprocess is not None
    assert found.preprocess["mean"] == [0.5, 0.4, 0.3]
    assert found.library == visualtokens.__version__
    images = torch.randn(7, 3, 16, 16)
    assert np.allclose(run_onnx(path, images.numpy()), Net()(images).detach().numpy(), atol=1e-6)


def test_size_may_vary(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    made = visualtokens.export(Net(), path, preprocess=PLAIN, dynamic=("batch", "size"))
    assert made.compared == 24  # three sizes
    images = torch.randn(3, 3, 21, 50)
    assert np.allclose(run_onnx(path, images.numpy()), Net()(images).detach().numpy(), atol=1e-6)


class Padded(nn.Module):
    """A model that is wrong for sides that are no multiples of 20."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2] // 20 * 20, x.shape[3] // 20 * 20
        return x[:, :, :height, :width].unflatten(2, (-1, 20)).unflatten(4, (-1, 20)).mean((3, 5)).sum((2, 3))


def shapes(model: nn.Module, *, multiple: int) -> str:
    """The formulas of the shapes in the program of a model with a dynamic size."""
    dynamic = ("batch", "size")
    preprocess = replace(PLAIN, size=(60, 100))
    program = capture_model(model, dynamic=dynamic, multiple=multiple, preprocess=preprocess).program
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "call_function"]
    return " ".join(str(tuple(value.shape)) for value in values if isinstance(value, Tensor))


def test_sizes_are_multiples_of_the_given_number(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    options = dict(preprocess=replace(PLAIN, size=(60, 100)), dynamic=("batch", "size"))
    made = visualtokens.export(Padded(), path, multiple=20, **options)
    assert made.metadata.multiple == read_metadata(path).multiple == 20
    images = torch.randn(2, 3, 60, 100)
    assert np.allclose(run_onnx(path, images.numpy()), Padded()(images).numpy(), atol=1e-5)
    assert "//" not in shapes(Padded(), multiple=20)
    assert "//" in shapes(Padded(), multiple=1)
    for wrong in (0, 31):
        with pytest.raises(UserError, match=f"multiple={wrong} is not from 1 to 30, for a model of 60×100"):
            visualtokens.export(Padded(), path, multiple=wrong, **options)
    with pytest.raises(UserError, match="multiple=32 is that of heights and widths that vary; add size"):
        visualtokens.export(Padded(), path, multiple=32, preprocess=PLAIN)


def test_sizes_of_packages_are_multiples_of_32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only by default, and only of packages; smaller ones of small images."""
    monkeypatch.setattr(Captured, "write", lambda self, *args, **options: self.metadata.multiple)

    def multiple(size: tuple[int, int] = (224, 224), **options: Any) -> Any:
        preprocess = replace(PLAIN, size=size)
        return visualtokens.export(Net(), tmp_path / "model.pt2", preprocess=preprocess, **options)

    dynamic = ("batch", "size")
    assert multiple(format="aoti", dynamic=dynamic) == 32
    assert multiple((32, 48), format="aoti", dynamic=dynamic) == 16
    assert multiple(format="aoti", dynamic=dynamic, multiple=20) == 20
    assert multiple(format="aoti") == multiple(format="pt2", dynamic=dynamic) == 1


def test_size_of_a_vit_may_vary_in_onnx_only(tmp_path: Path) -> None:
    sizes = dict(img_size=64, patch_size=16, embed_dim=16, depth=1, num_heads=2, num_classes=3)
    vit = VisionTransformer(**sizes, dynamic_img_size=True).eval()
    options = dict(preprocess=replace(PLAIN, size=(64, 64)), dynamic=("batch", "size"))
    # timm branches at the model's own size, and an exported program records the other branch only
    with pytest.raises(UserError, match=r"\(1, 3, 64, 64\).*leave size out of dynamic or choose format onnx"):
        visualtokens.export(vit, tmp_path / "model.pt2", **options)
    assert list(tmp_path.iterdir()) == []
    assert visualtokens.export(vit, tmp_path / "model.onnx", **options).difference < 1e-6


def test_a_capture_that_does_not_end_is_refused() -> None:
    class Endless(Net):
        def forward(self, x: Tensor) -> Tensor:
            if isinstance(x.shape[2], torch.SymInt):
                while True:
                    x = x * 1
            return super().forward(x)

    with pytest.raises(UserError, match=r"torch has not captured it after 0\.5 seconds; leave size out"):
        capture_model(Endless(), dynamic=("batch", "size"), preprocess=PLAIN, seconds=0.5)


def test_a_compilation_that_does_not_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*args: object, **options: object) -> None:
        while True:
            pass

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", endless)
    captured = capture_model(Net(), dynamic=("batch",), preprocess=PLAIN)
    with pytest.raises(UserError, match=r"not compiled this model after 0\.5 seconds; with a dynamic size"):
        captured.write(tmp_path / "model.pt2", "aoti", seconds=0.5)
    assert list(tmp_path.iterdir()) == []


def test_program_holds_its_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    made = visualtokens.export(Net(), path, preprocess=PLAIN, classes=["a", "b"])
    assert made.difference == 0
    assert read_metadata(path) == made.metadata
    images = torch.randn(4, 3, 16, 16)
    assert torch.equal(torch.export.load(path).module()(images), Net()(images))


@pytest.mark.slow
def test_compiled_package_holds_its_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    made = visualtokens.export(Net(), path, format="aoti", preprocess=PLAIN)
    assert made.difference < 1e-5
    assert read_metadata(path) == made.metadata
    answer = torch._inductor.aoti_load_package(str(path))
    images = torch.randn(4, 3, 16, 16)
    assert torch.allclose(answer(images), Net()(images), atol=1e-5)


def test_pixels_are_normalised_inside(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    visualtokens.export(Net(), path, preprocess=PLAIN, with_preprocess=True)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    expected = Net()(PLAIN.normalise(torch.from_numpy(pixels))).detach().numpy()
    assert np.allclose(run_onnx(path, pixels), expected, atol=1e-5)
    assert read_metadata(path).input == "pixels"


def test_half_precision_keeps_the_model(tmp_path: Path) -> None:
    model = Net()
    whole = visualtokens.export(model, tmp_path / "whole.onnx", preprocess=PLAIN)
    half = visualtokens.export(model, tmp_path / "half.onnx", preprocess=PLAIN, half=True)
    assert whole.difference < half.difference < 0.01
    assert model.conv.weight.dtype == torch.float32
    assert run_onnx(tmp_path / "half.onnx", np.zeros((1, 3, 16, 16), np.float32)).dtype == np.float32


def test_given_images_are_compared(tmp_path: Path) -> None:
    made = visualtokens.export(
        Net(), tmp_path / "model.pt2", preprocess=PLAIN, images=torch.randn(7, 3, 16, 16)
    )
    assert made.compared == 8 + 7
    with pytest.raises(UserError, match=r"give \(n, 3, H, W\)"):
        visualtokens.export(Net(), tmp_path / "b.pt2", preprocess=PLAIN, images=torch.randn(3, 16, 16))


def test_wrong_file_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(b"the file before")
    monkeypatch.setattr(verification, "_open", lambda file, metadata: lambda images: Net()(images) + 0.01)
    with pytest.raises(UserError, match=r"would differ from the model by 0.01, which is more than the tol"):
        visualtokens.export(Net(), path, preprocess=PLAIN)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"the file before"
    visualtokens.export(Net(), path, preprocess=PLAIN, tolerance=0.1)


def test_a_file_that_fails_is_refused_without_its_temporary_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(file: Path, metadata: Any) -> Any:
        def answer(images: Tensor) -> Tensor:
            raise UserError(f"{file} cannot be run: no memory")

        return answer

    monkeypatch.setattr(verification, "_open", broken)
    expected = r"^the file would fail on images of \(1, 3, 16, 16\): cannot be run: no memory; choose"
    with pytest.raises(UserError, match=expected):
        visualtokens.export(Net(), tmp_path / "model.pt2", preprocess=PLAIN)


def test_nan_is_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        verification, "_open", lambda file, metadata: lambda images: Net()(images) * torch.nan
    )
    with pytest.raises(UserError, match=r"answers of the model or of .*model\.pt2 are not finite"):
        visualtokens.export(Net(), tmp_path / "model.pt2", preprocess=PLAIN)


def test_timm_models_name_classes_and_input(tmp_path: Path) -> None:
    model = timm.create_model("paca_vit_nano", num_classes=7).train()
    made = visualtokens.export(model, tmp_path / "model.pt2")
    assert made.metadata.classes == list("0123456")
    assert made.metadata.task == "classify"
    assert made.metadata.source == {"architecture": "paca_vit_nano"}
    assert model.training  # as before


class Pair(Net):
    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return images, images


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("model.bin", {}, "has no ending of format onnx or pt2; give model.onnx or model.pt2"),
        ("model.onnx", {"format": "pt2"}, "has no ending of format pt2; give model.pt2"),
        ("model.pt2", {"format": "tflite"}, "unknown format 'tflite'"),
        ("model.pt2", {"dynamic": ("batches",)}, "unknown dynamic axis 'batches'; did you mean 'batch'"),
        ("model.pt2", {"tolerance": -1.0}, "tolerance=-1.0 is not a difference"),
        ("model.pt2", {"preprocess": None}, "the input of this Net is unknown; give its preprocess"),
    ],
)
def test_wrong_options_are_refused(
    name: str, options: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        visualtokens.export(Net(), tmp_path / name, **{"preprocess": PLAIN, **options})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_several_outputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"returns a tuple"):
        visualtokens.export(Pair(), tmp_path / "model.pt2", preprocess=PLAIN)


class Branching(Net):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) if images.sum() > 0 else super().forward(-images)


def test_models_that_torch_cannot_capture_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"this Branching cannot be exported: .*; load the check"):
        visualtokens.export(Branching(), tmp_path / "model.pt2", preprocess=PLAIN)
    assert list(tmp_path.iterdir()) == []


def test_damaged_archives_have_no_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    visualtokens.export(Net(), path, preprocess=PLAIN)
    content = path.read_bytes()
    for length in (0, 10, len(content) // 2, len(content) - 30):
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match=r"is not a \.pt2 archive|has no extra"):
            read_metadata(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/extra/other.json", "{}")
    with pytest.raises(UserError, match=r"has no extra/visualtokens.json"):
        read_metadata(path)
