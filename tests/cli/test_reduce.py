"""``vtok reduce``: the table, the budgets, the search."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import yaml  # type: ignore[import-untyped]
from PIL import Image
from safetensors.torch import save

from visualtokens.bench import interleave
from visualtokens.cli.parse import RECIPES, parse
from visualtokens.cli.reduce import VERB, parse_keep
from visualtokens.errors import UserError
from visualtokens.reduce import reduce
from visualtokens.train import TrainConfig, load_checkpoint, train
from visualtokens.tune import planning as measure

Vtok = Callable[..., tuple[int, str, str]]
POOLING = sorted(RECIPES.glob("token_pooling_*.yaml"))
QUICK = ("--rounds", "1", "--batch", "2")


def _torch_file(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call per turn and no repeats: what is measured does not matter here."""
    monkeypatch.setattr(measure, "interleave", partial(interleave, min_seconds=0.0, retries=0))


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    """A vision transformer of 64 patches and 3 blocks, trained for one epoch."""
    out = tmp_path_factory.mktemp("vit") / "run"
    small = dict(patch_size=4, embed_dim=24, depth=3, num_heads=2)
    config = TrainConfig(
        model="deit_tiny_patch16_224", data=data, out=str(out), epochs=1, batch=32, size=32, model_args=small
    )
    train(config)
    return out


def test_table_shows_the_requested_schedule_first(vtok: Vtok, vit: Path, data: str, tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    options = ("--method", "merge", "--keep", "40,20,10", "--data", data, "--save", picture, *QUICK)
    code, text, _ = vtok("reduce", vit, *options)
    assert code == 0
    header = next(line for line in text.splitlines() if line.startswith("schedule"))
    assert header.split() == ["schedule", "tokens", "GMACs", "images/s", "peak", "MB", "speed", "accuracy"]
    assert "keep 40,20,10" in text
    assert "visualtokens.reduce(model, 'merge', keep=[40, 20, 10])" in text
    assert Image.open(picture).size[0] > 500


def test_clustering_as_published(vtok: Vtok, vit: Path, tmp_path: Path) -> None:
    """The start and the updates of the paper are those of the saved model, and of the call that is shown."""
    out = tmp_path / "reduced"
    options = ("--method", "kmedoids", "--keep", "40,20,10", "--as_published", "--out", out, *QUICK)
    code, text, _ = vtok("reduce", vit, *options)
    assert code == 0
    assert "keep=[40, 20, 10], init='significance', iterations=3)" in text
    model = load_checkpoint(out).model
    assert (model.reduction.init, model.reduction.iterations) == ("significance", 3)
    assert {(b.reduction.pool.init, b.reduction.pool.iterations) for b in model.blocks} == {
        ("significance", 3)
    }


def test_json_contains_the_plan(vtok: Vtok, vit: Path) -> None:
    code, text, _ = vtok("reduce", vit, "--method", "power_bert", "--macs", "0.5", "--json", *QUICK)
    document = json.loads(text)
    full, chosen = document["tradeoff"]["rows"][:2]
    assert code == 0
    assert document["keep"] == chosen["keep"] == document["plan"]["keep"]
    assert document["plan"]["macs"] == chosen["macs"] <= 0.5 * full["macs"]
    assert document["tradeoff"]["quality"] is None


def test_timm_model_reports_random_weights(vtok: Vtok) -> None:
    options = ("--size", "32", "--method", "random", "--keep", "0.5", *QUICK)
    code, text, _ = vtok("reduce", "deit_tiny_patch16_224", *options)
    assert code == 0
    assert "The weights are random" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--keep", "0.5", "--speedup", "2"), "--keep and --speedup exclude each other"),
        (("--method", "kmedoid"), "unknown method 'kmedoid'; did you mean 'kmedoids'?"),
        (("--keep", "many"), "keep='many' is not valid"),
        (("--macs", "10"), "macs=10 is out of reach"),
        (("--search",), "--search needs --lambda"),
        (
            ("--init", "random"),
            "--init has no effect with --method weighted_merge; leave it out, or use kmeans",
        ),
        (("--as_published",), "--as_published has no effect with --method weighted_merge"),
        (
            ("--method", "kmeans", "--iterations", "1", "--as_published"),
            "--as_published and --iterations exclude each other",
        ),
        (("--weights", "x.safetensors"), "has weights of its own"),
    ],
)
def test_wrong_options_are_refused(vtok: Vtok, vit: Path, options: tuple[str, ...], message: str) -> None:
    code, text, err = vtok("reduce", vit, *options)
    assert (code, text) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.pth", None, "is not a file; give a .safetensors or .pth file, or pretrained"),
        (".", None, "is not a file; give a .safetensors or .pth file, or pretrained"),
        ("cut.safetensors", save({"x": torch.zeros(9)})[:-8], "cut.safetensors is damaged: "),
        ("text.safetensors", b"no tensors", "text.safetensors is damaged: "),
        ("text.pth", b"no tensors", "text.pth holds more than tensors"),
        ("empty.pth", b"", "empty.pth is damaged:"),
        ("objects.pth", pickle.dumps(Path("x")), "objects.pth holds more than tensors"),
        ("list.pth", _torch_file([1, 2]), "list.pth holds a list; give a file of a state dict"),
        ("numbers.pth", _torch_file({"x": 1}), "no tensors in the checkpoint, only 'x'"),
        ("cut.pth", _torch_file({"x": torch.zeros(999)})[:-900], "cut.pth is damaged: "),
        ("other.pth", _torch_file({"x": torch.zeros(9)}), "does not fit 'deit_tiny_patch16_224'"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_unusable_weights_are_refused(
    vtok: Vtok, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    options = ("--weights", tmp_path / name, "--size", "32")
    code, text, err = vtok("reduce", "deit_tiny_patch16_224", *options)
    assert (code, text) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_curve_is_not_saved_over_an_image_of_the_data(vtok: Vtok, vit: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        for label in "ab":
            (tmp_path / split / label).mkdir(parents=True)
            Image.new("RGB", (32, 32)).save(tmp_path / split / label / "x.png")
    (tmp_path / "curve.png").symlink_to(tmp_path / "val" / "b" / "x.png")
    options = ("--data", f"folder:{tmp_path}", "--save", tmp_path / "curve.png")
    code, text, err = vtok("reduce", vit, *options, *QUICK)
    assert (code, text) == (2, "")
    assert f"would overwrite the input '{tmp_path / 'val' / 'b' / 'x.png'}'; save elsewhere\n" in err


def test_search_saves_a_reduced_checkpoint(vtok: Vtok, vit: Path, data: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "search: true\nlambda: 0.02\nmethod: merge\nsearch_epochs: 2\nepochs: 1\n"
        "train: {batch: 16, lr: 0.002, augment: none}\n"
    )
    out = tmp_path / "pooled"
    code, text, err = vtok("reduce", vit, "--config", recipe, "--data", data, "--out", out, "--json")
    document = json.loads(text)
    assert code == 0
    stages = [line for line in err.splitlines() if not line.startswith(("epoch", "init:"))]
    assert stages[0].startswith("soft extraction at lambda 0.02")
    assert stages[1].startswith(f"fine-tuning with merge at {document['keep']} tokens")
    model = load_checkpoint(document["out"]).model
    assert list(model.reduction.schedule.tokens(64)) == document["keep"]
    assert document["macs"] < document["full_macs"]
    code, text, _ = vtok("eval", "--checkpoint", out / "merge", "--data", data)
    assert code == 0
    assert f"accuracy {document['accuracy']:.1%}" in text


@pytest.mark.parametrize("path", POOLING, ids=lambda path: path.stem)
def test_recipe_parses_with_its_training_options(path: Path) -> None:
    config, _ = parse("reduce", "", VERB, ["run", "--config", str(path)])
    for key, value in yaml.safe_load(path.read_text()).items():
        assert getattr(config, {"lambda": "lambda_"}.get(key, key)) == value, key
    TrainConfig(
        model="deit_small_patch16_224", data="digits", out="run", epochs=config.epochs, **config.train
    )


def test_keep_as_typed() -> None:
    assert parse_keep("0.5") == 0.5
    assert parse_keep("-13") == -13
    assert parse_keep("deit_small/3") == "deit_small/3"
    assert parse_keep("196,150,0") == [196, 150, 0]
    with pytest.raises(UserError, match="is not valid"):
        parse_keep("a,b")


@pytest.mark.parametrize("method", ["weighted_kmedoids", "merge"])
def test_out_writes_a_checkpoint_of_the_reduced_model(
    vtok: Vtok, vit: Path, data: str, tmp_path: Path, method: str
) -> None:
    out = tmp_path / "reduced"
    options = ("--method", method, "--keep", "40,20,10", "--out", out, *QUICK)
    code, text, _ = vtok("reduce", vit, *options)
    assert code == 0
    assert text.splitlines()[-1] == f"saved in {out}; try: vtok predict photo.jpg --checkpoint {out}"

    expected, loaded = load_checkpoint(vit), load_checkpoint(out)
    reduce(expected.model, method, keep=[40, 20, 10])
    images = torch.randn(3, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(loaded.model(images), expected.model(images))
        by_timm = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
        assert torch.equal(by_timm(images), expected.model(images))
    assert (loaded.classes, loaded.preprocess) == (expected.classes, expected.preprocess)
    assert vtok("eval", "--checkpoint", out, "--data", data)[0] == 0


def test_out_of_a_named_model_has_the_classes_of_imagenet(vtok: Vtok, tmp_path: Path) -> None:
    out = tmp_path / "reduced"
    code, _, _ = vtok("reduce", "test_vit", "--keep", "0.5", "--out", out, *QUICK)
    assert code == 0
    classes = load_checkpoint(out).classes
    assert (len(classes), len(set(classes)), classes[0]) == (1000, 1000, "tench")


def test_out_needs_a_schedule_and_an_empty_folder(vtok: Vtok, vit: Path, tmp_path: Path) -> None:
    code, _, error = vtok("reduce", vit, "--out", tmp_path / "new", *QUICK)
    assert (code, "give --keep, --macs, --speedup or --latency" in error) == (2, True)
    (tmp_path / "mine.txt").write_text("not a checkpoint")
    code, _, error = vtok("reduce", vit, "--keep", "0.5", "--out", tmp_path, *QUICK)
    assert (code, "exists already" in error) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
