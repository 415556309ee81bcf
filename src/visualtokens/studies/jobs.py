"""The runs of a study: their options, folders and records. Runs with the same options are one run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visualtokens.errors import UserError
from visualtokens.files import CONFIG, read_json, write_atomically, write_config
from visualtokens.studies.study import INSERT, PER_SEED, REFERENCES, SEARCH, Options, Study, data_spec

RECORD = "record.json"  # written when the run is finished
JOB = "job.json"  # what the process of a run reads
RUN = "run"  # the output folder of the training
REDUCED = "reduced_vit"


@dataclass(frozen=True)
class Job:
    """One run: an arm with one seed, or a stage. ``needs`` are the jobs of the stages in its options."""

    label: str
    options: Options  # of `vtok train`, with names of stages and of data
    seed: int
    needs: Mapping[str, Job]  # by option

    @property
    def key(self) -> str:
        """The name of the folder: the same for the same options, whatever study they are in."""
        content = {
            "options": {name: value for name, value in self.options.items() if name not in REFERENCES},
            "seed": self.seed,
            "needs": {name: job.key for name, job in self.needs.items()},
        }
        text = json.dumps(content, sort_keys=True)
        return f"{self.label}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    @property
    def epochs(self) -> int:
        return 1 if INSERT in self.options else int(self.options.get("epochs", 10))

    def folder(self, out: Path) -> Path:
        return out / "runs" / self.key

    def record(self, out: Path) -> dict[str, Any] | None:
        """Return what the finished run recorded; None if it is not finished."""
        path = self.folder(out) / RECORD
        return read_json(path) if path.exists() else None

    def ready(self, out: Path) -> bool:
        """Return whether the stages that the run starts from are finished."""
        return all(job.record(out) is not None for job in self.needs.values())

    def epochs_done(self, out: Path) -> int:
        """Return the number of completed epochs, from the log of the training."""
        if (self.folder(out) / RECORD).exists():
            return self.epochs
        log = self.training_folder(out) / "log.jsonl"
        return min(len(log.read_text("utf-8").splitlines()), self.epochs) if log.exists() else 0

    def training_folder(self, out: Path) -> Path:
        return self.folder(out) / RUN / "soft" if SEARCH in self.options else self.folder(out) / RUN

    def checkpoint(self, out: Path) -> Path:
        """Return the folder that later runs start from."""
        return self.folder(out) / RUN / "start" if SEARCH in self.options else self.folder(out) / RUN

    def write(self, out: Path, paths: Mapping[str, str | None]) -> Path:
        """Write what the process of this run reads, and return its folder."""
        options = {name: value for name, value in self.options.items() if name != PER_SEED}
        data = data_spec(options.pop("data"), paths)
        for name, job in self.needs.items():
            options[name] = str(job.checkpoint(out).resolve())
        if options.get("model") == REDUCED:
            options["model_args"] = self._reduction(out)
        content = {"options": options, "data": data, "seed": self.seed}
        folder = self.folder(out)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / JOB, lambda path: write_config(path, content))
        return folder

    def _reduction(self, out: Path) -> Options:
        """Return the arguments of a reduced model: those of the stage it starts from, and the schedule."""
        start = self.needs["init"]
        config = read_json(start.checkpoint(out) / CONFIG)
        given = {"base": config["architecture"], **config.get("model_args", {})}
        if SEARCH in start.options:
            given["keep"] = config["training"]["keep"]
        return given | self.options.get("model_args", {})


def arm_jobs(study: Study, seeds: Iterable[int]) -> dict[tuple[str, int], Job]:
    """Return the runs of all arms, all arms of a seed before the next seed."""
    return {(arm, seed): _job(study, study.options(arm), seed) for seed in seeds for arm in study.arms}


def all_jobs(studies: Iterable[Study], seeds: int | None) -> list[Job]:
    """Return every run of the studies once, stages before the runs that need them."""
    found: dict[str, Job] = {}

    def add(job: Job) -> None:
        for stage in job.needs.values():
            add(stage)
        found.setdefault(job.key, job)

    for study in studies:
        for job in arm_jobs(study, range(seeds or study.seeds)).values():
            add(job)
    return list(found.values())


def take_records(jobs: Sequence[Job], out: Path, folder: Path) -> None:
    """Take over the records in a folder, so that these runs count as finished.

    ``jobs`` are those of :func:`all_jobs`. A stage is trained again if a run that is not recorded starts from
    it: a record has no weights.
    """
    needed: set[str] = set()
    for job in reversed(jobs):
        recorded = folder / f"{job.key}.json"
        if job.record(out) is None and recorded.exists() and job.key not in needed:
            write_record(job.folder(out) / RECORD, read_json(recorded))
        if job.record(out) is None:
            needed |= {stage.key for stage in job.needs.values()}


def give_record(job: Job, out: Path, folder: Path) -> None:
    """Copy the record of a finished run into a folder, without the paths of this machine."""
    record = job.record(out)
    assert record is not None
    write_record(folder / f"{job.key}.json", {name: record[name] for name in record if name != "job"})


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record at once, because it is read at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: write_config(file, record))


def _job(study: Study, options: Options, seed: int, label: str = "") -> Job:
    needs = {name: _stage_job(study, options[name], seed) for name in REFERENCES if name in options}
    own = options | {"data": study.data_of(options)}
    if own.get("model") == REDUCED and "init" not in needs:
        raise UserError(f"study {study.name}: a {REDUCED} starts from a stage; give it init")
    return Job(label or str(own.get("model", "run")), own, seed, needs)


def _stage_job(study: Study, name: str, seed: int) -> Job:
    options = study.stages[name]
    return _job(study, options, seed if options.get(PER_SEED) else 0, name)
