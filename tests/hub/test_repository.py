"""Repositories as folders and on a hub: what is written, what is refused, and who can load it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import visualtokens
from tests.hub.conftest import HISTORY, write_run
from tests.hub.server import TOKEN, Hub
from visualtokens.checkpoint import load, save_checkpoint
from visualtokens.errors import UserError
from visualtokens.hub import push_to_hub, write_repository
from visualtokens.hub.repository import read_figures, read_history
from visualtokens.models import list_models
from visualtokens.tasks.timm_models import build_model, preprocess_for


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# Folders.


def test_folder(run: Path, photo: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "repository"
    write_repository(run, out, repository="me/pets", license="mit", examples=[photo])
    assert files(out) == {"README.md", "config.json", "model.safetensors", "curves.png", "example_1.png"}
    assert (out / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert (config["training"]["data"], config["training"]["init"]) == ("folder:photos", "first")
    text = "".join((out / name).read_text() for name in ("config.json", "README.md"))
    assert "alice" not in text
    assert str(tmp_path) not in text
    for name in ("curves.png", "example_1.png"):
        assert Image.open(out / name).width > 400
    x = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(load(out).model(x), load(run).model(x), rtol=0, atol=0)
        by_timm = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
        torch.testing.assert_close(by_timm(x), load(run).model(x), rtol=0, atol=0)


def test_figures_are_those_of_the_weights(run: Path) -> None:
    history = read_history(run)
    assert history == read_history(run / "best")
    assert [set(HISTORY[i]) - set(record) for i, record in enumerate(history)] == [set(), set(), {"loss"}]
    last, best = (read_figures(folder, load(folder), history) for folder in (run, run / "best"))
    assert last is not None
    assert best is not None
    assert (last.epoch, last.epochs, last.metrics["accuracy"]) == (3, 3, 0.75)
    assert (best.epoch, best.metrics) == (2, {"accuracy": 0.875, "loss": 0.75})


def test_models_without_clusters_are_explained_too(tmp_path: Path, photo: Path) -> None:
    run = write_run(tmp_path / "run", "resnet10t")
    (run / "log.jsonl").unlink()
    write_repository(run, tmp_path / "out", repository="me/x", examples=[photo])
    assert Image.open(tmp_path / "out" / "example_1.png").width > 2 * Image.open(photo).width
    assert files(tmp_path / "out") == {"README.md", "config.json", "model.safetensors", "example_1.png"}


def test_refused_folders_leave_nothing(run: Path, photo: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"broken\.png: not an image"):
        write_repository(run, out, repository="me/x", examples=[photo, broken])
    with pytest.raises(UserError, match="17 examples; a card has at most 16"):
        write_repository(run, out, repository="me/x", examples=[photo] * 17)
    with pytest.raises(UserError, match="does not exist; a checkpoint is a folder"):
        write_repository(tmp_path / "nowhere", out, repository="me/x")
    assert not out.exists()
    out.mkdir()
    with pytest.raises(UserError, match="exists already; give the name of a new folder"):
        write_repository(run, out, repository="me/x")


@pytest.mark.parametrize("line", ["no json", "[1]", '{"epoch": "x"}', "[" * 100_000])
def test_damaged_log(tmp_path: Path, line: str) -> None:
    (tmp_path / "log.jsonl").write_text(line)
    with pytest.raises(UserError, match=r"log\.jsonl is not the log of a run: .*; restore or remove it"):
        read_history(tmp_path)


def test_weights_that_are_not_finite_are_not_shared(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    weights = dict(load(run).model.state_dict())
    weights["head.bias"] = torch.full_like(weights["head.bias"], torch.nan)
    save_file(weights, run / "model.safetensors")
    with pytest.raises(UserError, match=r"'head\.bias' is not finite"):
        write_repository(run, tmp_path / "out", repository="me/x")


# The hub.


def test_pushed_and_loaded(hub: Hub, run: Path, photo: Path) -> None:
    assert push_to_hub(run, "me/pets", license="mit", examples=[photo]) == f"{hub.url}/me/pets"
    assert set(hub.repositories["me/pets"]) == {
        *("README.md", "config.json", "model.safetensors", "curves.png", "example_1.png"),
    }
    assert hub.private == {"me/pets": False}
    x = torch.randn(1, 3, 32, 32)
    loaded = visualtokens.load("hf-hub:me/pets")
    asked = len(hub.requests)
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(x), load(run).model(x), rtol=0, atol=0)
    visualtokens.load("hf-hub:me/pets")  # only config.json is checked for a new version
    assert {path.rpartition("/")[2] for _, path in hub.requests[asked:]} == {"config.json"}


def test_token_is_nowhere(hub: Hub, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    push_to_hub(run, "pets", private=True)
    assert hub.private == {"me/pets": True}
    assert TOKEN.encode() not in b"".join(hub.repositories["me/pets"].values())
    assert b"hf-hub:me/pets" in hub.repositories["me/pets"]["README.md"]
    assert TOKEN not in caplog.text


def test_card_of_the_repository_is_kept(hub: Hub, run: Path) -> None:
    hub.repositories["me/pets"] = {"README.md": b"by hand"}
    push_to_hub(run, "me/pets")
    assert hub.repositories["me/pets"]["README.md"] == b"by hand"
    assert "model.safetensors" in hub.repositories["me/pets"]
    push_to_hub(run, "me/pets", replace_card=True)
    assert hub.repositories["me/pets"]["README.md"].startswith(b"---\n")


def test_without_token(hub: Hub, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UserError) as caught:
        push_to_hub(run, "me/pets")
    assert str(caught.value) == (
        "pushing to the Hugging Face Hub needs a token; log in with `hf auth login`, or set HF_TOKEN to a "
        "token with write access"
    )
    assert hub.requests == []


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "the Hub does not accept the token; log in with `hf auth login`"),
        (403, "the token may not write there; give a repository of your own"),
        (404, "the Hub has no such account"),
    ],
)
def test_refused_by_the_hub(hub: Hub, run: Path, status: int, message: str) -> None:
    hub.refuse = status
    with pytest.raises(UserError, match=f"^'me/pets' cannot be pushed: {message}") as caught:
        push_to_hub(run, "me/pets")
    assert "\n" not in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_without_network(hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    with pytest.raises(UserError, match="'me/pets' cannot be pushed: the Hub cannot be reached; try again"):
        push_to_hub(run, "me/pets")
    with pytest.raises(
        UserError, match="cannot be fetched: the Hugging Face Hub cannot be reached"
    ) as caught:
        load("hf-hub:me/pets")
    assert "--checkpoint FOLDER" in str(caught.value)


def test_sizes_are_checked(hub: Hub, run: Path, tmp_path: Path) -> None:
    hub.claimed_sizes = {"model.safetensors": 12}
    with pytest.raises(UserError, match=r"model.safetensors has [\d,]+ bytes, but 12 arrived in 'me/pets'"):
        push_to_hub(run, "me/pets")
    for name, size in {"config.json": 17 * 2**20, "model.safetensors": 33 * 2**30}.items():
        hub.claimed_sizes = {name: size}
        with pytest.raises(UserError, match=f"{name} of the repository 'me/pets' has .* MB, more than"):
            load("hf-hub:me/pets")
    assert not list((tmp_path / "cache").rglob("model.safetensors"))


def test_repositories_that_cannot_be_loaded(hub: Hub) -> None:
    with pytest.raises(
        UserError, match="'me/none' cannot be fetched: the Hugging Face Hub has no such repos"
    ):
        load("hf-hub:me/none")
    hub.repositories["me/pickle"] = {"config.json": b"{}", "pytest_model.bin": b"", "pytorch_model.bin": b""}
    with pytest.raises(UserError, match=r"it has no config.json and model.safetensors in timm's layout"):
        load("hf-hub:me/pickle")
    with pytest.raises(UserError, match="cannot be fetched: "):
        load("hf-hub:a/b/c")


# Other libraries, in a process of their own.

LIBRARIES = """
import sys
import torch, visualtokens, timm
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

folder, photo = sys.argv[1:]
run = visualtokens.load(folder)
image = Image.open(photo).convert("RGB")
x = run.preprocess(image)[None]
model = AutoModelForImageClassification.from_pretrained(folder).eval()
inputs = AutoImageProcessor.from_pretrained(folder)(image, return_tensors="pt")
with torch.inference_mode():
    wanted = run.model(x)
    torch.testing.assert_close(inputs["pixel_values"], x, rtol=0, atol=0)
    torch.testing.assert_close(model(**inputs).logits, wanted)
assert list(model.config.id2label.values()) == run.classes
"""


def python(code: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


@pytest.mark.slow
def test_transformers_loads_the_folder(run: Path, photo: Path, tmp_path: Path) -> None:
    write_repository(run, tmp_path / "out", repository="me/pets")
    done = python(LIBRARIES, tmp_path / "out", photo)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_everything_from_a_hub_by_its_address(hub: Hub, run: Path, photo: Path, tmp_path: Path) -> None:
    """The examples of the card work as they are, where HF_ENDPOINT names the hub."""
    env = dict(HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "home"), HF_HUB_DISABLE_XET="1", HF_TOKEN=TOKEN)
    code = "import sys, vtok; sys.argv[0] = 'vtok'; sys.exit(vtok.main())"
    done = python(code, "push", "pets", "--checkpoint", run, "--license", "mit", **env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == f"{hub.url}/me/pets"
    card = hub.repositories["me/pets"]["README.md"].decode()
    blocks = [block.partition("\n```")[0] for block in card.split("```python\n")[1:]]
    assert len(blocks) == 3
    (tmp_path / "photo.jpg").write_bytes(photo.read_bytes())
    for block in blocks:
        done = python(f"import os; os.chdir({str(tmp_path)!r})\n{block}", **env)
        assert done.returncode == 0, done.stderr
    done = python(code, "predict", photo, "--checkpoint", "hf-hub:me/pets", "--json", **env)
    assert json.loads(done.stdout)["predictions"][0]["classes"][0]["class"] in load(run).classes


@pytest.mark.slow
@pytest.mark.parametrize("name", [*list_models(), "reduced_vit"])
def test_transformers_loads_every_model(name: str, tmp_path: Path) -> None:
    """It builds models without values, so every buffer that is not saved must be filled anew."""
    from transformers import AutoModelForImageClassification

    model = build_model(name, classes=3, model_args={}).eval()
    preprocess = preprocess_for(model)
    save_checkpoint(
        tmp_path, model, classes=["a", "b", "c"], preprocess=preprocess, model_args={}, training={}
    )
    wrapped = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    x = torch.randn(1, 3, *preprocess.size)
    with torch.inference_mode():
        torch.testing.assert_close(wrapped(x).logits, model(x))
