"""``--data`` with its options, splits and classes, from training to evaluation."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from visualtokens.data import open_dataset

Vtok = Callable[..., tuple[int, str, str]]


def write_digits(folder: Path, *, classes: str, count: int, split: str = "train") -> None:
    """Write the first digits of each class as ``<folder>/<digit>/<row>.png``."""
    digits = open_dataset("digits", split)  # type: ignore[arg-type]
    for name in classes:
        (folder / name).mkdir(parents=True)
        rows = [i for i, label in enumerate(digits.labels) if label == int(name)]  # type: ignore[attr-defined]
        for row in rows[:count]:
            digits[row][0].save(folder / name / f"{row:04}.png")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders without splits."""
    root = tmp_path_factory.mktemp("photos with spaces")
    write_digits(root, classes="013", count=10)
    return root


@pytest.fixture(scope="module")
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run on a part of the photos, and what it printed."""
    from contextlib import redirect_stdout
    from io import StringIO

    from visualtokens.cli import main

    out = tmp_path_factory.mktemp("data") / "run"
    with redirect_stdout(StringIO()) as printed:
        assert main(["train", *options(photos, out), "--epochs", "1", "--val_share", "0.3"]) == 0
    return out, printed.getvalue()


def options(data: Path, out: Path) -> list[str]:
    return [
        *("--model", "paca_vit_nano", "--data", f"folder:{data}", "--out", str(out), "--batch", "8"),
        *("--device", "cpu"),
    ]


def test_evaluation_has_the_images_that_training_held_out(
    vtok: Vtok, photos: Path, trained: tuple[Path, str]
) -> None:
    out, printed = trained
    command = printed.partition("try: ")[2].partition("try: ")[0]
    assert command == f"vtok eval --checkpoint {out} --data 'folder:{photos}' --val_share 0.3\n"
    code, text, _ = vtok(*shlex.split(command)[1:], "--json")
    document = json.loads(text)
    assert (code, document["images"], document["classes"]) == (0, 9, ["0", "1", "3"])
    epoch = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    assert document["loss"] == pytest.approx(epoch["val_loss"], rel=1e-5)
    code, _, err = vtok("eval", "--checkpoint", out, "--data", f"folder:{photos}")
    assert code == 2
    assert "give --val_share 0.2 to hold out a fifth of the images" in err


def test_a_run_resumes_with_the_same_share(vtok: Vtok, photos: Path, trained: tuple[Path, str]) -> None:
    more = (*options(photos, trained[0]), "--epochs", "2", "--resume")
    code, _, err = vtok("train", *more, "--val_share", "0.2")
    assert (code, "has val_share=0.3, not 0.2; resume it with the same options" in err) == (2, True)
    code, _, err = vtok("train", *more, "--data_args.val_share", "0.3")
    assert (code, "has val_share=0.3, not None" in err) == (2, True)
    new = photos / "3" / "new.png"
    new.write_bytes((photos / "3" / "0003.png").read_bytes())
    code, _, err = vtok("train", *more, "--val_share", "0.3")
    new.unlink()
    assert (code, "changed: train has 22 images instead of 21" in err) == (2, True)


def test_a_test_set_may_have_some_of_the_classes(
    vtok: Vtok, trained: tuple[Path, str], tmp_path: Path
) -> None:
    write_digits(tmp_path / "test", classes="31", count=4, split="val")
    given = ("eval", "--checkpoint", trained[0], "--data", f"folder:{tmp_path}")
    code, text, _ = vtok(*given, "--split", "test", "--json")
    document = json.loads(text)
    assert (code, document["split"], document["classes"]) == (0, "test", ["0", "1", "3"])
    assert [sum(row) for row in document["confusion"]] == [0, 4, 4]
    code, text, _ = vtok(*given, "--split", "test")
    assert sorted(row.split()[0] for row in text.splitlines()[3:]) == ["1", "3"]
    code, _, err = vtok(*given)
    assert (code, "has no val/ folder, only test/; give --split test, or add" in err) == (2, True)
    write_digits(tmp_path / "test", classes="7", count=1)
    code, _, err = vtok(*given, "--split", "test")
    assert code == 2
    assert err == (
        f"error: folder:{tmp_path} has classes that {trained[0]} was not trained for: 7; "
        "remove them from the data, or give another checkpoint\n"
    )


def test_a_list_of_images(vtok: Vtok, photos: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    rows = [f"{path.relative_to(photos)};{path.parent.name}" for path in sorted(photos.glob("[01]/*.png"))]
    (tmp_path / "list.csv").write_text("\n".join(["file;digit", *rows]))
    columns = ("--data_args.path", "file", "--data_args.label", "digit", "--data_args.root", photos)
    data = ("--data", f"csv:{tmp_path / 'list.csv'}", "--val_share", "1")
    code, text, _ = vtok("eval", "--checkpoint", trained[0], *data, *columns, "--json")
    assert (code, json.loads(text)["images"]) == (0, 20)
    code, _, err = vtok("eval", "--checkpoint", trained[0], *data, *columns[:4])
    assert (code, "20 of 20 images" in err, "--data_args.root" in err) == (2, True, True)
    new = ("train", "--model", "paca_vit_nano", "--epochs", "1", "--batch", "8", "--out", tmp_path / "run")
    code, text, _ = vtok(*new, *data[:3], "0.2", *columns)
    assert code == 0
    given = f"--data_args.path file --data_args.label digit --data_args.root '{photos}' --val_share 0.2"
    assert f"--data csv:{tmp_path}/list.csv {given}\n" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "--val_share", "0"], "val_share=0.0 must be more than 0 and at most 1"),
        (["eval", "--val_share", "2"], "val_share=2.0 must be more than 0 and at most 1"),
        (["eval", "--val_share", "some"], "--val_share must be a number, not 'some'"),
        (["eval", "--val_share", "0.2", "--data_args.val_share", "0.3"], "are the same option"),
        (["eval", "--data_args.seed", "3"], "data_args may not hold 'seed'; leave it out"),
        (["eval", "--data_args.size", "3"], "digits has no options; leave size out"),
        (["eval", "--val_share", "0.2"], "val_share is no option of digits, which has splits of its own"),
        (["eval", "--split", "test"], "digits has no test split, only train, val"),
        (["eval", "--split", "tset"], "unknown --split 'tset'; did you mean 'test'?"),
        (["explain", "--faithfulness", "--split", "test"], "digits has no test split, only train, val"),
        (["explain", "--faithfulness", "--val_share", "0.2"], "val_share is no option of digits"),
    ],
)
def test_wrong_options_of_the_data(vtok: Vtok, checkpoint: Path, arguments: list[str], message: str) -> None:
    code, _, err = vtok(*arguments, "--checkpoint", checkpoint, "--data", "digits")
    assert code == 2
    assert message in err


def test_reduce_opens_the_same_data(vtok: Vtok, photos: Path) -> None:
    model = ("reduce", "deit_tiny_patch16_224", "--size", "32", "--keep", "0.5")
    code, _, err = vtok(*model, "--val_share", "0.2")
    assert (code, "val_share has no effect without --data; leave it out" in err) == (2, True)
    code, _, err = vtok(*model, "--data", f"folder:{photos}", "--val_share", "0.2", "--split", "test")
    assert (code, "has no test/ folder" in err) == (2, True)
