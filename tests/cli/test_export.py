"""``vtok export``, and ``vtok predict --onnx`` without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.export.test_runtime import brightness, saved
from tests.wheel import build
from visualtokens.export import read_metadata

Vtok = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def onnx_file(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import visualtokens

    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    visualtokens.export(visualtokens.load(checkpoint), path)
    return path


def test_program_is_written(vtok: Vtok, checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.pt2"
    code, text, err = vtok("export", "--checkpoint", checkpoint, "--out", out, "--images", folder)
    assert code == 0
    assert f"{folder / 'broken.png'}" in err
    first, second = text.splitlines()
    assert first == f"{out}: {out.stat().st_size / 1e6:,.1f} MB, format pt2"
    assert second == "largest difference from the model: 0 on 10 images"
    found = read_metadata(out)
    assert (found.task, found.classes) == ("classify", list("0123456789"))
    assert found.source["architecture"] == "paca_vit_nano"


def test_named_models_are_exported(vtok: Vtok, tmp_path: Path) -> None:
    out = tmp_path / "model.pt2"
    sizes = ("--dynamic", "batch,size", "--multiple", "16")
    code, text, _ = vtok("export", "--model", "paca_vit_nano", "--out", out, *sizes)
    assert code == 0
    assert text.splitlines()[2:] == [
        "height and width: multiples of 16",
        "The weights are random; see --weights.",
    ]
    code, text, _ = vtok("export", "--model", "paca_vit_nano", "--out", out, "--json")
    document = json.loads(text)
    assert code == 0
    assert document["difference"] == 0
    assert document["metadata"]["size"] == [32, 32]
    assert document["bytes"] == out.stat().st_size


def test_a_difference_above_the_tolerance_leaves_no_file(
    vtok: Vtok, checkpoint: Path, tmp_path: Path
) -> None:
    options = ("--out", tmp_path / "model.pt2", "--half", "--tolerance", "0")
    code, text, err = vtok("export", "--checkpoint", checkpoint, *options)
    assert (code, text) == (2, "")
    assert "which is more than the tolerance of 0; it is not written" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--out must be given"),
        (("--out", "m.onnx"), "give --checkpoint FOLDER or --model NAME, one of them"),
        (("--out", "m.onnx", "--model", "a", "--checkpoint", "b"), "one of them"),
        (("--out", "m.onnx", "--model", "resnet8000"), "unknown model 'resnet8000'"),
        (("--out", "m.onnx", "--checkpoint", "nowhere"), "'nowhere' does not exist"),
        (("--out", "m.onnx", "--checkpoint", "r", "--weights", "w.pth"), "leave --weights out"),
        (
            ("--out", "m.onnx", "--model", "resnet18", "--format", "tensorrt"),
            "not 'tensorrt'",
        ),
    ],
)
def test_wrong_options_are_refused(vtok: Vtok, options: tuple[str, ...], message: str) -> None:
    code, text, err = vtok("export", *options)
    assert (code, text) == (2, "")
    assert message in err


def test_an_onnx_file_predicts_as_its_checkpoint(
    vtok: Vtok, checkpoint: Path, onnx_file: Path, folder: Path, tmp_path: Path
) -> None:
    images = (folder / "0.png", folder / "broken.png", folder / "1.png")
    ours = vtok("predict", *images, "--onnx", onnx_file, "--json")
    theirs = vtok("predict", *images, "--checkpoint", checkpoint, "--json")
    assert ours[0] == theirs[0] == 1  # one cannot be read
    found, expected = json.loads(ours[1]), json.loads(theirs[1])
    assert found["unreadable"] == expected["unreadable"]
    for one, other in zip(found["predictions"], expected["predictions"], strict=True):
        assert one["image"] == other["image"]
        assert [c["class"] for c in one["classes"]] == [c["class"] for c in other["classes"]]
        probabilities = [c["probability"] for c in other["classes"]]
        assert [c["probability"] for c in one["classes"]] == pytest.approx(probabilities, abs=1e-5)
    for ending in ("csv", "jsonl", "txt"):
        files = [tmp_path / f"{kind}.{ending}" for kind in ("onnx", "checkpoint")]
        vtok("predict", *images, "--onnx", onnx_file, "--out", files[0], "--top", "1")
        vtok("predict", *images, "--checkpoint", checkpoint, "--out", files[1], "--top", "1")
        lines = [file.read_text().splitlines() for file in files]
        assert len(lines[0]) == len(lines[1]) > 2


def test_wrong_files_are_one_line(vtok: Vtok, folder: Path, onnx_file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(onnx_file.read_bytes()[:10_000])
    other = saved(tmp_path, brightness(task="fly"))
    for file in (cut, other, folder / "0.png", tmp_path, tmp_path / "nowhere.onnx"):
        code, text, err = vtok("predict", folder / "0.png", "--onnx", file)
        assert (code, text) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--checkpoint must be given, or --onnx"),
        (("--onnx", "m.onnx", "--checkpoint", "run"), "exclude each other"),
        (("--onnx", "m.onnx", "--device", "cuda"), "ONNX files run on the CPU"),
    ],
)
def test_onnx_or_checkpoint(vtok: Vtok, options: tuple[str, ...], message: str) -> None:
    code, _, err = vtok("predict", "photo.jpg", *options)
    assert code == 2
    assert message in err


def test_options_of_other_tasks_are_refused(vtok: Vtok, onnx_file: Path, folder: Path) -> None:
    code, _, err = vtok("predict", folder / "0.png", "--onnx", onnx_file, "--score", "0.5")
    assert code == 2
    assert f"score=0.5 has no effect: {onnx_file} was trained to classify" in err


def test_torch_is_not_imported(onnx_file: Path, folder: Path) -> None:
    code = (
        "import sys, vtok\n"
        f"code = vtok.main(['predict', {str(folder / '0.png')!r}, '--onnx', {str(onnx_file)!r}])\n"
        "print(code, [m for m in ('torch', 'timm', 'torchvision') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


@pytest.mark.slow
def test_three_packages_are_enough(onnx_file: Path, folder: Path, tmp_path: Path) -> None:
    """The wheel without its requirements, beside onnxruntime, numpy and Pillow."""
    import venv

    _, wheel = build(tmp_path / "dist", isolated=False)
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, "onnxruntime", "numpy", "pillow"], check=True, env=outside)
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True, env=outside)
    command = [tmp_path / "venv" / "bin" / "vtok", "predict", folder / "0.png", "--onnx", onnx_file]
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([*command, "--top", "1"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(folder / "0.png")
    wrong = subprocess.run([*command, "--tops", "1"], capture_output=True, text=True, env=environment)
    assert wrong.returncode == 2
    assert wrong.stderr == "error: unrecognized arguments: --tops 1; --help lists the options\n"
