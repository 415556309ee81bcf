"""Parsing without jsonargparse: the same configurations, and one-line errors."""

from __future__ import annotations

import pytest

from visualtokens.cli import parse, plain
from visualtokens.cli.models import VERB as MODELS
from visualtokens.cli.predict import VERB as PREDICT
from visualtokens.errors import UserError


@pytest.mark.parametrize(
    "arguments",
    [
        ["a.jpg", "b.jpg", "--onnx", "m.onnx"],
        ["a.jpg", "--onnx", "m.onnx", "--top", "3", "--format", "csv", "--overwrite", "--json"],
        ["photos/", "--onnx=m.onnx", "--out", "r.jsonl", "--share", "2/8", "--batch", "4", "--workers", "2"],
        ["-", "--onnx", "m.onnx", "--scales", "0.5", "1", "--flip", "--pictures", "p"],
    ],
)
def test_configurations_are_the_same(arguments: list[str]) -> None:
    assert plain.parse("predict", "", PREDICT, arguments) == parse.parse("predict", "", PREDICT, arguments)


def test_another_verb() -> None:
    assert plain.parse("models", "", MODELS, ["paca"])[0].filter == "paca"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.jpg", "--onxx", "m"], "unrecognized arguments: --onxx m; --help lists the options"),
        (["a.jpg", "--onnx", "m", "--top", "x"], "argument --top: invalid int value: 'x'"),
        (["a.jpg", "--onnx", "m", "--format", "xml"], "argument --format: invalid choice: 'xml'"),
        (["--onnx", "m"], "the following arguments are required: images"),
        (["a.jpg"], "--checkpoint must be given, or --onnx"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        plain.parse("predict", "", PREDICT, arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
