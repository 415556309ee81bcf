"""A checkpoint that comes from anywhere: what its files may hold, and one line for everything else."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from visualtokens.checkpoint import load
from visualtokens.cli import main
from visualtokens.errors import UserError
from visualtokens.files import contiguous_weights, write_config, write_weights
from visualtokens.layers import register_tokenizer, tokenizers
from visualtokens.tasks.task import get_task, open_training
from visualtokens.train import TrainConfig

BODY = {"backbone": "vt_resnet18", "backbone_args": {"width": 0.125, "token_dim": 64, "tokens": 4}}
STATISTICS = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
CONFIGS: dict[str, dict[str, Any]] = {
    "classify": {
        "architecture": "vt_resnet18",
        "model_args": BODY["backbone_args"],
        "pretrained_cfg": {
            "input_size": [3, 32, 32],
            "crop_pct": 1.0,
            "interpolation": "bicubic",
            **STATISTICS,
        },
    },
    "segment": {
        "architecture": "fpn",
        "model_args": {**BODY, "head_args": {"dim": 8, "width": 8}},
        "preprocess": {"size": [32, 32], "keep_ratio": True, "longest": None, **STATISTICS},
    },
    "detect": {
        "architecture": "retinanet",
        "model_args": {**BODY, "width": 8, "short": 32, "long": 64},
    },
}
TASKS = list(CONFIGS)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint of every task, in a folder of its name."""
    root = tmp_path_factory.mktemp("valid")
    for name, own in CONFIGS.items():
        config = {"task": name, "num_classes": 3, "label_names": ["a", "b", "c"], **own}
        model, _, _ = get_task(name).build(config)
        (root / name).mkdir()
        write_config(root / name / "config.json", config)
        write_weights(root / name / "model.safetensors", contiguous_weights(model))
    return root


@pytest.fixture
def folder(valid: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the checkpoint of the task that is this fixture's parameter."""
    return Path(shutil.copytree(valid / getattr(request, "param", "classify"), tmp_path / "run"))


def set_entry(folder: Path, place: str, value: Any) -> None:
    """Change one entry of config.json, such as ``model_args.width``."""
    config = json.loads((folder / "config.json").read_text())
    if place == "num_classes":
        del config["label_names"]  # the number is what is wrong
    *parents, name = place.split(".")
    entry = config
    for parent in parents:
        entry = entry.setdefault(parent, {})
    entry[name] = value
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


@pytest.mark.parametrize("folder", TASKS, indirect=True)
def test_the_unchanged_checkpoint_loads(folder: Path) -> None:
    assert load(folder).classes == ["a", "b", "c"]


# Malformed entries.

LONG = "a" * 10_000
DEEP: dict[str, Any] = {}
for _ in range(100):
    DEEP = {"a": DEEP}

EVERY_TASK: list[tuple[str, Any]] = [
    *(("task", value) for value in (3, None, ["classify"], {}, LONG, "../classify")),
    *(("architecture", value) for value in (3, None, "", "../x", LONG, "vt_resnet18.no_such_tag")),
    *(("architecture", name) for name in ("hf-hub:timm/resnet18", "local-dir:.", "https://example.com/x")),
    *(("num_classes", value) for value in ("3", True, 3.0, None, -1, 0, 200_000, [3])),
    *(("label_names", value) for value in (None, 3, "abc", [1.5, 2, 3], [["a"], "b", "c"], [None] * 3)),
    *(("label_names", value) for value in ([LONG, "b", "c"], ["a"] * 10**5, {"0": ["a"]})),
    *(("model_args", value) for value in (None, 3, "width", [["width", 8]])),
    *(("model_args." + name, 1) for name in ("wings", "a b", "", LONG)),
    ("deep", DEEP),
]
STATISTIC_VALUES = (None, 1, "abc", [0.5, 0.5], [0.5, "0.5", 0.5], [0.5, None, 0.5], [0.5, 10**300, 0.5])
STATISTIC_VALUES += ([0.5, True, 0.5], {"a": 1, "b": 1, "c": 1})
SIZE_VALUES = (
    None,
    32,
    "abc",
    [32],
    [3, 0, 32],
    [3, -32, 32],
    [3, 32.5, 32],
    [3, 10**9, 10**9],
    [3, "32", 32],
)
CLASSIFY: list[tuple[str, Any]] = [
    ("pretrained_cfg", None),
    ("pretrained_cfg", [1]),
    *(("pretrained_cfg.mean", value) for value in STATISTIC_VALUES),
    *(("pretrained_cfg.std", value) for value in (*STATISTIC_VALUES, [0, 1, 1], [1, -1, 1], [1e-50, 1, 1])),
    *(("pretrained_cfg.input_size", value) for value in (*SIZE_VALUES, [1, 32, 32])),
    *(("pretrained_cfg.crop_pct", value) for value in ("1", -1, 2, [1], True)),
    *(("pretrained_cfg.interpolation", value) for value in (3, ["bicubic"], "a/b")),
    *(("model_args.width", value) for value in ("wide", -1, 0, [1], {}, 10**9)),
    *(("model_args.tokens", value) for value in ("many", -1, 2.5, [4], 10**9)),
    ("model_args.depths", [2, 2, 2, 10**9]),
    ("model_args.depths", []),
    ("model_args.tokenizer", "filtre"),
    ("model_args.global_pool", ["avg"]),
]
SEGMENT: list[tuple[str, Any]] = [
    ("preprocess", None),
    ("preprocess", {}),
    *(("preprocess.mean", value) for value in STATISTIC_VALUES),
    *(("preprocess.std", value) for value in (*STATISTIC_VALUES, [0, 1, 1], [1e-50, 1, 1])),
    *(("preprocess.size", value[1:] if isinstance(value, list) else value) for value in SIZE_VALUES),
    *(("preprocess.keep_ratio", value) for value in (None, 1, "yes")),
    *(("preprocess.longest", value) for value in ("x", 1, 64.5, 10**9)),
    *(("label_colors", value) for value in (None, 3, "abc", [], [[1, 2, 3]] * 4, [1, 2, 3], ["#fff"] * 3)),
    *(("label_colors", [[0, 0, 0], colour, [9, 9, 9]]) for colour in ([1, 2], [1, 2, 256], [1, 2, -1])),
    *(("label_colors", [[0, 0, 0], colour, [9, 9, 9]]) for colour in ([1, 2.5, 3], [1, True, 3], None, {})),
    *(("model_args.head_args", value) for value in (3, "x", {"dim": "x"}, {"dim": -1}, {"dim": 10**9})),
]
DETECT: list[tuple[str, Any]] = [
    *(("model_args.short", value) for value in ("x", None, 0, 10**9, [32])),
    *(("model_args.width", value) for value in ("x", None, 0, 2.5, [8], 10**9)),
]
BACKBONE: list[tuple[str, Any]] = [
    *(("model_args.backbone", value) for value in (3, None, "", "no_such_model", ["resnet18"], LONG)),
    *(("model_args.backbone", name) for name in ("hf-hub:timm/resnet18", "vt_resnet18.no_such_tag")),
    *(("model_args.backbone_args", value) for value in (3, "x", {"width": "x"}, {"wings": 1})),
    *(("model_args.out_indices", value) for value in ("x", 3, [99], [-99], [0.5], [])),
]
MALFORMED = [
    *((task, *entry) for task in TASKS for entry in EVERY_TASK),
    *(("classify", *entry) for entry in CLASSIFY),
    *(("segment", *entry) for entry in [*SEGMENT, *BACKBONE]),
    *(("detect", *entry) for entry in [*DETECT, *BACKBONE]),
]


@pytest.mark.parametrize(
    ("folder", "place", "value"),
    MALFORMED,
    ids=[f"{task}-{place[:40]}={value!s:.30}" for task, place, value in MALFORMED],
    indirect=["folder"],
)
def test_malformed_entry_is_one_line(folder: Path, place: str, value: Any) -> None:
    set_entry(folder, place, value)
    assert "config.json" in refusal(folder)


VALID = json.dumps({"architecture": "vt_resnet18", "num_classes": 3})
TEXTS: dict[str, bytes] = {
    "empty": b"",
    "truncated": VALID[:-1].encode(),
    "list": b"[1]",
    "string": b'"vt_resnet18"',
    "null": b"null",
    "not UTF-8": VALID.replace("vt", "vü").encode("latin-1"),
    "UTF-16": VALID.encode("utf-16"),
    "byte order mark": VALID.encode("utf-8-sig"),
    "zero bytes": b"\0" * 100,
    "deeply nested list": b'{"a": ' + b"[" * 10**6,
    "deeply nested object": b'{"a": ' * 10**6,
    "NaN": VALID.replace("3", "NaN").encode(),
    "infinity": VALID.replace("3", "Infinity").encode(),
    "overflow": VALID.replace("3", "1e999").encode(),
    "5000 digits": VALID.replace("3", "3" * 5000).encode(),
    "a name twice": VALID.replace("}", ', "num_classes": 3}').encode(),
    "too large": b" " * (16 * 2**20) + VALID.encode(),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_malformed_file_is_one_line(folder: Path, kind: str) -> None:
    (folder / "config.json").write_bytes(TEXTS[kind])
    assert "config.json" in refusal(folder)


def test_a_config_of_a_gigabyte_is_not_read(folder: Path) -> None:
    os.truncate(folder / "config.json", 2**30)
    assert "config.json is larger than 16 MB" in refusal(folder)


def test_the_command_line_prints_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_entry(folder, "pretrained_cfg.std", [0, 1, 1])
    assert main(["eval", "--checkpoint", str(folder), "--data", "digits"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(
        f"error: {folder / 'config.json'}: pretrained_cfg.std=[0, 1, 1] must be from"
    )
    assert printed.err.count("\n") == 1


# What a checkpoint may not pass to a constructor.


class TouchesFile:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """A .pth file that creates ``unpickled`` in the same folder when its code is run."""
    torch.save({"weight": torch.zeros(1), "code": TouchesFile(tmp_path / "unpickled")}, tmp_path / "w.pth")
    return tmp_path / "w.pth"


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The addresses that were connected to or looked up."""
    tried: list[Any] = []

    def refuse(*address: Any, **_: Any) -> None:
        tried.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


FETCHING = (
    *("init_from", "checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"),
    *("pretrained_strict", "pretrained_filter_fn", "model_cfg", "feature_cfg", "kwargs_filter", "model_name"),
    *("features_only", "feature_cls", "device", "dtype", "file", "url", "hf_hub_id", "weights_path"),
)


@pytest.mark.parametrize(
    ("folder", "place"),
    [
        *(("classify", f"model_args.{name}") for name in FETCHING),
        *((task, f"model_args.{name}") for task in ("segment", "detect") for name in FETCHING[:3]),
        *((task, f"model_args.backbone_args.{name}") for task in ("segment", "detect") for name in FETCHING),
        *(("segment", f"model_args.head_args.{name}") for name in FETCHING[:3]),
        *(("classify", f"model_args.options.{name}") for name in FETCHING[:3]),
    ],
    indirect=["folder"],
)
def test_a_checkpoint_cannot_name_other_weights(
    folder: Path, place: str, pickled: Path, connections: list[Any]
) -> None:
    *_, parent, name = place.split(".")
    for value in (str(pickled), "resnet18", {"file": str(pickled), "url": "http://localhost/weights"}):
        set_entry(folder, place, value)
        message = refusal(folder)
        assert f"{folder / 'config.json'}: " in message
        assert f"{parent} may not hold {name!r}" in message or place in message
    assert not (pickled.parent / "unpickled").exists()
    assert connections == []


@pytest.mark.parametrize(
    "value",
    ["w.pth", "/etc/passwd", "..", "C:\\w", "http://a", "timm/resnet18", "hf-hub:a", ["w.pth"], {"a": "/b"}],
)
def test_a_string_is_a_plain_word(folder: Path, value: Any) -> None:
    set_entry(folder, "model_args.tokenizer", value)
    assert "model_args.tokenizer" in refusal(folder)
    assert "is not a plain word" in refusal(folder)


def test_initial_weights_are_not_saved_wherever_they_are_nested() -> None:
    model_args = {
        "pretrained": True,
        "backbone": "vt_resnet18",
        "backbone_args": {"init_from": "a.pth", "width": 1},
    }
    described = get_task("segment").describe("fpn", classes=["a", "b"], model_args=model_args)
    assert described["model_args"] == {"backbone": "vt_resnet18", "backbone_args": {"width": 1}}


def test_a_run_that_could_not_be_loaded_does_not_start(
    digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "_factories", dict(tokenizers._factories))
    register_tokenizer("my/tokenizer", tokenizers._factories["filter"])
    args = CONFIGS["classify"]["model_args"] | {"tokenizer": "my/tokenizer"}
    options = TrainConfig(model="vt_resnet18", model_args=args, data=digits, out=str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"model_args.tokenizer='my/tokenizer' is not a plain word"):
        open_training(options)


def test_a_model_much_larger_than_its_weights_is_not_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("visualtokens.tasks.schema.SPARE_VALUES", 10**6)
    load(folder)
    set_entry(folder, "model_args.width", 2)
    assert "its model is much larger than its weights" in refusal(folder)


# Weights.


@pytest.mark.parametrize("folder", TASKS, indirect=True)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(folder: Path, value: float) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("running_var"))
    weights[name][1] = value
    save_file(weights, file)
    assert f"model.safetensors: {name!r} is not finite" in refusal(folder)


def test_weights_of_other_types_are_converted(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file(
        {n: w.double() if w.is_floating_point() else w.to(torch.int32) for n, w in weights.items()}, file
    )
    load(folder)
    save_file({n: w.double() + 1e300 if "running_var" in n else w for n, w in weights.items()}, file)
    assert "is not finite" in refusal(folder)  # as float32
