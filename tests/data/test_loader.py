from __future__ import annotations

import dataclasses
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from visualtokens.data import (
    Augment,
    BadImage,
    Batch,
    DigitScenes,
    ImageDataset,
    Loader,
    Preprocess,
    Share,
    create_loader,
    open_dataset,
)
from visualtokens.errors import UserError

PREPROCESS = Preprocess((16, 16), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
EVERYTHING = Augment(
    crop_area=(0.5, 1.0),
    flip=0.5,
    rotate=10,
    translate=0.1,
    scale=(0.9, 1.1),
    brightness=0.2,
    contrast=0.2,
    saturation=0.2,
    hue=0.1,
)


class Squares(ImageDataset):
    """Coloured squares of which some cannot be read."""

    spec = "squares"

    def __init__(self, length: int, *, bad: frozenset[int] = frozenset()) -> None:
        self.classes = ["even", "odd"]
        self.length = length
        self.bad = bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        if index in self.bad:
            raise BadImage(self.path(index), "made unreadable")
        rng = np.random.default_rng(index)
        return Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)), index % 2

    def path(self, index: int) -> str:
        return f"squares[{index}]"


def epoch(loader: Loader, number: int = 0) -> list[Batch]:
    loader.set_epoch(number)
    return list(loader)


def by_index(batches: list[Batch]) -> dict[int, torch.Tensor]:
    return {int(i): image for b in batches for i, image in zip(b.index, b.images, strict=True)}


def assert_equal(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)
        assert torch.equal(a.index, b.index)
        assert [(x.path, x.reason) for x in a.bad] == [(x.path, x.reason) for x in b.bad]


def test_evaluation_is_in_order_and_equals_the_preprocess() -> None:
    dataset = Squares(10)
    loader = create_loader(dataset, PREPROCESS, batch=4, train=False)
    batches = list(loader)
    assert len(loader) == len(batches) == 3
    assert [len(b.labels) for b in batches] == [4, 4, 2]
    assert torch.cat([b.index for b in batches]).tolist() == list(range(10))
    assert torch.cat([b.labels for b in batches]).tolist() == [0, 1] * 5
    for index, image in by_index(batches).items():
        assert torch.equal(image, PREPROCESS(dataset[index][0]))
    assert batches[0].images.dtype == torch.float32
    assert (batches[0].labels.dtype, batches[0].index.dtype) == (torch.int64, torch.int64)


def test_training_visits_every_item_once_in_another_order_each_epoch() -> None:
    loader = create_loader(Squares(50), PREPROCESS, batch=8, train=True)
    orders = [torch.cat([b.index for b in epoch(loader, e)]).tolist() for e in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != list(range(50))
    assert len(loader) == 7
    assert torch.cat([b.index for b in epoch(loader, 1)]).tolist() == orders[1]


def test_training_without_augmentation_leaves_images_alone() -> None:
    dataset = Squares(6)
    for index, image in by_index(epoch(create_loader(dataset, PREPROCESS, batch=4, train=True))).items():
        assert torch.equal(image, PREPROCESS(dataset[index][0]))


def test_workers_make_no_difference() -> None:
    """Bit for bit, over several epochs of the same worker processes, with unreadable images among them."""
    dataset = Squares(40, bad=frozenset({3, 17, 18}))
    loaders = [
        create_loader(dataset, PREPROCESS, batch=7, train=True, seed=5, workers=workers, augment=EVERYTHING)
        for workers in (0, 1, 2)
    ]
    for number in (0, 1, 4):
        alone, one, two = (epoch(loader, number) for loader in loaders)
        assert_equal(alone, one)
        assert_equal(alone, two)


def test_scenes_from_workers() -> None:
    dataset = DigitScenes("train", size=(32, 32), length=6)
    alone, two = (
        list(create_loader(dataset, PREPROCESS, batch=2, train=False, workers=workers)) for workers in (0, 2)
    )
    assert_equal(alone, two)


def test_an_item_depends_on_seed_epoch_and_index_only() -> None:
    def images(length: int, batch: int, *, seed: int = 0, number: int = 0) -> dict[int, torch.Tensor]:
        loader = create_loader(
            Squares(length), PREPROCESS, batch=batch, train=True, seed=seed, augment=EVERYTHING
        )
        return by_index(epoch(loader, number))

    reference = images(10, 4)
    for index, image in images(10, 3).items():
        assert torch.equal(image, reference[index])
    for index, image in images(8, 4).items():  # a dataset of another length, so of another order
        assert torch.equal(image, reference[index])
    for other in (images(10, 4, seed=1), images(10, 4, number=1)):
        assert all((other[index] != image).any() for index, image in reference.items())


def test_random_state_outside_neither_matters_nor_moves() -> None:
    for workers in (0, 2):
        loader = create_loader(
            Squares(12), PREPROCESS, batch=5, train=True, workers=workers, augment=EVERYTHING
        )
        results = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            before = torch.get_rng_state(), np.random.get_state(), random.getstate()
            results.append(epoch(loader))
            assert torch.equal(torch.get_rng_state(), before[0])
            np.testing.assert_equal(np.random.get_state(), before[1])
            assert random.getstate() == before[2]
        assert_equal(*results)


def test_unreadable_images_are_listed_and_not_replaced() -> None:
    loader = create_loader(Squares(9, bad=frozenset({1, 4, 5})), PREPROCESS, batch=3, train=False)
    batches = list(loader)
    assert [b.index.tolist() for b in batches] == [[0, 2], [3], [6, 7, 8]]
    assert [[bad.path for bad in b.bad] for b in batches] == [
        ["squares[1]"],
        ["squares[4]", "squares[5]"],
        [],
    ]
    assert batches[1].bad[0].reason == "made unreadable"
    assert batches[1].bad[0].__traceback__ is None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_may_be_empty_of_images(workers: int) -> None:
    dataset = Squares(2, bad=frozenset({0, 1}))
    (batch,) = create_loader(dataset, PREPROCESS, batch=2, train=True, workers=workers)
    assert batch.images.shape == (0, 3, 16, 16)
    assert batch.images.dtype == torch.float32
    assert (batch.labels.dtype, len(batch.labels), len(batch.index)) == (torch.int64, 0, 0)
    assert sorted(bad.path for bad in batch.bad) == ["squares[0]", "squares[1]"]


def test_a_damaged_file_in_a_folder(tmp_path: Path) -> None:
    for split in ("train", "val"):
        folder = tmp_path / split / "a"
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "1.png")
        (folder / "2.png").write_bytes(b"\x89PNG but no more")
    loader = create_loader(
        open_dataset(f"folder:{tmp_path}", "train"), PREPROCESS, batch=8, train=True, workers=2
    )
    (batch,) = loader
    assert batch.index.tolist() == [0]
    assert [bad.path for bad in batch.bad] == [str(tmp_path / "train/a/2.png")]


def test_other_errors_are_not_swallowed() -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            raise RuntimeError("a bug, not a bad image")

    with pytest.raises(RuntimeError, match="a bug"):
        list(create_loader(Broken(2), PREPROCESS, batch=2, train=False))


def test_leaving_an_epoch_early_does_not_spoil_the_next() -> None:
    loader = create_loader(Squares(30), PREPROCESS, batch=4, train=True, workers=2, augment="photo")
    whole = epoch(loader, 1)
    loader.set_epoch(0)
    next(iter(loader))
    assert_equal(epoch(loader, 1), whole)


@pytest.mark.parametrize("spec", ["digits", "digit_scenes:32x48"])
def test_datasets_survive_pickling(spec: str) -> None:
    """As they must where worker processes are spawned instead of forked."""
    dataset = open_dataset(spec, "val")
    batches = create_loader(dataset, PREPROCESS, batch=2, train=True)._batches
    copy = pickle.loads(pickle.dumps(batches.dataset)).dataset
    assert pickle.loads(pickle.dumps(batches.collate_fn)).preprocess == PREPROCESS
    assert copy[3][0].tobytes() == dataset[3][0].tobytes()
    assert copy[3][1] == dataset[3][1]


def test_digits_are_loaded_at_the_models_size() -> None:
    loader = create_loader(
        open_dataset("digits", "train"), PREPROCESS, batch=64, train=True, augment="digits"
    )
    assert len(loader) == 23
    batch = next(iter(loader))
    assert batch.images.shape == (64, 3, 16, 16)
    assert batch.bad == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch=0"),
        ({"workers": -1}, "workers=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"augment": "phot"}, "unknown augmentation 'phot'; did you mean 'photo'"),
        ({"train": False, "augment": "photo"}, "augment='photo' is for training only"),
    ],
)
def test_unusable_options(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_loader(Squares(2), PREPROCESS, **{"batch": 2, "train": True} | options)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_can_begin_with_any_batch(workers: int) -> None:
    loader = create_loader(Squares(30), PREPROCESS, batch=4, train=True, workers=workers, augment=EVERYTHING)
    whole = epoch(loader, 2)
    for start in (0, 1, 5, 8):
        loader.set_epoch(2, start=start)
        assert_equal(list(loader), whole[start:])
    assert len(loader) == 8, "of a whole epoch"
    assert_equal(epoch(loader, 2), whole)
    with pytest.raises(UserError, match="start=9 is not one of the 8 batches"):
        loader.set_epoch(0, start=9)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("parts", [2, 3])
def test_shares_of_a_batch_make_up_the_batch(train: bool, parts: int) -> None:
    options = dict(batch=12, train=train, augment=EVERYTHING if train else "none")
    whole = create_loader(Squares(30, bad=frozenset({4})), PREPROCESS, **options)  # type: ignore[arg-type]
    shares = [
        create_loader(Squares(30, bad=frozenset({4})), PREPROCESS, share=Share(part, parts), **options)  # type: ignore[arg-type]
        for part in range(parts)
    ]
    assert {len(share) for share in shares} == {len(whole)}
    for batch, *pieces in zip(whole, *shares, strict=True):
        assert sorted(torch.cat([piece.index for piece in pieces]).tolist()) == sorted(batch.index.tolist())
        expected = by_index([batch])
        for index, image in by_index(pieces).items():
            assert torch.equal(image, expected[index])
        assert sum(len(piece.bad) for piece in pieces) == len(batch.bad)


def test_a_share_may_be_empty() -> None:
    loaders = [
        create_loader(Squares(5), PREPROCESS, batch=4, train=False, share=Share(part, 2)) for part in range(2)
    ]
    assert [[len(batch) for batch in loader] for loader in loaders] == [[2, 1], [2, 0]]
    with pytest.raises(UserError, match="batch=1 is less than one image for each of 2 processes"):
        create_loader(Squares(5), PREPROCESS, batch=1, train=False, share=Share(0, 2))


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_make_no_difference(threads: int) -> None:
    """Without workers, all threads of torch prepare a batch; also where timm draws from global generators."""
    augment = dataclasses.replace(EVERYTHING, policy="rand-m9-mstd0.5", erase=0.5)
    dataset = Squares(40, bad=frozenset({3, 17, 18}))
    before = torch.get_num_threads()
    runs = []
    for count in (1, threads):
        torch.set_num_threads(count)
        runs.append(epoch(create_loader(dataset, PREPROCESS, batch=7, train=True, augment=augment)))
    torch.set_num_threads(before)
    assert_equal(*runs)


def test_negative_epoch() -> None:
    with pytest.raises(UserError, match="epoch=-1"):
        create_loader(Squares(2), PREPROCESS, batch=2, train=True).set_epoch(-1)


def test_workers_after_parallel_work_in_this_process() -> None:
    """A forked worker must not start OpenMP threads: the pool of its parent is not there any more."""
    code = """
import torch
from visualtokens.data import Preprocess, create_loader, open_dataset

torch.set_num_threads(2)
torch.rand(4_000_000).exp().sum()  # starts the parent's pool
look = Preprocess((64, 64), (0.5,) * 3, (0.5,) * 3)
loader = create_loader(open_dataset("digits", "val"), look, batch=64, train=False, workers=2)
print(sum(len(batch.images) for batch in loader))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "360\n"), done.stderr


def test_workers_leave_the_garbage_of_this_process_alone() -> None:
    """Freeing an AVIF decoder waits for its threads, which a forked worker does not have."""
    code = """
import gc, io
from PIL import Image
from visualtokens.data import ImageDataset, Preprocess, create_loader

gc.disable()
file = io.BytesIO()
Image.new("RGB", (256, 256)).save(file, "AVIF")
image = Image.open(file)
image.load()
image.itself = image  # only the collector frees it
del image

class Collecting(ImageDataset):
    classes = ["black"]
    def __len__(self):
        return 4
    def path(self, index):
        return str(index)
    def __getitem__(self, index):
        gc.collect()
        return Image.new("RGB", (16, 16)), 0

look = Preprocess((16, 16), (0.5,) * 3, (0.5,) * 3)
loader = create_loader(Collecting(), look, batch=2, train=False, workers=2)
print(sum(len(batch.images) for batch in loader))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
