"""Resuming notices that the data changed behind the same name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.helpers import Make
from tests.train.test_run import make_folder
from visualtokens.errors import UserError
from visualtokens.train import TrainConfig, train
from visualtokens.train.snapshot import list_snapshots


def add_class(root: Path) -> None:
    for split in ("train", "val"):
        (root / split / "grey").mkdir()
        (root / split / "grey" / "0.png").write_bytes((root / split / "dark" / "0.png").read_bytes())


def move_to(name: str) -> Callable[[Path], object]:
    return lambda root: (root / "train" / "dark" / "0.png").rename(root / "train" / name)


def rename_class(root: Path) -> None:
    for split in ("train", "val"):
        (root / split / "dark").rename(root / split / "black")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (add_class, "3 classes instead of 2: 'grey' new"),
        (rename_class, "other classes: 'black' new, 'dark' missing"),
        (lambda root: (root / "train" / "dark" / "0.png").unlink(), "train has 7 images instead of 8"),
        (lambda root: (root / "val" / "dark" / "0.png").unlink(), "val has 7 images instead of 8"),
        (move_to("dark/first.png"), "train has other files"),
        (move_to("light/9.png"), "train has other files"),
    ],
)
def test_changed_folder_is_refused(
    config: Make, tmp_path: Path, change: Callable[[Path], object], problem: str
) -> None:
    options = dict(data=make_folder(tmp_path / "data", good=8, bad=0), augment=None, batch=4)
    train(config(**options, epochs=1))
    before = {path: path.read_bytes() for path in Path(config().out).rglob("*") if path.is_file()}
    change(tmp_path / "data")
    with pytest.raises(UserError) as caught:
        train(config(**options, epochs=2, resume=True))
    assert str(caught.value) == (
        f"the data of the run in {config().out!r} changed: {problem}; "
        "restore the data, or start again with --overwrite"
    )
    assert {path: path.read_bytes() for path in before} == before


def save_npz(path: Path, labels: list[int], *, side: int = 8, names: int = 10) -> str:
    images = np.zeros((len(labels), side, side), np.uint8)
    classes = [f"class {i}" for i in range(names)]
    np.savez(path, x_train=images, y_train=labels, x_val=images, y_val=labels, classes=classes)
    return f"npz:{path}"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"labels": [*range(9), 0]}, "train has other labels"),
        ({"side": 9}, "train has other labels"),
        ({"labels": list(range(9))}, "train has 9 images instead of 10"),
        ({"names": 11}, "11 classes instead of 10: 'class 10' new"),
    ],
    ids=str,
)
def test_changed_arrays_are_refused(
    config: Make, tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    file, labels = tmp_path / "data.npz", list(range(10))
    data = save_npz(file, labels)
    train(config(data=data, epochs=1))
    save_npz(file, **({"labels": labels} | changes))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"changed: {problem}; restore the data"):
        train(config(data=data, epochs=2, resume=True))
    save_npz(file, labels)
    assert len(train(config(data=data, epochs=2, resume=True)).history) == 2


def forget_data(settings: TrainConfig) -> None:
    """Turn the last snapshot into an older one, without fingerprint and digests."""
    folder = list_snapshots(Path(settings.out))[-1]
    state = torch.load(folder / "state.pt", weights_only=True)
    state.pop("data", None)
    torch.save(state, folder / "state.pt")
    (folder / "digests.json").unlink(missing_ok=True)


def test_older_snapshot_resumes_if_it_fits(config: Make, tmp_path: Path) -> None:
    data = save_npz(tmp_path / "data.npz", list(range(10)))
    train(config(data=data, epochs=1))
    forget_data(config())
    save_npz(tmp_path / "data.npz", [*range(9), 0])
    assert len(train(config(data=data, epochs=2, resume=True)).history) == 2
    forget_data(config())
    save_npz(tmp_path / "data.npz", list(range(10)), names=11)
    with pytest.raises(UserError, match=r"the snapshot does not fit the model: .*--overwrite") as caught:
        train(config(data=data, epochs=3, resume=True))
    assert "\n" not in str(caught.value)
