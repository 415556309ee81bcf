"""Loaders: identical batches for any number of workers, threads and processes."""

from __future__ import annotations

import dataclasses
import io
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from visualtokens.data import (
    Augment,
    BadImage,
    Batch,
    Encoded,
    ImageDataset,
    ImageStream,
    Loader,
    Preprocess,
    Share,
    create_loader,
    generator,
    open_dataset,
)
from visualtokens.errors import UserError

PREPROCESS = Preprocess((16, 16), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
EVERYTHING = Augment(  # the policy and erasing draw from global generators
    crop_area=(0.5, 1.0), flip=0.5, rotate=10, brightness=0.2, hue=0.1, policy="rand-m9-mstd0.5", erase=0.5
)


class Squares(ImageDataset):
    """Noise images, some of them unreadable."""

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


def epoch(loader: Loader, number: int = 0, *, start: int = 0) -> list[Batch]:
    loader.set_epoch(number, start=start)
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


def test_evaluation_is_in_order_and_applies_the_preprocess_only() -> None:
    dataset = Squares(10)
    loader = create_loader(dataset, PREPROCESS, batch=4, train=False)
    batches = list(loader)
    assert [len(b) for b in batches] == [4, 4, 2]
    assert len(loader) == 3
    assert torch.cat([b.index for b in batches]).tolist() == list(range(10))
    assert torch.cat([b.labels for b in batches]).tolist() == [0, 1] * 5
    for index, image in by_index(batches).items():
        torch.testing.assert_close(image, PREPROCESS(dataset[index][0]), rtol=0, atol=2e-6)  # 3 roundings
    assert (batches[0].images.dtype, batches[0].labels.dtype) == (torch.float32, torch.int64)


def test_training_visits_every_item_once_in_a_new_order_each_epoch() -> None:
    loader = create_loader(Squares(50), PREPROCESS, batch=8, train=True)
    orders = [torch.cat([b.index for b in epoch(loader, e)]).tolist() for e in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != list(range(50))
    assert torch.cat([b.index for b in epoch(loader, 1)]).tolist() == orders[1]


def test_batches_do_not_depend_on_workers() -> None:
    """Bit for bit, in any epoch, from any start, after an interrupted epoch, with unreadable images."""
    dataset = Squares(30, bad=frozenset({3, 17, 18}))
    alone, two = (
        create_loader(dataset, PREPROCESS, batch=7, train=True, seed=5, workers=workers, augment=EVERYTHING)
        for workers in (0, 2)
    )
    whole = epoch(alone, 4)
    assert_equal(epoch(two, 4), whole)
    two.set_epoch(0)
    next(iter(two))
    for start in (0, 1, 4):
        assert_equal(epoch(two, 4, start=start), whole[start:])
        assert_equal(epoch(alone, 4, start=start), whole[start:])
    assert_equal(epoch(two, 1), epoch(alone, 1))
    assert len(two) == 5  # of a whole epoch, whatever the start


def test_batches_do_not_depend_on_threads() -> None:
    dataset = Squares(20, bad=frozenset({3, 17, 18}))
    before = torch.get_num_threads()
    runs = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            runs.append(epoch(create_loader(dataset, PREPROCESS, batch=7, train=True, augment=EVERYTHING)))
    finally:
        torch.set_num_threads(before)
    assert_equal(*runs)


def test_an_item_depends_on_seed_epoch_and_index_only() -> None:
    def images(length: int, batch: int, *, seed: int = 0, number: int = 0) -> dict[int, torch.Tensor]:
        loader = create_loader(
            Squares(length), PREPROCESS, batch=batch, train=True, seed=seed, augment=EVERYTHING
        )
        return by_index(epoch(loader, number))

    reference = images(10, 4)
    for index, image in images(8, 3).items():  # another length, so another order
        torch.testing.assert_close(image, reference[index], rtol=0, atol=2e-6)
    for other in (images(10, 4, seed=1), images(10, 4, number=1)):
        assert all((other[index] != image).any() for index, image in reference.items())


def test_repeated_augmentation_takes_copies_of_fewer_items() -> None:
    """Each image in a row as often as asked, augmented differently; the first copy is the usual one."""

    def load(**options: Any) -> Loader[Batch]:
        return create_loader(Squares(10), PREPROCESS, batch=4, train=True, augment=EVERYTHING, **options)

    loader = load(repeats=3)
    batches = epoch(loader, 1)
    assert [len(b) for b in batches] == [4, 4, 2]
    indices = torch.cat([b.index for b in batches]).tolist()
    once = torch.cat([b.index for b in epoch(load(), 1)]).tolist()
    assert indices == [index for index in once for _ in range(3)][:10]
    images = torch.cat([b.images for b in batches])
    usual = by_index(epoch(load(), 1))
    for place, index in enumerate(indices):
        assert torch.equal(images[place], usual[index]) == (place % 3 == 0)
    assert not torch.equal(images[1], images[2])
    assert_equal(batches[1:], epoch(loader, 1, start=1))  # resumed
    for share in (Share(0, 2), Share(1, 2)):
        first = epoch(load(repeats=3, share=share), 1)[0]
        assert torch.equal(first.images, batches[0].images[share.of(4)])


def test_repeats_are_for_training_on_items() -> None:
    with pytest.raises(UserError, match="repeats=3 must be at least 1, and 1 for evaluation"):
        create_loader(Squares(4), PREPROCESS, batch=2, train=False, repeats=3)
    with pytest.raises(UserError, match="repeats=2 needs a dataset with random access, not"):
        create_loader(Stream((4,)), PREPROCESS, batch=2, train=True, repeats=2)


def test_global_random_state_is_neither_read_nor_changed() -> None:
    loader = create_loader(Squares(12), PREPROCESS, batch=5, train=True, augment=EVERYTHING)
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
    paths = [[bad.path for bad in b.bad] for b in batches]
    assert paths == [["squares[1]"], ["squares[4]", "squares[5]"], []]
    assert batches[1].bad[0].reason == "made unreadable"
    assert batches[1].bad[0].__traceback__ is None


def test_a_batch_may_have_no_images() -> None:
    (batch,) = create_loader(Squares(2, bad=frozenset({0, 1})), PREPROCESS, batch=2, train=True)
    assert (batch.images.shape, batch.images.dtype) == ((0, 3, 16, 16), torch.float32)
    assert (batch.labels.dtype, len(batch.labels), len(batch.index)) == (torch.int64, 0, 0)
    assert sorted(bad.path for bad in batch.bad) == ["squares[0]", "squares[1]"]


def test_other_errors_are_raised() -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            raise RuntimeError("a bug, not a bad image")

    with pytest.raises(RuntimeError, match="a bug"):
        list(create_loader(Broken(2), PREPROCESS, batch=2, train=False))


@pytest.mark.parametrize("spec", ["digits", "digit_scenes:32x48"])
def test_loaders_can_be_pickled(spec: str) -> None:
    """Required where worker processes are spawned instead of forked."""
    batches = create_loader(open_dataset(spec, "val"), PREPROCESS, batch=2, train=True)._batches
    dataset, collate = pickle.loads(pickle.dumps((batches.dataset, batches.collate_fn)))
    keys = next(iter(batches.batch_sampler))
    expected = batches.collate_fn(batches.dataset.__getitems__(keys))
    assert_equal([collate(dataset.__getitems__(keys))], [expected])


@pytest.mark.parametrize(("train", "parts"), [(False, 2), (True, 3)])
def test_shares_of_a_batch_make_up_the_batch(train: bool, parts: int) -> None:
    def load(share: Share) -> Loader[Batch]:
        dataset, augment = Squares(26, bad=frozenset({4})), EVERYTHING if train else "none"
        return create_loader(dataset, PREPROCESS, batch=12, train=train, augment=augment, share=share)

    whole, shares = load(Share()), [load(Share(part, parts)) for part in range(parts)]
    assert {len(share) for share in shares} == {len(whole)}
    for batch, *pieces in zip(whole, *shares, strict=True):
        assert sorted(torch.cat([piece.index for piece in pieces]).tolist()) == sorted(batch.index.tolist())
        expected = by_index([batch])
        for index, image in by_index(pieces).items():
            torch.testing.assert_close(image, expected[index], rtol=0, atol=2e-6)
        assert sum(len(piece.bad) for piece in pieces) == len(batch.bad)


def test_a_share_of_the_last_batch_may_be_empty() -> None:
    loaders = [
        create_loader(Squares(5), PREPROCESS, batch=4, train=False, share=Share(part, 2)) for part in range(2)
    ]
    assert [[len(batch) for batch in loader] for loader in loaders] == [[2, 1], [2, 0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch=0"),
        ({"workers": -1}, "workers=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"augment": "phot"}, "unknown augmentation 'phot'; did you mean 'photo'"),
        ({"train": False, "augment": "photo"}, "augment='photo' is for training only"),
        ({"batch": 1, "share": Share(0, 2)}, "batch=1 is less than one image for each of 2 processes"),
    ],
)
def test_invalid_options_are_rejected(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_loader(Squares(2), PREPROCESS, **{"batch": 2, "train": True} | options)


def test_invalid_epochs_are_rejected() -> None:
    loader = create_loader(Squares(30), PREPROCESS, batch=4, train=True)
    with pytest.raises(UserError, match="epoch=-1"):
        loader.set_epoch(-1)
    with pytest.raises(UserError, match="start=9 is not one of the 8 batches"):
        loader.set_epoch(0, start=9)


class Stream(ImageStream):
    """Shards of grey images in memory; image i has the value i, those of ``bad`` are unreadable."""

    spec = "stream"

    def __init__(self, lengths: tuple[int, ...], *, bad: frozenset[int] = frozenset()) -> None:
        self.classes = ["even", "odd"]
        ends = np.cumsum(lengths).tolist()
        self.shards = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        self.bad = bad

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    @property
    def most_shares(self) -> int:
        return len(self.shards)

    def count(self, share: Share) -> int:
        return sum(map(len, self.shards[share.part :: share.parts]))

    def read(self, share: Share) -> Iterator[Encoded]:
        return map(self._encode, chain.from_iterable(self.shards[share.part :: share.parts]))

    def read_shuffled(self, share: Share, *, seed: int, epoch: int) -> Iterator[Encoded]:
        numbers = list(chain.from_iterable(self.shards[share.part :: share.parts]))
        order = generator(seed, epoch, share.part).permutation(numbers).tolist()
        return map(self._encode, chain.from_iterable(repeat(order)))

    def _encode(self, number: int) -> Encoded:
        file = io.BytesIO()
        Image.new("L", (16, 16), number).save(file, "PNG")
        return Encoded(b"no image" if number in self.bad else file.getvalue(), number % 2, f"{number}.png")


VALUES = Preprocess((16, 16), (0, 0, 0), (1, 1, 1))
TRAIN, VAL = Stream((5, 7, 6, 6)), Stream((3, 4, 2), bad=frozenset({1}))


def values(batches: list[Batch]) -> list[list[int]]:
    return [(batch.images[:, 0, 0, 0] * 255).round().int().tolist() for batch in batches]


def test_a_stream_is_evaluated_in_order() -> None:
    batches = list(create_loader(VAL, VALUES, batch=4, train=False))
    assert values(batches) == [[0, 2, 3], [4, 5, 6, 7], [8]]
    assert [bad.path for batch in batches for bad in batch.bad] == ["1.png"]
    assert torch.cat([batch.labels for batch in batches]).tolist() == [0, 0, 1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize(("parts", "workers"), [(1, 2), (3, 0)])
def test_readers_of_a_stream_divide_its_shards(parts: int, workers: int) -> None:
    seen, counts = [], []
    for part in range(parts):
        share = Share(part, parts)
        loader = create_loader(VAL, VALUES, batch=2 * parts, train=False, share=share, workers=workers)
        batches = list(loader)
        assert len(batches) == len(loader)
        counts.append(len(batches))
        seen += chain.from_iterable(values(batches))
    assert sorted(seen) == [0, *range(2, 9)]
    assert len(set(counts)) == 1  # the same for every process; some batches may be empty


@pytest.mark.parametrize("workers", [0, 2])
def test_training_on_a_stream_can_start_anywhere(workers: int) -> None:
    loader = create_loader(TRAIN, VALUES, batch=4, train=True, seed=3, workers=workers, augment="cifar")
    whole = epoch(loader, 2)
    assert [len(batch) for batch in whole] == [4] * 6  # every batch is full
    for start in (1, 4):
        assert_equal(epoch(loader, 2, start=start), whole[start:])
    assert values(epoch(loader, 1)) != values(whole)


def test_processes_read_different_shards_and_take_the_same_number_of_steps() -> None:
    runs = [list(create_loader(TRAIN, VALUES, batch=8, train=True, share=Share(i, 2))) for i in range(2)]
    assert [[len(batch) for batch in run] for run in runs] == [[4, 4, 4]] * 2
    first, second = (set(chain.from_iterable(values(run))) for run in runs)
    assert not first & second


def test_invalid_divisions_of_a_stream_are_rejected() -> None:
    with pytest.raises(UserError, match="4 shards for 2 processes of 3 readers each; give at most workers=2"):
        create_loader(TRAIN, VALUES, batch=8, train=True, share=Share(0, 2), workers=3)
    with pytest.raises(UserError, match="batch=5 cannot be divided evenly by 2 processes"):
        create_loader(TRAIN, VALUES, batch=5, train=True, share=Share(0, 2))
    with pytest.raises(UserError, match="is read in order only; unpack it into folders"):
        TRAIN[0]


WORKERS = """
import gc, io, os, signal, subprocess
import torch
from PIL import Image
from visualtokens.data import Preprocess, create_loader
from visualtokens.data.arrays import Digits

signal.signal(signal.SIGINT, lambda *_: None)
signal.signal(signal.SIGTERM, lambda *_: None)
torch.set_num_threads(2)
torch.rand(4_000_000).exp().sum()  # starts threads, also in workers before worker_init_fn

gc.disable()
file = io.BytesIO()
Image.new("RGB", (256, 256)).save(file, "AVIF")
image = Image.open(file)
image.load()
image.itself = image  # garbage that only the collector frees
del image

class Collecting(Digits):
    def __getitem__(self, index):
        gc.collect()
        return super().__getitem__(index)

preprocess = Preprocess((64, 64), (0.5,) * 3, (0.5,) * 3)
loader = create_loader(Collecting("val"), preprocess, batch=60, train=False, workers=2)
seen = 0
for number, batch in enumerate(loader):
    seen += len(batch)
    if number == 1:  # from another process, as a terminal and a scheduler do
        subprocess.run(["kill", "-INT", "--", f"-{os.getpgid(0)}"])
        subprocess.run(["kill", "-TERM", "--", f"-{os.getpgid(0)}"])
print(seen)
print(*(worker.pid for worker in loader._batches._iterator._workers), flush=True)
raise RuntimeError("a crash")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="inspects /proc")
def test_workers_survive_the_fork_and_signals_but_not_their_parent() -> None:
    """Workers free no garbage of the parent, ignore signals to the whole job, and exit with the parent.

    Freeing an AVIF decoder would hang, because its threads do not exist in a fork.
    """
    done = subprocess.run(
        [sys.executable, "-c", WORKERS], capture_output=True, text=True, timeout=120, start_new_session=True
    )
    assert done.stdout.startswith("360\n"), done.stderr
    workers = done.stdout.splitlines()[1]
    assert "RuntimeError: a crash" in done.stderr
    assert len(workers.split()) == 2
    assert not [pid for pid in workers.split() if Path(f"/proc/{pid}").exists()]


def test_erasing_replaces_part_of_the_normalised_image() -> None:
    policy = dataclasses.replace(EVERYTHING, erase=0.0)
    erased, clean = (
        by_index(epoch(create_loader(Squares(32), PREPROCESS, batch=16, train=True, augment=augment)))
        for augment in (EVERYTHING, policy)
    )
    changed = [i for i, image in clean.items() if (image != erased[i]).any()]
    assert 6 <= len(changed) <= 26  # of 32 at a probability of 0.5
