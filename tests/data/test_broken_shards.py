"""Tar shards that are missing, damaged or of another length than promised, and runs that meet them."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_timm_readers import flat, loader, make_shards, png
from visualtokens.data import Share, open_dataset
from visualtokens.errors import UserError


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_shards(tmp_path_factory.mktemp("shards"))


def missing(shard: Path) -> None:
    shard.unlink()


def empty(shard: Path) -> None:
    shard.write_bytes(b"")


def garbage(shard: Path) -> None:
    shard.write_bytes(np.random.default_rng(0).bytes(5000))


def no_members(shard: Path) -> None:
    shard.write_bytes(bytes(10240))


def fifo(shard: Path) -> None:
    shard.unlink()
    os.mkfifo(shard)


def cut(shard: Path) -> None:
    """Ends inside the second image."""
    shard.write_bytes(shard.read_bytes()[:2600])


def damaged(shard: Path) -> None:
    """The header of the second image is overwritten; tarfile takes that for the end of the archive."""
    content = bytearray(shard.read_bytes())
    content[2048 : 2048 + 512] = b"x" * 512
    shard.write_bytes(content)


def too_long(shard: Path) -> None:
    """With a sample that was not promised."""
    with tarfile.open(shard, "a") as tar:
        for name, data in (("more.png", png(0)), ("more.cls", b"0")):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def zipped(shard: Path) -> None:
    shard.write_bytes(gzip.compress(shard.read_bytes()))


def zipped_and_cut(shard: Path) -> None:
    zipped(shard)
    shard.write_bytes(shard.read_bytes()[:-60])


UNOPENED = {missing: "No such file", empty: "is empty", fifo: "is not a regular file"} | {
    garbage: "is not a tar archive",
    no_members: "is an empty tar archive",
}
UNREAD = {
    cut: r" cannot be read after \d of its",
    damaged: " holds only 1 samples, but _info.json promises",
    zipped_and_cut: r"/\d+ has no class number",
}


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("break_it", UNOPENED)
def test_every_shard_is_checked_at_opening(tmp_path: Path, split: Any, break_it: Any) -> None:
    spec = make_shards(tmp_path)
    break_it(tmp_path / f"{split}-0001.tar")
    with pytest.raises(UserError, match=rf"{split}-0001\.tar.*{UNOPENED[break_it]}"):
        open_dataset(spec, split)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("break_it", UNREAD)
def test_a_shard_that_ends_early_stops_the_pass(
    tmp_path: Path, break_it: Any, train: bool, workers: int
) -> None:
    spec = make_shards(tmp_path)
    name = "train-0003.tar" if train else "val-0002.tar"
    break_it(tmp_path / name)
    with pytest.raises(UserError, match=rf"{tmp_path}/{name}{UNREAD[break_it]}") as caught:
        list(loader(spec, train=train, workers=workers))
    assert "\n" not in str(caught.value)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("train", [True, False])
def test_a_shard_with_more_samples_than_promised_stops_the_pass(tmp_path: Path, train: bool) -> None:
    spec = make_shards(tmp_path)
    name = "train-0003.tar" if train else "val-0002.tar"
    too_long(tmp_path / name)
    with pytest.raises(UserError, match=rf"{name} holds more than \d samples, but _info.json promises \d"):
        list(loader(spec, train=train, batch=3))  # divides the promised number of images


def test_compressed_shards_are_read(tmp_path: Path) -> None:
    spec = make_shards(tmp_path)
    zipped(tmp_path / "val-0001.tar")
    assert flat(list(loader(spec, train=False))) == list(range(9))


def test_a_file_of_excessive_size_is_not_read(tmp_path: Path) -> None:
    spec = make_shards(tmp_path)
    entry = tarfile.TarInfo("0000.png")
    entry.size = 10**12
    (tmp_path / "val-0000.tar").write_bytes(gzip.compress(entry.tobuf()))
    with pytest.raises(
        UserError, match=r"0000\.png has 1,000,000,000,000 bytes; a file may have 536,870,912"
    ):
        list(loader(spec, train=False))


def test_a_share_without_shards_is_refused(shards: str) -> None:
    with pytest.raises(UserError, match="has 4 shards, none for part 6"):
        next(open_dataset(shards, "train").read_shuffled(Share(5, 6), seed=0, epoch=0))  # type: ignore[attr-defined]


VTOK = """
import json, sys
from visualtokens.cli import main
for arguments in json.loads(sys.argv[1]):
    print(main(arguments), flush=True)
"""
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def options(spec: str, out: Path) -> list[str]:
    return ["train", "--model", "paca_vit_nano", "--data", spec, "--out", str(out), "--batch", "8"]


def test_broken_shards_end_training_and_evaluation_with_one_line(shards: str, tmp_path: Path) -> None:
    runs = [[*options(shards, tmp_path / "run"), "--epochs", "1"]]
    broken = [*product(["val"], UNOPENED), *product(["train", "val"], UNREAD)]
    for number, (split, break_it) in enumerate(broken):
        folder = tmp_path / str(number)
        folder.mkdir()
        spec = make_shards(folder)
        break_it(folder / f"{split}-0001.tar")
        runs.append([*options(spec, folder / "run"), "--epochs", "1"])
        runs.append(["eval", "--checkpoint", str(tmp_path / "run"), "--data", spec, "--split", split])
    done = subprocess.run(
        [sys.executable, "-c", VTOK, json.dumps(runs)],
        capture_output=True,
        text=True,
        timeout=300,
        env=ENVIRONMENT,
    )
    codes = [line for line in done.stdout.splitlines() if line.isdigit()]
    assert codes == ["0"] + ["2"] * (len(runs) - 1), done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(runs) - 1
    assert all("-0001.tar" in line for line in errors)
    assert "Traceback" not in done.stderr


def test_sigterm_ends_training_on_shards(shards: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        VTOK,
        json.dumps([[*options(shards, tmp_path / "run"), "--epochs", "99999"]]),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert process.stderr is not None
    while not (line := process.stderr.readline()).startswith("epoch 1/"):
        assert line, "ended before the first epoch"
    process.send_signal(signal.SIGTERM)
    out, log = process.communicate(timeout=300)
    assert out.endswith("\n143\n"), log
    assert "interrupted at step " in log
