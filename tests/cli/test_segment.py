"""``vtok eval`` and ``vtok predict`` with a segmentation checkpoint."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import ModelCard
from PIL import Image

from visualtokens.checkpoint import load
from visualtokens.data.decode import read_mask
from visualtokens.errors import UserError
from visualtokens.tasks import get_task
from visualtokens.train import TrainConfig, load_checkpoint, train

from .processes import files_limited_to

Vtok = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    (root / "classes.txt").write_text("dark\nbright\nnever seen\n")
    rng = np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 3)):
        for folder in ("images", "masks"):
            (root / folder / split).mkdir(parents=True)
        for i in range(count):
            mask = np.zeros((36, 50), np.uint8)
            mask[:, : rng.integers(10, 40)] = 1
            Image.fromarray(np.stack([40 + 170 * mask] * 3, axis=2)).save(root / f"images/{split}/{i}.png")
            Image.fromarray(mask).save(root / f"masks/{split}/{i}.png")
    return root


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("run"))
    head = dict(dim=8, width=8, token_dim=8, attn_dim=4, hidden=8)
    config = TrainConfig(
        task="segment",
        model="vt_fpn",
        model_args=dict(backbone="resnet18", backbone_args=dict(channels=[8, 8, 8, 8]), head_args=head),
        data=f"masks:{data}",
        out=out,
        epochs=12,
        size=32,
        batch=4,
        lr=1e-2,
        label_smoothing=0.0,
        overwrite=True,
    )
    train(config, progress=False)
    return out


def test_eval(vtok: Vtok, run: str, data: Path) -> None:
    given = ("eval", "--checkpoint", run, "--data", f"masks:{data}", "--device", "cpu")
    code, text, err = vtok(*given)
    assert (code, err) == (0, "")
    assert text.splitlines()[0].startswith("mIoU ")
    assert "never seen" not in text  # neither in the truth nor predicted, or it would count
    document = json.loads(vtok(*given, "--json")[1])
    assert document["miou"] > 0.8
    assert document["iou"][2] is None
    assert np.sum(document["confusion"]) == 3 * 36 * 50
    views = ("--scales", "0.5", "1.0", "--flip", "--window", "24")
    more = json.loads(vtok(*given, *views, "--json")[1])
    assert more["miou"] > 0.7
    assert more["loss"] != document["loss"]


def test_predict_writes_overlay_and_indices(vtok: Vtok, run: str, data: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    Image.new("RGB", (1, 1), "white").save(tmp_path / "0.png")
    images = [str(data / "images/val/0.png"), str(tmp_path / "0.png"), str(tmp_path / "broken.png")]
    given = ("predict", *images, "--checkpoint", run, "--out", tmp_path / "out", "--device", "cpu")
    code, text, err = vtok(*given)
    assert code == 1
    assert images[2] in err
    document = json.loads(vtok(*given, "--json")[1])
    first, second = document["predictions"]
    assert [Path(first[k]).name for k in ("overlay", "classes")] == ["0_overlay.png", "0_classes.png"]
    assert first["overlay"] in text
    assert Path(second["classes"]).name == "0_2_classes.png"
    predicted, truth = read_mask(first["classes"]), read_mask(data / "masks/val/0.png")
    assert (predicted == truth).mean() > 0.85
    assert read_mask(second["classes"]).shape == (1, 1)
    assert sum(first["shares"].values()) == pytest.approx(1)
    assert document["unreadable"][0]["path"] == images[2]


def test_predict_saves_tables_and_draws_on_request(
    vtok: Vtok, run: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ("predict", data / "images/val", "--checkpoint", run, "--device", "cpu")
    assert vtok(*given, "--out", "r.csv")[:2] == (0, "3 images saved as r.csv\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.csv", "r.csv.run.json"]
    header, *rows = list(csv.reader((tmp_path / "r.csv").open()))
    assert header == ["image", "label", "share", "error"]
    shares: dict[str, dict[str, float]] = {}
    for name, label, share, _ in rows:
        shares.setdefault(Path(name).name, {})[label] = float(share)
    assert list(shares) == ["0.png", "1.png", "2.png"]
    assert [sum(each.values()) for each in shares.values()] == pytest.approx([1, 1, 1])
    assert vtok(*given, "--out", "r.jsonl", "--pictures", "drawn")[0] == 0
    documents = list(map(json.loads, Path("r.jsonl").read_text().splitlines()))
    assert [each["overlay"] for each in documents] == [f"drawn/{i}_overlay.png" for i in range(3)]
    assert [each["shares"] for each in documents] == [pytest.approx(each) for each in shares.values()]
    assert len(list(Path("drawn").iterdir())) == 6
    code, out, _ = vtok(*given, "--format", "csv")
    assert (code, out) == (0, Path("r.csv").read_text())
    assert not Path("predictions").exists()
    assert vtok(*given)[0] == 0
    assert len(list(Path("predictions").iterdir())) == 6


def test_pictures_are_not_predicted_themselves(
    vtok: Vtok, run: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("0.png").write_bytes((data / "images/val/0.png").read_bytes())
    for _ in range(2):
        code, text, _ = vtok("predict", ".", "--checkpoint", run, "--device", "cpu")
        assert code == 0
        assert text.startswith("./0.png: predictions/0_overlay.png, predictions/0_classes.png\n")
        assert text.count(".png:") == 1


@pytest.mark.parametrize("ending", ["overlay", "classes"])
def test_no_picture_is_written_over_an_input(
    vtok: Vtok, run: str, data: Path, tmp_path: Path, ending: str
) -> None:
    photo = (data / "images/val/0.png").read_bytes()
    images = (tmp_path / "a.png", tmp_path / f"a_{ending}.png")
    for path in images:
        path.write_bytes(photo)
    code, out, err = vtok("predict", *images, "--checkpoint", run, "--out", tmp_path)
    assert (code, out) == (2, "")
    assert f"would overwrite the input '{images[1]}'; save elsewhere" in err
    assert sorted(tmp_path.iterdir()) == sorted(images)
    assert images[1].read_bytes() == photo


def test_a_failed_save_leaves_the_old_picture(vtok: Vtok, run: str, data: Path, tmp_path: Path) -> None:
    given = ("predict", data / "images/val/0.png", "--checkpoint", run, "--out", tmp_path)
    assert vtok(*given)[0] == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with files_limited_to(100):
        code, _, err = vtok(*given, "--flip")
    assert (code, err.count("\n")) == (2, 1)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_mismatches_are_refused(vtok: Vtok, run: str, data: Path, tmp_path: Path) -> None:
    code, _, err = vtok("eval", "--checkpoint", run, "--data", "digit_scenes")
    assert code == 2
    assert "has 11 classes (background, 0, 1, …), but" in err
    code, _, err = vtok("predict", data / "images/val/0.png", "--checkpoint", run, "--score", "0.7")
    assert (code, err) == (2, f"error: score=0.7 has no effect: {run} was trained to segment; leave it out\n")
    config = json.loads((Path(run) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"task": "classify"}))
    (tmp_path / "model.safetensors").write_bytes((Path(run) / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match="was trained to classify, not to segment"):
        get_task("segment").load(tmp_path)
    with pytest.raises(UserError, match="was trained to segment, not to classify"):
        load_checkpoint(run)
    config["model_args"]["head_args"]["dim"] = 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="does not fit 'vt_fpn'"):
        load(tmp_path)


def test_explain_shows_an_area(vtok: Vtok, run: str, data: Path, tmp_path: Path) -> None:
    page = tmp_path / "why.html"
    given = ("explain", data / "images/val/0.png", "--checkpoint", run, "--save", page)
    document = json.loads(vtok(*given, "--target", "bright", "--regions", "4", "--budget", "16", "--json")[1])
    assert document["score_name"] == "mean probability"
    values = [region["value"] for region in document["regions"]]
    assert values == sorted(values, reverse=True)
    text = page.read_text(encoding="utf-8")
    assert "Why “bright” here?" in text
    assert "of the pixels predicted as it" in text
    code, _, err = vtok(*given, "--target", "never seen")
    assert code == 2
    assert "no pixel is predicted as 'never seen'" in err


def test_clusters_are_ranked_by_miou(vtok: Vtok, run: str, data: Path) -> None:
    given = ("--data", f"masks:{data}", "--checkpoint", run, "--json")
    ranked, evaluated = json.loads(vtok("explain", *given)[1]), json.loads(vtok("eval", *given)[1])
    assert (ranked["metric"], ranked["value"]) == ("miou", pytest.approx(evaluated["miou"]))
    assert len(ranked["clusters"]) > 1


def test_card_of_a_segmentation_model(vtok: Vtok, run: str, data: Path, tmp_path: Path) -> None:
    given = ("push", "me/streets", "--checkpoint", run, "--out", tmp_path / "new")
    code, _, err = vtok(*given, "--examples", data / "images/val/0.png")
    assert (code, err) == (0, "")
    text = (tmp_path / "new/README.md").read_text("utf-8")
    header = ModelCard(text).data.to_dict()
    assert (header["library_name"], header["pipeline_tag"]) == ("visualtokens", "image-segmentation")
    assert header["metrics"] == ["mean_iou"]
    assert "vt_fpn` with backbone resnet18" in text
    assert "transformers" not in text
    assert Image.open(tmp_path / "new/example_1.png").width >= 50
    assert load(tmp_path / "new").classes == ["dark", "bright", "never seen"]


@pytest.mark.slow
def test_onnx_file_predicts_as_its_checkpoint(vtok: Vtok, run: str, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    code, _, err = vtok("export", "--checkpoint", run, "--out", file, "--dynamic", "batch,size")
    assert code == 0, err
    images = sorted((data / "images" / "val").iterdir())
    classes = []
    for kind, model in (("--onnx", file), ("--checkpoint", run)):
        folder = tmp_path / kind.strip("-")
        code, _, err = vtok("predict", *images, kind, model, "--out", folder)
        assert code == 0, err
        assert len(list(folder.glob("*_overlay.png"))) == len(images)
        classes.append(np.stack([np.asarray(Image.open(folder / f"{i.stem}_classes.png")) for i in images]))
    assert (classes[0] == classes[1]).mean() > 0.99
