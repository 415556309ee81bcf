"""Datasets read by timm: tar shards and local datasets in the format of the Hugging Face Hub."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from visualtokens.data import BadImage, Batch, Loader, Preprocess, Share, create_loader, open_dataset
from visualtokens.errors import UserError

PREPROCESS = Preprocess((8, 8), (0, 0, 0), (1, 1, 1))
LENGTHS = {"train": [5, 7, 6, 6], "val": [3, 4, 2]}  # samples per shard


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


def make_shards(root: Path, *, bad: frozenset[int] = frozenset(), **info: Any) -> str:
    """Sample i has the grey value i; those of ``bad`` are not images."""
    pytest.importorskip("webdataset")
    splits = {}
    for split, lengths in LENGTHS.items():
        number, names = 0, []
        for shard, length in enumerate(lengths):
            names.append(f"{split}-{shard:04d}.tar")
            with tarfile.open(root / names[-1], "w") as tar:
                for _ in range(length):
                    image = b"no image" if number in bad else png(number)
                    for extension, data in (("png", image), ("cls", str(number % 2).encode())):
                        entry = tarfile.TarInfo(f"{number:04d}.{extension}")
                        entry.size = len(data)
                        tar.addfile(entry, io.BytesIO(data))
                    number += 1
        splits[split] = dict(name=split, num_samples=number, filenames=names, shard_lengths=lengths)
    (root / "_info.json").write_text(json.dumps({"splits": splits, "classes": ["even", "odd"]} | info))
    return f"wds:{root}"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_shards(tmp_path_factory.mktemp("shards"))


def values(batches: list[Batch]) -> list[list[int]]:
    return [(batch.images[:, 0, 0, 0] * 255).round().int().tolist() for batch in batches]


def flat(batches: list[Batch]) -> list[int]:
    return [value for batch in values(batches) for value in batch]


def loader(spec: str, *, train: bool = True, start: int = 0, epoch: int = 0, **options: Any) -> Loader:
    dataset = open_dataset(spec, "train" if train else "val")
    made = create_loader(dataset, PREPROCESS, **{"batch": 4, "train": train} | options)
    made.set_epoch(epoch, start=start)
    return made


def test_validation_reads_every_sample_once_in_order(shards: str) -> None:
    batches = list(loader(shards, train=False))
    assert values(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert torch.cat([batch.labels for batch in batches]).tolist() == [0, 1] * 4 + [0]
    assert open_dataset(shards, "val").classes == ["even", "odd"]
    assert len(open_dataset(shards, "train")) == 24


@pytest.mark.parametrize(("parts", "workers"), [(1, 2), (3, 0)])
def test_readers_divide_the_shards(shards: str, parts: int, workers: int) -> None:
    seen, counts = [], []
    for part in range(parts):
        made = loader(shards, train=False, batch=2 * parts, share=Share(part, parts), workers=workers)
        batches = list(made)
        assert len(batches) == len(made)
        counts.append(len(batches))
        seen += flat(batches)
    assert sorted(seen) == list(range(9))
    assert len(set(counts)) == 1


def test_training_order_depends_on_seed_and_epoch_only(shards: str) -> None:
    runs = {
        (seed, epoch): list(loader(shards, seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)
    }
    again = list(loader(shards, seed=0, epoch=1))
    assert values(again) == values(runs[0, 1])
    assert len({json.dumps(values(run)) for run in runs.values()}) == 4
    assert all(sorted(flat(run)) == list(range(24)) for run in runs.values())


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_can_start_at_any_batch(shards: str, workers: int) -> None:
    options: dict[str, Any] = dict(workers=workers, augment="cifar", seed=3, epoch=2)
    whole = list(loader(shards, **options))
    for start in (1, 4):
        rest = list(loader(shards, start=start, **options))
        assert values(rest) == values(whole[start:])
        assert all(torch.equal(a.images, b.images) for a, b in zip(rest, whole[start:], strict=True))


def test_unreadable_samples_are_named(tmp_path: Path) -> None:
    spec = make_shards(tmp_path, bad=frozenset({1, 5}))
    batches = list(loader(spec, train=False))
    names = [bad.path for batch in batches for bad in batch.bad]
    assert names == [f"{tmp_path}/val-0000.tar/0001.png", f"{tmp_path}/val-0001.tar/0005.png"]
    assert flat(batches) == [0, 2, 3, 4, 6, 7, 8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: info.pop("splits"), 'has no "splits"'),
        (lambda info: info.update(splits=[]), 'has no "splits"'),
        (lambda info: info["splits"].update(val=[3]), r"split 'val' is \[3\], not an object"),
        (lambda info: info["splits"].pop("val"), "has no val split, only 'train'"),
        (lambda info: info.update(classes="ab"), "classes are 'ab'; expected a list of names"),
        (lambda info: info.update(classes=["a", 3]), r"classes are \['a', 3\]"),
        (lambda info: info.update(classes=[]), "has 0 classes"),
        (lambda info: (info.pop("classes"), info.update(num_classes=2**40)), "has 1,099,511,627,776 classes"),
        (
            lambda info: (info.pop("classes"), info.update(num_classes="2")),
            "num_classes is '2'; expected an int",
        ),
        (
            lambda info: info["splits"]["val"].update(filenames="x.tar"),
            "filenames of split 'val' has 'x.tar'",
        ),
        (lambda info: info["splits"]["val"]["filenames"].insert(0, 7), "filenames of split 'val' has 7"),
        (
            lambda info: info["splits"]["val"]["filenames"].insert(0, "../x.tar"),
            r"has '\.\./x\.tar'; expected",
        ),
        (
            lambda info: info["splits"]["val"]["filenames"].insert(0, "/x.tar"),
            "has '/x.tar'; expected file names",
        ),
        (
            lambda info: info["splits"]["val"]["filenames"].insert(0, "\ud800.tar"),
            "filenames of split 'val' has",
        ),
        (lambda info: info["splits"]["val"].update(shard_lengths=[3, 4, -2]), "shard_lengths of .* has -2"),
        (lambda info: info["splits"]["val"].update(shard_lengths=[3, 4, 2.0]), "shard_lengths of .* has 2.0"),
        (
            lambda info: info["splits"]["val"].update(shard_lengths=[3, 4, 10**300]),
            "expected an integer from 1",
        ),
        (lambda info: info["splits"]["val"].update(num_samples=True), "num_samples of split 'val' has True"),
        (lambda info: info.pop("classes"), 'has neither "classes" nor "num_classes"'),
        (lambda info: info["splits"]["val"].pop("shard_lengths"), "lacks shard_lengths of split 'val'"),
        (lambda info: info["splits"]["val"].update(num_samples=7), "contradicts itself about 'val'"),
    ],
)
def test_an_incomplete_info_file_is_rejected(tmp_path: Path, change: Any, message: str) -> None:
    spec = make_shards(tmp_path)
    info = json.loads((tmp_path / "_info.json").read_text())
    change(info)
    (tmp_path / "_info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match=message) as caught:
        open_dataset(spec, "val")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"_info\.json is not JSON"),
        (b"\xff\xfe\xfd", r"_info\.json is not JSON"),
        (b"[" * 100_000, r"_info\.json is not JSON"),
        (b"[]", 'has no "splits"'),
        (b"", r"_info\.json.* is empty"),
        (b" " * (2**25 + 1), "has more than 33,554,432 bytes"),
    ],
)
def test_an_info_file_of_another_kind_is_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    spec = make_shards(tmp_path)
    (tmp_path / "_info.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_dataset(spec, "val")


@pytest.mark.parametrize("root", ["pipe:touch {}", "pipe:a; touch {}", "http://127.0.0.1:9/'; touch {};'"])
def test_no_command_of_a_location_is_run(tmp_path: Path, root: str) -> None:
    """webdataset runs a location that starts with ``pipe:``, and opens others through a shell."""
    made = tmp_path / "made"
    with pytest.raises(UserError, match="is not opened"):
        open_dataset(f"wds:{root.format(made)}", "train")
    assert not made.exists()


def test_no_command_of_a_shard_name_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = dict(name="train", num_samples=1, shard_lengths=[1], filenames=[f"'; touch {tmp_path}/made; '"])
    info = {"splits": {"train": split}, "num_classes": 2}
    monkeypatch.setattr("visualtokens.data.timm_readers._read_info", lambda root: ("_info.json", info))
    with pytest.raises(UserError, match="is not opened"):
        open_dataset("wds:http://127.0.0.1:9", "train")
    assert not (tmp_path / "made").exists()


def test_a_folder_without_info_file_is_rejected(tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    with pytest.raises(UserError, match=r"has no _info\.json"):
        open_dataset(f"wds:{tmp_path}", "val")
    os.mkfifo(tmp_path / "_info.json")
    with pytest.raises(UserError, match="is not a regular file"):
        open_dataset(f"wds:{tmp_path}", "val")


def test_labels_must_be_in_the_range_of_the_classes(tmp_path: Path) -> None:
    spec = make_shards(tmp_path, classes=["only"])
    with pytest.raises(UserError, match="is of class 1; expected 0 to 0"):
        list(loader(spec, train=False))
    info = json.loads((tmp_path / "_info.json").read_text())
    del info["classes"]
    (tmp_path / "_info.json").write_text(json.dumps(info | {"num_classes": 3}))
    assert open_dataset(spec, "val").classes == ["0", "1", "2"]


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


def test_hub_images_labels_and_names(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    train, val = open_dataset(hub, "train"), open_dataset(hub, "val")
    assert (len(train), len(val)) == (6, 4)
    assert train.classes == val.classes == ["cat", "dog"]
    image, label = train[3]
    assert (image.size, image.mode, label) == ((8, 8), "RGB", 1)
    assert np.asarray(image).mean() == 60
    assert val.path(2) == f"{hub}[test][2]"
    with pytest.raises(BadImage, match=r"\[test\]\[0\]: not an image"):
        val[0]


def test_other_folders_are_not_hub_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"hfds:.* cannot be opened: "):
        open_dataset(f"hfds:{tmp_path}", "train")


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'visualtokens\[data\]'"):
        open_dataset("hfds:mnist", "train")
    from timm.data.readers import reader_wds

    monkeypatch.setattr(reader_wds, "wds", None)
    with pytest.raises(UserError, match=r"pip install 'visualtokens\[data\]'"):
        open_dataset("wds:/data", "train")
