"""``vtok predict``."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from visualtokens.cli.output import (
    SHOWN,
    checkpoint_files,
    log_header,
    refuse_overwriting,
    warn_unreadable,
)
from visualtokens.cli.stream import track_images, unique_names
from visualtokens.cli.terminal import write_error
from visualtokens.cli.verb import Predicted, Result, Stream, Verb, options_of_task
from visualtokens.errors import UserError
from visualtokens.progress import count, header
from visualtokens.tables import printable

if TYPE_CHECKING:
    from visualtokens.data.decode import BadImage
    from visualtokens.data.walk import Share
    from visualtokens.predict import Images, Merged
    from visualtokens.predict.formats import Format
    from visualtokens.tasks import Checkpoint, Task

logger = logging.getLogger(__name__)

# The others depend on the task.
COMMON = ("images", "checkpoint", "onnx", "out", "format", "overwrite", "batch", "workers", "share", "device")
PICTURES = "predictions"
COUNTS = ("images", "unreadable", "missing")  # of a merged file


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """Print or save what a checkpoint predicts for your images; segmentations and detections are drawn."""

    images: list[str]
    """Image files, folders, patterns such as 'photos/**/*.jpg', wds:PATH for tar shards, or - for a list of
    files on standard input."""

    checkpoint: str | None = None
    """Checkpoint folder that `vtok train --out` wrote, or hf-hub:ORGANIZATION/NAME."""

    onnx: str | None = None
    """Instead of a checkpoint: ONNX file that `vtok export` wrote; runs without torch."""

    top: int = 5
    """Classification: number of classes to print, most probable first."""

    out: str | None = None
    """File for the results: .jsonl, .csv, .parquet or .txt. The same command continues it after an
    interruption. Segmentation and detection: without such an ending, the folder of --pictures."""

    format: Literal["text", "jsonl", "csv", "parquet"] | None = None
    """Format of the results: text, jsonl, csv or parquet; by default that of the ending of --out, or
    text."""

    overwrite: bool = False
    """Replace the file of --out instead of continuing it."""

    pictures: str | None = None
    """Segmentation and detection: folder for the pictures; by default predictions, or none with --format or
    a file as --out."""

    batch: int | None = None
    """Images per step; by default 64 for classification and 1 for the others."""

    workers: int | None = None
    """Threads that read images; by default as many as torch uses, at most 8."""

    share: str | None = None
    """Part of the images to predict, such as 2/8 for the second of eight machines."""

    score: float | None = None
    """Detection: minimum score, from 0 to 1; by default 0.5."""

    scales: list[float] = field(default_factory=list)
    """Segmentation: average the predictions at these relative sizes, such as 0.75 1 1.25."""

    flip: bool = False
    """Segmentation: average with the prediction of the mirrored image."""

    window: int | None = None
    """Segmentation: side of a sliding window; by default the model sees the whole image."""

    device: str = "auto"
    """Device: auto (an accelerator if there is one), cpu, cuda, cuda:1 or mps."""

    def __post_init__(self) -> None:
        if self.checkpoint is None and self.onnx is None:
            raise UserError("--checkpoint must be given, or --onnx; --help shows an example")
        if self.checkpoint is not None and self.onnx is not None:
            raise UserError("--checkpoint and --onnx exclude each other; give one of them")
        for name in ("batch", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value} must be at least 1")
        part = re.fullmatch(r"(\d{1,9})/(\d{1,9})", self.share or "1/1")
        if part is None or not 1 <= int(part[1]) <= int(part[2]):
            raise UserError(f"share={self.share} is not a part of the images; give for example 2/8")


def run(config: PredictConfig) -> Stream | Result:
    """Predict all images. Unreadable ones do not stop the others; the exit code is then 1."""
    from visualtokens.predict import find_images, make_format
    from visualtokens.processes import end_with_torchrun, is_main_process

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    share = _share(config.share, rank=int(os.environ.get("RANK", "0")), processes=processes)
    end_with_torchrun()
    checkpoint = _open(config)
    task = checkpoint.task
    own = (*task.predict_options, *(("pictures",) if task.pictures else ()))
    options = options_of_task(config, task, common=COMMON, own=own)
    options.pop("pictures", None)
    output = _output(config, task)
    if processes > 1 and (output.file is None or config.overwrite):
        raise UserError(
            f"{processes} processes write into one file; give --out FILE"
            if output.file is None
            else f"--overwrite with {processes} processes is not possible; remove {config.out!r} before"
        )
    form = make_format(output.format, lambda: task.columns(checkpoint, **options))
    images = find_images(config.images, listed=_listed(config.images, processes), skip=output.pictures)
    if is_main_process():
        shown = output.file or output.pictures
        out = "" if shown is None else str(shown)
        _log_header(config, checkpoint, images=len(images), processes=processes, out=out)
    job = _Job(config, checkpoint, options, images, form, output)
    if output.file is None:
        return job.stream(range(share.part, len(images), share.parts))
    return job.save(output.file, share, processes)


def _open(config: PredictConfig) -> Any:
    """Return the checkpoint, or the exported model, which predicts in the same way."""
    if config.onnx is not None:
        if config.device not in ("auto", "cpu"):
            raise UserError(f"device={config.device} has no effect: ONNX files run on the CPU; leave it out")
        from visualtokens.export.runtime import open_model

        return open_model(config.onnx)
    from visualtokens.checkpoint import load, pick_device
    from visualtokens.train.distributed import local_device

    return load(str(config.checkpoint), device=str(local_device(pick_device(config.device))))


def _model_files(config: PredictConfig) -> list[Path]:
    """Return the files of the model."""
    return [Path(config.onnx)] if config.onnx is not None else checkpoint_files(str(config.checkpoint))


def _log_header(config: PredictConfig, model: Any, *, images: int, processes: int, out: str) -> None:
    data = count(images, "image")
    if config.onnx is None:
        log_header(str(config.checkpoint), model, data=data, processes=processes, out=out)
        return
    height, width = model.metadata.size
    rows = {
        "model": f"{config.onnx}, {Path(config.onnx).stat().st_size / 1e6:,.1f} MB, input {height}×{width}",
        "task": f"{model.task.name}, {count(len(model.classes), 'class')}",
        "data": data,
        "device": "cpu, onnxruntime",
    }
    header(rows | ({"output": out} if out else {}))


@dataclass(frozen=True)
class _Output:
    """Where the results go."""

    format: str
    file: Path | None  # None: stdout
    pictures: Path | None  # a folder


def _output(config: PredictConfig, task: Task) -> _Output:
    """Return where the results go; ``--out`` is a file, or the folder of the pictures."""
    from visualtokens.predict.formats import SUFFIXES

    out, pictures = config.out, config.pictures
    ending = SUFFIXES.get(Path(out or "").suffix.lower())
    is_folder = out is not None and (out.endswith(os.sep) or os.path.isdir(out))
    if out is not None and (is_folder or not (ending or config.format)):
        if not task.pictures or pictures is not None or config.format is not None:
            raise UserError(
                f"--out {out!r} is a folder; give a file"
                if is_folder
                else f"--out {out!r} has no known ending; give {', '.join(SUFFIXES)} or --format"
            )
        out, pictures = None, out
    if out and ending and config.format not in (None, ending):
        raise UserError(f"--out {out!r} and --format {config.format} contradict each other; give one of them")
    name = config.format or (ending if out else None) or "text"
    if out is None and name == "parquet":
        raise UserError("--format parquet needs a file; give --out FILE.parquet")
    if pictures is None and out is None and config.format is None and task.pictures:
        pictures = PICTURES
    return _Output(name, None if out is None else Path(out), None if pictures is None else Path(pictures))


def _share(given: str | None, *, rank: int, processes: int) -> Share:
    """Return the share of this process, one of torchrun's in the share of this machine."""
    from visualtokens.data.walk import Share

    part, parts = map(int, (given or "1/1").split("/"))
    return Share(part - 1 + parts * rank, parts * processes)


def _listed(inputs: list[str], processes: int) -> BinaryIO | None:
    """Return standard input; each of several processes opens it anew, which only a file allows."""
    if "-" not in inputs:
        return None
    if inputs.count("-") > 1:
        raise UserError("'-', the list on standard input, can be given once")
    if processes == 1:
        return sys.stdin.buffer
    if not stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode):
        raise UserError(f"{processes} processes cannot read one pipe; give the list as a file: - < list.txt")
    return open(f"/dev/fd/{sys.stdin.fileno()}", "rb")


@dataclass(frozen=True, eq=False)
class _Job:
    """What is predicted, and how."""

    config: PredictConfig
    checkpoint: Checkpoint
    options: dict[str, Any]  # of the task
    images: Images
    format: Format
    output: _Output

    def stream(self, positions: range) -> Stream:
        """Return the results of these images to be printed."""
        from visualtokens.predict.formats import LineFormat

        assert isinstance(self.format, LineFormat)
        formatted = self.output.format != "text"
        results = partial(self._predictions, positions, self._picture_names())
        return Stream(results, len(positions), self.format, formatted)

    def save(self, file: Path, share: Share, processes: int) -> Result:
        """Predict a share of the images into a file; the last process to end merges the results of all."""
        from visualtokens.data.decode import BadImage
        from visualtokens.predict import Results
        from visualtokens.processes import catch_signals, is_main_process

        config = self.config
        inputs = _model_files(config)
        refuse_overwriting([file], chain(inputs, self.images if config.overwrite else ()))
        names = self._picture_names()
        unreadable, bad, done = list[BadImage](), 0, 0
        with (
            catch_signals() as stop,
            Results(
                file,
                self.format,
                self.images,
                settings=self._settings(),
                share=share,
                overwrite=config.overwrite,
            ) as results,
        ):
            todo = len(results.todo)
            if results.done and is_main_process():
                logger.info("%s holds %d of %d images already", file, results.done, results.done + todo)
            predictions = self._predictions(map(int, results.todo), names, stop.__bool__)
            for result in track_images(predictions, todo, shown=None if is_main_process() else False):
                if isinstance(result, BadImage):
                    bad += 1
                    unreadable += [result][: SHOWN - len(unreadable)]
                    results.add(self.format.unreadable(result))
                else:
                    results.add(self.format.record(result.image, result.prediction, result.files))
                done += 1
            merged = results.finish()
        warn_unreadable(unreadable, total=bad, listed=f"{file} lists all")
        code = 1 if (merged.unreadable if merged else bad and processes == 1) else 0
        if done < todo and stop.signal is not None:
            write_error(f"interrupted after {done} of {count(todo, 'image')}; the same command continues\n")
            code = 128 + stop.signal
        silent = processes > 1 and (merged is None or not (merged.new or is_main_process()))
        document = {"saved": str(file)} | ({name: getattr(merged, name) for name in COUNTS} if merged else {})
        text = _summary(file, merged, left=todo - done, shared=share.parts > processes)
        return Result(text, document, code, silent)

    def _picture_names(self) -> list[str]:
        """Return a unique name for the pictures of every image, if there are any; none may be an input."""
        folder, kinds = self.output.pictures, self.checkpoint.task.pictures
        if folder is None:
            return []
        names = list(unique_names(self.images))
        pictures = (folder / f"{name}_{kind}.png" for name in names for kind in kinds)
        refuse_overwriting(pictures, chain(self.images, _model_files(self.config)))
        return names

    def _predictions(
        self, positions: Iterable[int], names: list[str], stop: Callable[[], bool]
    ) -> Iterator[Predicted | BadImage]:
        """Yield the predictions at these positions, and save the pictures under their names."""
        from visualtokens.data.decode import BadImage
        from visualtokens.predict import predict_images

        folder = self.output.pictures
        outcomes = predict_images(
            self.checkpoint,
            self.images,
            positions,
            batch=self.config.batch,
            workers=self.config.workers,
            keep_images=folder is not None,
            stop=stop,
            **self.options,
        )
        for outcome in outcomes:
            if isinstance(outcome.result, BadImage):
                yield outcome.result
                continue
            files: dict[str, str] = {}
            if folder is not None and outcome.image is not None:
                saved = outcome.result.save(outcome.image, folder, names[outcome.position])
                files = {kind: str(path) for kind, path in saved.items()}
            yield Predicted(outcome.name, outcome.result, files)

    def _settings(self) -> dict[str, Any]:
        """Return what the results depend on besides the images."""
        digest = hashlib.sha256()
        for path in _model_files(self.config):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        pictures = {} if self.output.pictures is None else {"pictures": str(self.output.pictures)}
        return {
            "checkpoint": digest.hexdigest(),
            "format": self.output.format,
            **pictures,
            **self.options,
        }


def _summary(file: Path, merged: Merged | None, *, left: int, shared: bool) -> str:
    """Return what the file holds now; ``left`` images of the share of this process are not done.

    ``shared`` is whether other commands have a share of the images.
    """
    name = printable(str(file))
    if merged is None:
        state = f"{count(left, 'image')} of this share left" if left else "the images of this share are done"
        return f"{state}; other processes still write {name}"
    if merged.missing:
        total = count(merged.images + merged.missing, "image")
        rest = "the other shares add theirs" if shared and not left else "the same command continues"
        return f"{merged.images:,} of {total} saved as {name}; {rest}"
    images = count(merged.images, "image")
    unreadable = f", {merged.unreadable:,} of them unreadable" if merged.unreadable else ""
    if not merged.new:
        return f"{name} is complete: {images}{unreadable}; --overwrite predicts them again"
    return f"{images} saved as {name}{unreadable}"


VERB = Verb(
    config=PredictConfig,
    run=run,
    example="vtok predict photos/ --checkpoint run/ --out results.csv",
    positional="images",
    groups={
        "images and model": ("images", "checkpoint", "onnx"),
        "results": ("out", "format", "overwrite", "pictures"),
        "predictions": ("top", "score", "scales", "flip", "window"),
        "hardware and speed": ("batch", "workers", "share", "device"),
    },
    light=lambda config: config.onnx is not None,
)
