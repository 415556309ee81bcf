"""Datasets of the Hugging Face Hub, here from a local folder in its format."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visualtokens.data import BadImage, open_dataset
from visualtokens.errors import UserError


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 10, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> str:
    datasets, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    from pyarrow import parquet

    root = tmp_path_factory.mktemp("hub")
    features = datasets.Features(
        {
            "id": datasets.Value("int64"),
            "img": datasets.Image(),
            "fine": datasets.ClassLabel(names=["cat", "dog"]),
            "coarse": datasets.ClassLabel(names=["animal"]),
        }
    )
    about = {"huggingface": json.dumps({"info": {"features": features.to_dict()}})}
    for split, count in (("train", 6), ("test", 4)):
        encoded = [{"bytes": png(20 * i), "path": None} for i in range(count)]
        if split == "test":
            encoded[0] = {"bytes": b"no image", "path": "x.png"}
        labels = [i % 2 for i in range(count)]
        rows = {"id": list(range(count)), "img": encoded, "fine": labels, "coarse": [0] * count}
        table = pyarrow.Table.from_pydict(rows, schema=features.arrow_schema)
        parquet.write_table(table.replace_schema_metadata(about), root / f"{split}-00000.parquet")
    return f"hfds:{root}"


def test_images_labels_and_names(hub: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    train, val = open_dataset(hub, "train"), open_dataset(hub, "val")
    assert (len(train), len(val)) == (6, 4)
    assert train.classes == val.classes == ["cat", "dog"]
    image, label = train[3]
    assert (image.size, image.mode, label) == ((10, 8), "RGB", 1)
    assert np.asarray(image).mean() == 60
    assert val.path(2) == f"{hub}[test][2]"
    with pytest.raises(BadImage, match=r"\[test\]\[0\]: not an image"):
        val[0]


def test_what_is_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"hfds:.* cannot be opened: "):
        open_dataset(f"hfds:{tmp_path}", "train")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'visualtokens\[data\]'"):
        open_dataset("hfds:mnist", "train")
    from timm.data.readers import reader_wds

    monkeypatch.setattr(reader_wds, "wds", None)
    with pytest.raises(UserError, match=r"pip install 'visualtokens\[data\]'"):
        open_dataset("wds:/data", "train")
