"""ONNX files of unknown origin: truncated, wrong and malicious ones are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from visualtokens.errors import UserError
from visualtokens.export.metadata import KEY, VERSION, parse_metadata
from visualtokens.export.runtime import OnnxModel, check_onnx, open_model

DESCRIBED: dict[str, Any] = {
    "version": VERSION,
    "library": "0.1.0",
    "format": "onnx",
    "task": "classify",
    "classes": ["dark", "light"],
    "preprocess": {"size": [4, 6], "mean": [0, 0, 0], "std": [1, 1, 1], "crop": 1.0, "interpolation": "box"},
    "input": "images",
    "size": [4, 6],
    "dynamic": ["batch"],
    "multiple": 1,
    "half": False,
    "source": {},
}


def brightness(**changes: Any) -> onnx.ModelProto:
    """A model of two classes whose logits are ∓ the sum of the image."""
    weights = np.stack([-np.ones(72), np.ones(72)], 1).astype(np.float32) / 72
    nodes = [
        helper.make_node("Flatten", ["images"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["output"]),
    ]
    graph = helper.make_graph(
        nodes,
        "brightness",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 4, 6])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 2])],
        [onnx.numpy_helper.from_array(weights, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    helper.set_model_props(model, {KEY: json.dumps(DESCRIBED | changes)})
    return model


def saved(tmp_path: Path, model: onnx.ModelProto) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_model_answers(tmp_path: Path) -> None:
    model = open_model(saved(tmp_path, brightness()))
    found = model(np.ones((3, 3, 4, 6), np.float32))
    assert np.allclose(found, [[-1, 1]] * 3)
    assert model.classes == ["dark", "light"]
    with pytest.raises(UserError, match=r"model\.onnx cannot be run: "):
        model(np.ones((3, 3, 4, 5), np.float32))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = brightness().SerializeToString()
    for length in range(0, len(content), 7):
        path = tmp_path / "cut.onnx"
        path.write_bytes(content[:length])
        with pytest.raises(UserError) as caught:
            open_model(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x00", b"not a model at all", b"PK\x03\x04 a zip", b"\xff" * 50])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.onnx"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is damaged or not an ONNX file"):
        open_model(path)
    with pytest.raises(UserError, match="does not exist"):
        open_model(tmp_path / "nowhere.onnx")


@pytest.mark.parametrize("location", ["/etc/passwd", "../weights.bin", "a/../../weights.bin", "link"])
def test_weights_outside_the_folder_are_refused(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    (tmp_path / "weights.bin").write_bytes(bytes(576))
    (folder / "link").symlink_to(tmp_path / "weights.bin")
    model = brightness()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location
    with pytest.raises(UserError, match="names weights outside its folder"):
        check_onnx(saved(folder, model))
    entry.value = "weights.bin"
    check_onnx(saved(folder, model))


def test_weights_of_nested_graphs_are_checked(tmp_path: Path) -> None:
    model = brightness()
    inner = helper.make_graph([], "inner", [], [])
    tensor = inner.initializer.add()
    tensor.name, tensor.data_location = "w", TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "/etc/passwd"
    node = model.graph.node.add()
    node.CopyFrom(helper.make_node("If", ["c"], ["d"], then_branch=inner, else_branch=inner))
    with pytest.raises(UserError, match="names weights outside its folder"):
        check_onnx(saved(tmp_path, model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 99}, "its metadata have version 99, this library reads 1"),
        ({"task": "fly"}, "unknown task 'fly'; choose from classify, segment"),
        ({"classes": "ab"}, "its metadata are damaged: classes is not"),
        ({"classes": ["x" * 2000, "y"]}, "longer than 1,000 characters"),
        ({"classes": []}, "it names no classes"),
        ({"size": [10**9, 1]}, "is not a height and a width of 1 to 8,192"),
        ({"input": "sound"}, "is neither images nor pixels"),
        ({"dynamic": ["time"]}, "is not among batch, size"),
        ({"multiple": 0}, "multiple=0"),
        ({"preprocess": None}, "its preprocessing is damaged"),
        ({"preprocess": DESCRIBED["preprocess"] | {"std": [0, 1, 1]}}, "std above 0"),
        ({"preprocess": DESCRIBED["preprocess"] | {"size": [10**9, 4]}}, "its preprocessing is damaged"),
        ({"unknown": 1}, "its metadata are damaged"),
    ],
)
def test_damaged_metadata_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        open_model(saved(tmp_path, brightness(**changes)))
    assert str(caught.value).startswith(str(tmp_path / "model.onnx"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="its metadata"):
        parse_metadata(text, Path("model.onnx"))


def test_other_onnx_files_are_refused(tmp_path: Path) -> None:
    model = brightness()
    del model.metadata_props[:]
    with pytest.raises(UserError, match="does not name its classes and preprocessing; write it with `vtok"):
        open_model(saved(tmp_path, model))
    model = brightness()
    model.graph.output.add().CopyFrom(helper.make_tensor_value_info("flat", TensorProto.FLOAT, None))
    with pytest.raises(UserError, match="1 inputs and 2 outputs instead of one each"):
        OnnxModel(saved(tmp_path, model))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda images: np.ones((len(images), 5), np.float32), r"\(2, 5\); images and classes are \(2, 2\)"),
        (lambda images: np.ones((4, 2), np.float32), r"\(4, 2\); images and classes are \(2, 2\)"),
        (lambda images: np.full((len(images), 2), np.nan, np.float32), "not finite"),
        (lambda images: np.array([[np.inf, 0.0], [0.0, 0.0]]), "not finite"),
        (lambda images: np.ones((len(images), 2), bool), "returns bool instead of float32"),
        (lambda images: np.array([["a", "b"], ["c", "d"]]), "instead of float32"),
        (lambda images: [1.0, 2.0], "returns list instead of float32"),
    ],
)
def test_other_answers_are_refused(
    answer: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(saved(tmp_path, brightness()))
    monkeypatch.setattr(OnnxModel, "__call__", lambda _, images: answer(images))
    with pytest.raises(UserError, match=message):
        model.task.predict_batch(model, [np.zeros((3, 4, 6), np.float32)] * 2)


@pytest.mark.parametrize("name", [b"output", b"MatMul"])
def test_names_that_are_not_text(name: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """onnxruntime would print about them and try other providers."""
    path = tmp_path / "name.onnx"
    path.write_bytes(brightness().SerializeToString().replace(name, name[:-1] + b"\xa3"))
    with pytest.raises(UserError, match=r"name\.onnx is damaged") as caught:
        open_model(path)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
