"""Malformed files: every reader accepts a file or refuses it in one line, and neither hangs nor fills memory.

``python -m tests.test_fuzz png`` runs one format and prints its figures, and ``python -m tests.test_fuzz png
--case 1234`` shows what one file does.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import io
import json
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.damage import damage, repair_png, repair_zip
from tests.data.test_decode import encode
from tests.data.test_decode import samples as image_samples
from tests.squares import write_squares, write_voc, write_yolo
from visualtokens.data.decode import FORMATS as IMAGE_FORMATS
from visualtokens.data.decode import MASK_FORMATS, read_image, read_mask
from visualtokens.errors import UserError

CASES = 2000  # of each format
HANG = 120  # seconds for one file; a valid one takes less than 0.1
CEILING = 2**30  # bytes of memory above that before the first file


@dataclass(frozen=True)
class Sample:
    """A valid file, the folder it belongs to, and its reader."""

    folder: Path  # is copied for every case
    file: str  # in that folder; is damaged
    read: Callable[[Path], object]  # of the copied folder
    repair: Callable[[bytes], bytes] | None = None  # makes checksums right after half of the damage


@dataclass(frozen=True)
class Format:
    """Valid samples in a new folder, and the errors with which files may be refused."""

    samples: Callable[[Path], list[Sample]]
    allowed: tuple[type[Exception], ...] = (UserError,)
    needs: str = ""  # a library


# Formats.


def images(kind: str, root: Path) -> list[Sample]:
    """The samples of one of Pillow's formats."""
    found = []
    for name, data in image_samples().items():
        with Image.open(io.BytesIO(data)) as image:
            if image.format != kind:
                continue
        (root / name).mkdir()
        (root / name / "x").write_bytes(data)
        repair = repair_png if kind == "PNG" else None
        found.append(Sample(root / name, "x", lambda folder: read_image(folder / "x"), repair))
    return found


def masks(kind: str, root: Path) -> list[Sample]:
    values = np.random.default_rng(0).integers(0, 5, (20, 24), dtype=np.uint8)
    grey = Image.fromarray(values)
    pictures = {"grey": grey, "palette": grey.convert("P"), "bits": Image.fromarray(values > 2)}
    if kind in ("PNG", "TIFF"):
        pictures["deep"] = Image.fromarray(values.astype(np.uint16))
    if kind != "GIF":
        pictures["colours"] = grey.convert("RGB")
    found = []
    for name, picture in pictures.items():
        if kind == "PPM" and name == "palette":
            continue
        (root / name).mkdir()
        (root / name / "x").write_bytes(encode(picture, format=kind))
        repair = repair_png if kind == "PNG" else None
        found.append(Sample(root / name, "x", lambda folder: read_mask(folder / "x", colours="rgb"), repair))
    return found


def tiny_run(root: Path) -> Path:
    """The folder of a run of two epochs on a few digits."""
    from tests.digits import save_digits
    from visualtokens.train import TrainConfig, train

    data = save_digits(root.parent / "few.npz", train=32, val=16)
    out = str(root / "run")
    options = dict(model="paca_vit_nano", epochs=2, batch=16, device="cpu", resume="auto")
    train(TrainConfig(data=data, out=out, **options), progress=False)  # type: ignore[arg-type]
    return root / "run"


def checkpoints(file: str, root: Path) -> list[Sample]:
    from visualtokens.checkpoint import load

    run = tiny_run(root)
    shutil.rmtree(run / "snapshots")
    return [Sample(run, file, load)]


def runs(root: Path) -> list[Sample]:
    """The files that a resumed run reads; snapshots with and without digests."""
    run = tiny_run(root)
    old = root / "old"
    shutil.copytree(run, old)
    for digests in old.rglob("digests.json"):
        digests.unlink()
    read = functools.partial(resume, out=run)
    found = [Sample(run, name, read) for name in ("options.json", "log.jsonl", "steps.jsonl")]
    for folder in (run, old):
        files = [path for path in sorted((folder / "snapshots").rglob("*")) if path.is_file()]
        found += [Sample(folder, str(path.relative_to(folder)), read) for path in files]
    return found


def resume(folder: Path, *, out: Path) -> None:
    """Open the run as ``--resume`` does, up to the first step."""
    import torch

    from visualtokens.train import TrainConfig
    from visualtokens.train.distributed import join_team
    from visualtokens.train.run import Run

    options = json.loads((out / "options.json").read_text())
    device = torch.device("cpu")
    with join_team(device) as team, ExitStack() as stack:
        config = TrainConfig(**options | {"out": str(folder)})
        Run(config, device=device, team=team, progress=False)._open(stack)


def annotations(root: Path) -> list[Sample]:
    from visualtokens.data.coco import CocoObjects

    write_squares(root / "squares", train=2, val=3)

    def read(folder: Path) -> None:
        objects = CocoObjects(folder, "val")
        for index in range(len(objects)):
            objects[index]

    return [Sample(root / "squares", "annotations/instances_val2017.json", read)]


def labels(kind: str, root: Path) -> list[Sample]:
    """The files of YOLO's or Pascal VOC's layout."""
    from visualtokens.data import open_detection

    folder = root / kind
    if kind == "yolo":
        write_yolo(folder, train=2, val=3, polygons=True)
        files = ["labels/val/1.txt", "labels/val/2.txt", "data.yaml"]
    else:
        write_voc(folder, train=2, val=3)
        files = ["Annotations/val_1.xml", "Annotations/val_2.xml", "ImageSets/Main/val.txt"]

    def read(folder: Path) -> None:
        objects = open_detection(f"{kind}:{folder}", "val", masks=kind == "yolo")
        for index in range(len(objects)):
            objects[index]

    return [Sample(folder, file, read) for file in files]


def arrays(root: Path) -> list[Sample]:
    from visualtokens.data import open_dataset

    rng = np.random.default_rng(0)
    content = {f"x_{split}": rng.integers(0, 256, (6, 5, 4, 3), np.uint8) for split in ("train", "val")}
    content |= {f"y_{split}": rng.integers(0, 3, 6) for split in ("train", "val")}
    found = []
    for save in (np.savez, np.savez_compressed):
        folder = root / save.__name__
        folder.mkdir()
        save(folder / "x.npz", **content, classes=np.array(["a", "b", "c"]))

        def read(folder: Path) -> None:
            images = open_dataset(f"npz:{folder / 'x.npz'}", "val")
            for index in range(len(images)):
                images[index]

        found.append(Sample(folder, "x.npz", read, repair_zip))
    return found


def tables(kind: str, root: Path) -> list[Sample]:
    from tests.data.test_listed import write
    from visualtokens.data import open_dataset

    rows = [(f"{i}.png", "abc"[i % 3], ("train", "val")[i % 2]) for i in range(12)]
    write(root / "table", rows, kind=kind)

    def read(folder: Path) -> None:
        images = open_dataset(f"{kind}:{folder / f'table.{kind}'}", "val")
        for index in range(len(images)):
            images[index]

    return [Sample(root / "table", f"table.{kind}", read)]


def shards(file: str, root: Path) -> list[Sample]:
    from tests.data.test_timm_readers import make_shards
    from visualtokens.data import Share, open_dataset
    from visualtokens.data.decode import BadImage, decode_image

    (root / "shards").mkdir()
    make_shards(root / "shards")

    def read(folder: Path) -> None:
        stream: Any = open_dataset(f"wds:{folder}", "train")
        for encoded in stream.read(Share(0, 1)):
            try:
                decode_image(io.BytesIO(encoded.data), encoded.name)
            except BadImage:  # is skipped in training
                continue

    return [Sample(root / "shards", file, read)]


def recipes(root: Path) -> list[Sample]:
    from visualtokens.cli.parse import RECIPES, parse
    from visualtokens.cli.train import VERB

    given = sorted(RECIPES.glob("*.yaml"))
    given = [path for path in given if "vtok reduce" not in path.read_text("utf-8")]
    for path in given:
        (root / path.stem).mkdir()
        shutil.copy(path, root / path.stem / "x.yaml")
    options = ["--data", "digits", "--out", "run", "--model", "paca_vit_nano"]

    def read(folder: Path) -> None:
        parse("train", "", VERB, ["--config", str(folder / "x.yaml"), *options])

    return [Sample(root / path.stem, "x.yaml", read) for path in given]


FORMATS = {
    **{kind.lower(): Format(functools.partial(images, kind)) for kind in IMAGE_FORMATS},
    **{f"mask-{kind.lower()}": Format(functools.partial(masks, kind)) for kind in MASK_FORMATS},
    "config.json": Format(functools.partial(checkpoints, "config.json")),
    "model.safetensors": Format(functools.partial(checkpoints, "model.safetensors")),
    "run": Format(runs),
    "coco": Format(annotations),
    "yolo": Format(functools.partial(labels, "yolo")),
    "voc": Format(functools.partial(labels, "voc")),
    "npz": Format(arrays),
    "csv": Format(functools.partial(tables, "csv")),
    "parquet": Format(functools.partial(tables, "parquet"), needs="pyarrow"),
    "_info.json": Format(functools.partial(shards, "_info.json"), needs="webdataset"),
    "tar": Format(functools.partial(shards, "train-0000.tar"), needs="webdataset"),
    "recipe": Format(recipes),
}


# Running, in a process of its own, because a crash or a hang must not end the other tests.


def run_case(sample: Sample, case: int, name: str, work: Path) -> object:
    """Damage the sample and read it."""
    rng = random.Random(f"{name} {case}")
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(sample.folder, work)
    data = damage((sample.folder / sample.file).read_bytes(), rng)
    if sample.repair and rng.random() < 0.5:
        data = sample.repair(data)
    (work / sample.file).write_bytes(data)
    return sample.read(work)


def run_format(name: str, cases: range, root: Path) -> dict[str, Any]:
    """Read all cases; returns the figures, and the failures with their exceptions."""
    (root / "valid").mkdir()
    samples, work = FORMATS[name].samples(root / "valid"), root / "work"
    failures: list[str] = []
    decoded = refused = 0
    for sample in samples:  # each is valid
        shutil.copytree(sample.folder, work)
        sample.read(work)
        shutil.rmtree(work)
    before = peak = memory()
    for case in cases:
        (root / "case").write_text(str(case))
        faulthandler.dump_traceback_later(HANG, exit=True)
        sample = samples[case % len(samples)]
        try:
            run_case(sample, case, name, work)
            decoded += 1
        except FORMATS[name].allowed as error:
            refused += 1
            if not str(error).strip() or "\n" in str(error) or len(str(error)) > 1000:
                failures.append(f"case {case} ({sample.file}): not one line of text: {str(error)[:300]!r}")
        except Exception as error:  # noqa: BLE001 - is what this test looks for
            where = traceback.extract_tb(error.__traceback__)[-1]
            failures.append(f"case {case} ({sample.file}): {error!r:.300} in {where.filename}:{where.lineno}")
        faulthandler.cancel_dump_traceback_later()
        if memory() > max(peak, before + CEILING):
            failures.append(f"case {case} ({sample.file}): {(memory() - before) >> 20} MB")
        peak = max(peak, memory())
    figures = {"cases": len(cases), "decoded": decoded, "refused": refused, "MB": (peak - before) >> 20}
    return figures | {"failures": failures}


def memory() -> int:
    """The peak of this process's memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_malformed_files(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    if FORMATS[name].needs:
        pytest.importorskip(FORMATS[name].needs)
    command = [sys.executable, "-m", "tests.test_fuzz", name, "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if done.returncode != 0:
        case = (tmp_path / "case").read_text() if (tmp_path / "case").exists() else "none"
        pytest.fail(f"exit code {done.returncode} in case {case}: {done.stderr[-2000:]}")
    figures = json.loads(done.stdout)
    record_property(name, figures)
    assert not figures["failures"], "\n".join(figures["failures"][:20])
    assert figures["decoded"] + figures["refused"] == figures["cases"] == CASES
    assert figures["refused"] > CASES / 50  # the damage is real; a run resumes from an older snapshot


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("--case", type=int)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # Pillow warns about some of the damage
    logging.disable()
    folder = given.folder or Path(tempfile.mkdtemp())
    if given.case is None:
        sys.stdout.write(json.dumps(run_format(given.format, range(CASES), folder)) + "\n")
        return
    (folder / "valid").mkdir()
    samples = FORMATS[given.format].samples(folder / "valid")
    sample = samples[given.case % len(samples)]
    sys.stdout.write(f"{os.path.join(folder, 'work', sample.file)}\n")
    run_case(sample, given.case, given.format, folder / "work")


if __name__ == "__main__":
    main()
