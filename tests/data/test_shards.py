"""Tar shards through timm's reader: every sample, in an order that seed, epoch, process and worker decide."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from visualtokens.data import Batch, Loader, Preprocess, Share, create_loader, open_dataset
from visualtokens.errors import UserError

pytest.importorskip("webdataset")
PREPROCESS = Preprocess((8, 8), (0, 0, 0), (1, 1, 1))
LENGTHS = {"train": [5, 7, 6, 6], "val": [3, 4, 2]}  # samples per shard


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


def make_shards(root: Path, *, bad: frozenset[int] = frozenset(), **info: Any) -> str:
    """Sample i has the grey value i; those of ``bad`` are no images."""
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


def test_validation_gives_every_sample_once_in_order(shards: str) -> None:
    batches = list(loader(shards, train=False))
    assert values(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert torch.cat([batch.labels for batch in batches]).tolist() == [0, 1] * 4 + [0]
    assert open_dataset(shards, "val").classes == ["even", "odd"]
    assert len(open_dataset(shards, "train")) == 24


@pytest.mark.parametrize(("parts", "workers"), [(1, 2), (1, 3), (3, 0), (3, 1)])
def test_shares_and_workers_divide_the_validation_by_shards(shards: str, parts: int, workers: int) -> None:
    seen, counts = [], []
    for part in range(parts):
        made = loader(shards, train=False, batch=2 * parts, share=Share(part, parts), workers=workers)
        batches = list(made)
        assert len(batches) == len(made)
        counts.append(len(batches))
        seen += flat(batches)
    assert sorted(seen) == list(range(9))
    assert len(set(counts)) == 1, "every process gets as many batches, perhaps empty ones"


@pytest.mark.parametrize("workers", [0, 2])
def test_training_order_depends_on_seed_and_epoch_only(shards: str, workers: int) -> None:
    runs = {
        (seed, epoch): list(loader(shards, seed=seed, epoch=epoch, workers=workers))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    again = list(loader(shards, seed=0, epoch=1, workers=workers))
    assert values(again) == values(runs[0, 1])
    assert len({json.dumps(values(run)) for run in runs.values()}) == 4
    assert all(len(batch) == 4 for run in runs.values() for batch in run), "every batch is full"
    if workers == 0:
        assert all(sorted(flat(run)) == list(range(24)) for run in runs.values())


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_an_epoch_begun_in_the_middle_goes_on_as_the_whole_one(shards: str, workers: int) -> None:
    options: dict[str, Any] = dict(workers=workers, augment="cifar", seed=3, epoch=2)
    whole = list(loader(shards, **options))
    for start in (1, 2, 5, 6):
        rest = list(loader(shards, start=start, **options))
        assert values(rest) == values(whole[start:])
        assert all(torch.equal(a.images, b.images) for a, b in zip(rest, whole[start:], strict=True))


def test_processes_read_other_shards_and_take_as_many_steps(shards: str) -> None:
    runs = [list(loader(shards, batch=8, share=Share(part, 2))) for part in range(2)]
    assert [len(run) for run in runs] == [3, 3]
    assert [len(batch) for run in runs for batch in run] == [4] * 6
    seen = [set(flat(run)) for run in runs]
    assert not seen[0] & seen[1]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    spec = make_shards(tmp_path, bad=frozenset({1, 5}))
    batches = list(loader(spec, train=False))
    names = [bad.path for batch in batches for bad in batch.bad]
    assert names == [f"{tmp_path}/val-0000.tar/0001.png", f"{tmp_path}/val-0001.tar/0005.png"]
    assert flat(batches) == [0, 2, 3, 4, 6, 7, 8]


def test_single_images_cannot_be_picked(shards: str) -> None:
    with pytest.raises(UserError, match="is read in order only; unpack it into folders"):
        open_dataset(shards, "val")[0]


def test_more_readers_than_shards(shards: str) -> None:
    with pytest.raises(UserError, match="4 shards for 2 processes of 3 readers each; give at most workers=2"):
        loader(shards, batch=8, share=Share(0, 2), workers=3)
    with pytest.raises(UserError, match="batch=5 cannot be divided evenly by 2 processes"):
        loader(shards, batch=5, share=Share(0, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: info.pop("splits"), r"no _info\.json that tells its splits"),
        (lambda info: info["splits"].pop("val"), "has no val split, only train"),
        (lambda info: info.pop("classes"), 'tells neither "classes" nor "num_classes"'),
        (lambda info: info["splits"]["val"].pop("shard_lengths"), "lacks shard_lengths of split 'val'"),
        (lambda info: info["splits"]["val"].update(num_samples=7), "contradicts itself about 'val'"),
    ],
)
def test_an_info_file_that_does_not_tell_enough(tmp_path: Path, change: Any, message: str) -> None:
    spec = make_shards(tmp_path)
    info = json.loads((tmp_path / "_info.json").read_text())
    change(info)
    (tmp_path / "_info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match=message):
        open_dataset(spec, "val")


def test_classes_by_number_and_labels_out_of_range(tmp_path: Path) -> None:
    spec = make_shards(tmp_path, classes=["only"])
    with pytest.raises(UserError, match="is of class 1, but there are 1 classes"):
        list(loader(spec, train=False))
    info = json.loads((tmp_path / "_info.json").read_text())
    del info["classes"]
    (tmp_path / "_info.json").write_text(json.dumps(info | {"num_classes": 3}))
    assert open_dataset(spec, "val").classes == ["0", "1", "2"]
