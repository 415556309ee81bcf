"""Help, options, config files, and errors about them."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import visualtokens
from visualtokens.cli import train
from visualtokens.cli.app import VERBS
from visualtokens.cli.bench import BenchConfig, parse_size
from visualtokens.cli.parse import RECIPES, grouped_fields
from visualtokens.cli.verb import Result, Verb
from visualtokens.errors import UserError
from visualtokens.train.config import TrainConfig

Vtok = Callable[..., tuple[int, str, str]]


def test_usage_lists_the_verbs(vtok: Vtok) -> None:
    code, text, _ = vtok()
    assert code == 0
    assert vtok("--help")[1] == text
    for name, purpose in VERBS.items():
        assert f"{name} " in text
        assert purpose in text
    assert max(map(len, text.splitlines())) <= 100


def test_version(vtok: Vtok) -> None:
    assert vtok("--version") == (0, f"visualtokens {visualtokens.__version__}\n", "")


@pytest.mark.parametrize("verb", VERBS)
def test_help_describes_purpose_example_and_options(
    vtok: Vtok, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    code, text, err = vtok(verb, "--help")
    assert (code, err) == (0, "")
    assert VERBS[verb] in text
    assert f"example:\n  vtok {verb} " in text or f"example:\n  vtok {verb}\n" in text
    for option in ("--config", "--print_config", "--json"):
        assert option in text
    for group in sections(text).values():
        for entry in re.split(r"\n(?=  \S)", group.strip("\n")):
            assert len(entry.split(None, 1)) == 2, f"not described: {entry}"
    assert max(map(len, text.splitlines())) <= 100
    assert vtok("help", verb) == (0, text, "")


def sections(text: str) -> dict[str, str]:
    """The text under each title of a help text."""
    found = re.split(r"^([a-z][a-z, ]*):\n(?=  )", text.partition("example:\n")[2], flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


def test_help_of_train_is_in_groups(vtok: Vtok, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    text = vtok("help", "train")[1]
    assert text.startswith("usage: vtok train --model MODEL --data DATA --out OUT [options]\n\n")
    groups = {
        title: re.findall(r"^  (?:-h, )?--(\w+)", options, re.MULTILINE)
        for title, options in sections(text).items()
    }
    assert list(groups) == [
        "data",
        "model",
        "optimizer and schedule",
        "augmentation, loss and regularization",
        "hardware and speed",
        "output and logging",
        "general",
    ]
    assert [options[0] for options in groups.values()] == [
        *("data", "model", "epochs", "augment", "device", "out", "help"),
    ]
    assert groups["general"] == ["help", "json", "config", "print_config"]
    listed = [option for options in groups.values() for option in options]
    assert sorted(listed) == sorted([*TrainConfig.names(), *groups["general"]])


@pytest.mark.parametrize("verb", VERBS)
def test_groups_name_existing_options_once(verb: str) -> None:
    found = importlib.import_module(f"visualtokens.cli.{verb}").VERB
    names = [name for group in found.groups.values() for name in group]
    assert len(names) == len(set(names))
    assert set(names) <= {field.name for field in dataclasses.fields(found.config)}


def test_every_option_of_train_has_a_group() -> None:
    ungrouped = grouped_fields(train.VERB).get("other options", [])
    assert [field.name for field in ungrouped] == [], "add these to GROUPS in cli/train.py"


def test_options_without_a_group_come_last() -> None:
    verb = Verb(BenchConfig, lambda config: Result("", {}), "", groups={"speed": ("rounds", "batch")})
    found = {title: [field.name for field in fields] for title, fields in grouped_fields(verb).items()}
    assert found == {
        "speed": ["rounds", "batch"],
        "other options": ["models", "against", "size", "mode", "threads"],
    }


def test_help_of_an_unknown_verb(vtok: Vtok) -> None:
    assert vtok("help") == vtok("--help")
    assert vtok("help", "trian") == (2, "", "error: unknown verb 'trian'; did you mean 'train'?\n")


@pytest.mark.parametrize("verb", VERBS)
def test_example_of_every_verb_parses(vtok: Vtok, verb: str) -> None:
    example = shlex.split(importlib.import_module(f"visualtokens.cli.{verb}").VERB.example)
    code, text, err = vtok(*example[1:], "--print_config")
    assert (code, err) == (0, "")
    assert "json: false" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tain"], "unknown verb 'tain'; did you mean 'train'?"),
        (["--verson"], "unknown option '--verson'; did you mean '--version'?"),
        (["train", "--model", "x"], "--data and --out must be given; --help shows an example"),
        (["train", "--model"], "argument --model: expected one argument"),
        (["bench"], "MODEL must be given; --help shows an example"),
        (["bench", "a", "--batch", "many"], "--batch must be a whole number, not 'many'"),
        (["bench", "a", "--threads", "1.5"], "--threads must be a whole number, not '1.5'"),
        (["bench", "a", "--mode", "eagr"], "unknown --mode 'eagr'; did you mean 'eager'?"),
        (
            ["bench", "a", "--size", "12y"],
            "size '12y' is not an image size; give 224 or 1280x800 (height x width)",
        ),
        (["bench", "paca_vit_nan"], "unknown model 'paca_vit_nan'; did you mean 'paca_vit_nano'?"),
        (["models", "a", "b"], "unexpected argument 'b'; --help lists the options"),
        (["models", "--filtr=x"], "unknown option '--filtr'; did you mean"),
        (["papers", "paca-vti"], "unknown paper 'paca-vti'; did you mean 'paca-vit'?"),
        (["train", "--config"], "--config needs a YAML file"),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(vtok: Vtok, arguments: list[str], message: str) -> None:
    code, out, err = vtok(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


TRAIN = ("train", "--model", "paca_vit_nano", "--data", "digits", "--out", "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--lr", "fast"], "--lr must be a number, not 'fast'"),
        (["--lr", "-1"], "lr=-1.0 must be more than 0"),
        (["--model_args", "deep"], "--model_args must be a mapping, not 'deep'"),
        (["--model_args.wings", "2"], "model 'paca_vit_nano' refuses model_args={'wings': 2}"),
        (["--overwrite", "--resume"], "overwrite and resume exclude each other"),
        (["--augment", "foto"], "unknown augmentation 'foto'; did you mean 'photo'?"),
        (["--resume"], "nothing to resume: 'run' holds no run"),
        (["--resume", "atuo"], "--resume must be true or false or 'auto', not 'atuo'"),
        (["--drop_path", "much"], "--drop_path must be a number or a mapping, not 'much'"),
        (["--optimizer_args.momentm", "0.9"], "unknown argument of adamw in optimizer_args: 'momentm'"),
        (["--mixup", "0.8", "--teachr", "x"], "unknown option '--teachr'; did you mean '--teacher'?"),
        (["--freeze", "stem"], "--freeze must be a whole number or 'backbone', not 'stem'"),
        (["--freeze", "2"], "freeze=2 would keep random weights; give --pretrained or --init as well"),
        (["--init", "nowhere", "--probe"], "init: 'nowhere' does not exist; give a checkpoint folder with"),
        (
            ["--pretrained"],
            "pretrained: the weights of 'paca_vit_nano' do not exist in timm; give others: --init",
        ),
        (["--decay_rate", "0.5"], "decay_rate=0.5 has no effect with schedule=cosine; leave it out or give"),
    ],
)
def test_mistakes_in_training_options(
    vtok: Vtok,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    changes: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = vtok(*TRAIN, *changes)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# 30 lines that stand for 2^30 values.
BOMB = b"model_args:\n  a0: &a0 [1, 1]\n" + b"".join(
    b"  a%d: &a%d [*a%d, *a%d]\n" % (i, i, i - 1, i - 1) for i in range(1, 30)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read config file '{path}': No such file or directory"),
        (b"\xff\xfe\x00", "config file '{path}' is not text; it must be YAML"),
        (b"lr: [1", "config file '{path}' is not YAML: "),
        (b"lr: \x07", "config file '{path}' is not YAML: "),
        (b"just words", "config file '{path}' must hold lines such as 'epochs: 10'"),
        (b"", "config file '{path}' must hold lines such as 'epochs: 10'"),
        (b"learning: 3", "unknown option in {path}: 'learning'"),
        (b"lr: fast", "--lr must be a number, not 'fast'"),
        (b"lr: 2024-99-99", "config file '{path}' holds a value that is not YAML: month must be in 1..12"),
        (b"lr: !!bool x", "config file '{path}' holds a value that is not YAML: "),
        (BOMB, "config file '{path}' has more than 100,000 values with its aliases expanded"),
        (b"lr: &x [*x]", "config file '{path}' has more than 100,000 values with its aliases expanded"),
        (b"lr: " + b"[" * 100_000, "config file '{path}' is nested too deeply"),
        (b"lr: " + b"1" * 1_000_000, "config file '{path}' has 1.0 MB; at most 1 MB are read"),
    ],
    ids=range(14),
)
def test_unusable_config_files(vtok: Vtok, tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    code, out, err = vtok(*TRAIN, "--config", path)
    assert (code, out) == (2, "")
    assert err.startswith("error: " + message.format(path=path))
    assert err.count("\n") == 1


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_config_that_is_no_regular_file(vtok: Vtok, tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x")
    code, out, err = vtok(*TRAIN, "--config", tmp_path / "x")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: config file '{tmp_path / 'x'}' is not a regular file")


def test_recipe_by_name(vtok: Vtok, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deit").mkdir()  # such as the folder of a run
    code, text, _ = vtok(*TRAIN, "--config", "deit", "--lr", "0.25", "--print_config")
    printed = yaml.safe_load(text)
    assert (code, printed["lr"], printed["mixup"], printed["epochs"]) == (0, 0.25, 0.8, 300)
    (tmp_path / "vt_default").write_text("epochs: 7")  # a file of the user comes first
    assert yaml.safe_load(vtok(*TRAIN, "--config", "vt_default", "--print_config")[1])["epochs"] == 7


@pytest.mark.parametrize(
    ("verb", "given", "message"),
    [
        ("train", "diet", "--config 'diet' is neither a file nor a recipe; the recipes of vtok train are "),
        ("train", "token_pooling_cifar10", "--config 'token_pooling_cifar10' is neither a file nor a recipe"),
        ("train", "x/deit.yaml", "config file 'x/deit.yaml' does not exist; --config deit is the recipe of"),
        ("reduce", "diet", "--config 'diet' is neither a file nor a recipe; the recipes of vtok reduce are "),
        ("bench", "diet", "cannot read config file 'diet': No such file or directory"),
    ],
)
def test_unknown_recipes(vtok: Vtok, verb: str, given: str, message: str) -> None:
    code, out, err = vtok(verb, "--config", given)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_every_recipe_belongs_to_one_verb(vtok: Vtok) -> None:
    """The verb of the command in its first lines, whose help and error list it."""
    found = {}
    for verb in ("train", "reduce"):
        _, text, _ = vtok(verb, "--help")
        listed = "".join(text.partition("Recipes:")[2].partition(".")[0].split()).split(",")
        assert vtok(verb, "--config", "diet")[2].strip().endswith(", ".join(listed))
        found |= dict.fromkeys(listed, verb)
    assert found == {
        path.stem: "reduce" if "vtok reduce" in path.read_text() else "train"
        for path in RECIPES.glob("*.yaml")
    }
    assert "Recipes" not in vtok("bench", "--help")[1]


def test_aliases_in_a_config_file(vtok: Vtok, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("lr: &value 0.5\nweight_decay: *value\n")
    printed = yaml.safe_load(vtok(*TRAIN, "--config", tmp_path / "x.yaml", "--print_config")[1])
    assert (printed["lr"], printed["weight_decay"]) == (0.5, 0.5)


def test_command_line_overrides_the_config_file(vtok: Vtok, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("lr: 0.5\nepochs: 7\nbf16: true\nmodel_args: {drop_path_rate: 0.1}\n")
    for order in ([f"--config={path}", "--lr", "0.25"], ["--lr", "0.25", "--config", str(path)]):
        code, text, _ = vtok(*TRAIN, *order, "--print_config")
        assert code == 0
        printed = yaml.safe_load(text)
        assert (printed["lr"], printed["epochs"], printed["bf16"]) == (0.25, 7, True)
        assert printed["model_args"] == {"drop_path_rate": 0.1}


def test_printed_config_parses_to_itself(vtok: Vtok, tmp_path: Path) -> None:
    for arguments in (
        (*TRAIN, "--size", "40", "--bf16"),
        (*TRAIN, "--resume", "auto", "--log", "wandb", "trackio", "--drop_path", '{"paca*": 0.1}'),
        (*TRAIN, "--init", "x", "--freeze", "backbone"),
        (*TRAIN, "--pretrained", "--freeze", "3"),
        (*TRAIN, "--resume", "--drop_path", "0.1", "--optimizer_args.betas", "[0.9, 0.95]"),
        ("bench", "a", "b", "--against", "c", "--size", "32x64"),
    ):
        printed = vtok(*arguments, "--print_config")[1]
        (tmp_path / "printed.yaml").write_text(printed)
        again = vtok(arguments[0], "--config", tmp_path / "printed.yaml", "--print_config")
        assert again == (0, printed, "")


@pytest.mark.parametrize(
    ("given", "size"), [(224, (224, 224)), ("96", (96, 96)), ("1280x800", (1280, 800)), ("32×64", (32, 64))]
)
def test_sizes_are_height_by_width(given: int | str, size: tuple[int, int]) -> None:
    assert parse_size(given) == size


@pytest.mark.parametrize("given", ["", "0", "0x3", "-1", "3x", "3x4x5", "1.5"])
def test_invalid_sizes(given: str) -> None:
    with pytest.raises(UserError, match="is not an image size"):
        parse_size(given)
