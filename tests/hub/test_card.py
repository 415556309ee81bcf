"""Model cards: a header that the Hub accepts, and nothing from files that becomes markup."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from tests.hub.conftest import CLASSES
from visualtokens.checkpoint import load
from visualtokens.errors import UserError
from visualtokens.hub.card import (
    Figures,
    Picture,
    Pictures,
    check_repository,
    escaped,
    is_ours,
    model_card,
    public,
    public_value,
)
from visualtokens.tasks import Checkpoint

FIGURES = Figures(2, 3, {"accuracy": 0.875, "loss": 0.75})


@pytest.fixture
def checkpoint(run: Path) -> Checkpoint:
    return load(run)


def test_header_is_what_the_hub_reads(checkpoint: Checkpoint) -> None:
    text = model_card(checkpoint, repository="me/pets", license="mit", figures=FIGURES)
    header = ModelCard(text).data.to_dict()
    assert {name: header[name] for name in ("license", "library_name", "pipeline_tag")} == {
        "license": "mit",
        "library_name": "timm",
        "pipeline_tag": "image-classification",
    }
    assert header["tags"] == ["image-classification", "timm", "transformers", "visualtokens"]
    (entry,) = header["model-index"]
    (result,) = entry["results"]
    assert (entry["name"], result["dataset"]["name"]) == ("pets", "folder:photos")
    assert result["metrics"] == [{"type": "accuracy", "value": 0.875}]


def test_datasets_of_the_hub_are_named(checkpoint: Checkpoint) -> None:
    training = checkpoint.config["training"] | {"data": "hfds:someone/pets"}
    run = replace(checkpoint, config=checkpoint.config | {"training": training})
    assert ModelCard(model_card(run, repository="me/pets")).data.datasets == ["someone/pets"]


def test_sections(checkpoint: Checkpoint) -> None:
    pictures = Pictures(Picture("curves.png", "Loss"), [Picture("example_1.png", "98% cat")])
    text = model_card(checkpoint, repository="me/pets", license="mit", figures=FIGURES, pictures=pictures)
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert titles == ["Results", "Examples", "Use", "Training", "Classes", "Licence"]
    assert (
        "after epoch 2 of 3:\n\n| metric | value |\n|---|--:|\n| accuracy | 87.5 % |\n| loss | 0.750 |"
        in text
    )
    assert "![98% cat](example_1.png)" in text
    assert 'visualtokens.load("hf-hub:me/pets")' in text
    assert 'AutoModelForImageClassification.from_pretrained("me/pets")' in text
    recipe = text.partition("```sh\nvtok train \\\n")[2].partition("\n```")[0]
    assert recipe.replace(" \\\n", "").split() == [
        *("--model", "paca_vit_nano", "--data", "folder:photos", "--init", "first"),
        *("--epochs", "3", "--lr", "0.002", "--out", "run"),
    ]
    assert "alice" not in text


def test_checkpoint_without_run(checkpoint: Checkpoint) -> None:
    run = replace(checkpoint, config={"architecture": "paca_vit_nano"})
    text = model_card(run, repository="me/pets")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Use", "Classes", "Licence"]
    assert "license" not in ModelCard(text).data.to_dict()
    assert "The author has stated none." in text


def test_names_cannot_become_markup(checkpoint: Checkpoint) -> None:
    evil = "![x](https://evil) <script>\n---\nlicense: mit\n# `title` | cell\x1b[2J"
    training = checkpoint.config["training"] | {"data": f"folder:{evil}", "init": f"a/{evil}```"}
    run = replace(checkpoint, classes=[evil, "b", "c"], config=checkpoint.config | {"training": training})
    text = model_card(run, repository="me/x", figures=FIGURES)
    body = text.split("\n---\n", 1)[1]
    prose = re.sub(r"^(````*)\w*\n.*?^\1$", "", body, flags=re.DOTALL | re.MULTILINE)
    assert "<script>" not in prose
    assert "![" not in prose
    assert "\x1b" not in text
    assert re.findall(r"^#+ .*$", body, re.MULTILINE)[1:2] == ["## Results"]
    assert ModelCard(text).data.license is None


def test_escaped_text_is_shown_as_it_is() -> None:
    import html

    for name in (*CLASSES, "a*b*", "[link](x)", "a\\b", "$x$"):
        assert html.unescape(escaped(name)) == name
        assert not re.search(r"[\\`*_\[\]()|<>~!$]", escaped(name))


def test_many_classes_are_folded(checkpoint: Checkpoint) -> None:
    run = replace(checkpoint, classes=[f"class {i}" for i in range(100)])
    assert "<details><summary>100 classes</summary>\n\nclass 0, class 1" in model_card(run, repository="me/x")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("folder:/home/alice/photos/", "folder:photos"),
        ("digits", "digits"),
        ("hfds:org/name", "hfds:org/name"),
        ("hf-hub:org/name", "hf-hub:org/name"),
        ("/home/alice/run", "run"),
        ("csv:lists\\train.csv", "csv:train.csv"),
    ],
)
def test_folders_are_left_out(given: str, shown: str) -> None:
    assert public(given) == shown


def test_nested_values_are_public() -> None:
    value = {"colours": "/home/alice/colours.txt", "reduction": ["deit_small/3", 4], "pool": "avg"}
    assert public_value(value) == {"colours": "colours.txt", "reduction": ["deit_small/3", 4], "pool": "avg"}


def test_only_our_models_need_the_import() -> None:
    assert is_ours("paca_vit_nano")
    assert is_ours("reduced_vit")
    assert is_ours("mask_rcnn")
    assert not is_ours("resnet18.a1_in1k")


@pytest.mark.parametrize("name", ["a/b/c", "a b", "a/b--c", "../x", "x.git", "", "a/", "-a/b", "a" * 97])
def test_names_of_repositories(name: str) -> None:
    with pytest.raises(UserError, match="is not the name of a repository; give ORGANIZATION/NAME"):
        check_repository(name)
    assert check_repository("hf-hub:me/my_model-1.5") == "me/my_model-1.5"


def test_unknown_license(checkpoint: Checkpoint) -> None:
    with pytest.raises(UserError, match=r"unknown license 'apache'; did you mean 'apache-2.0'"):
        model_card(checkpoint, repository="me/x", license="apache")
