"""``vtok reproduce``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visualtokens.cli.verb import Failure, Result, Verb
from visualtokens.errors import UserError
from visualtokens.studies.study import Study, data_spec, find_study, needed_paths, study_names
from visualtokens.tables import table

if TYPE_CHECKING:
    from visualtokens.studies.jobs import Job
    from visualtokens.studies.runner import Outcome


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    """List the studies that test claims of the papers at small scale, or run some of them."""

    studies: list[str] = field(default_factory=list)
    """Names of studies, or YAML files with others; by default none, which lists all."""

    seeds: int | None = None
    """Number of seeds; by default that of each study, 3."""

    out: str = "studies"
    """Output folder for the runs. The same command resumes them; finished ones are not repeated."""

    results: str | None = None
    """Folder for the result and plot of each study; by default that of --out."""

    records: str | None = None
    """Folder for a copy of what finished runs found, one small file each. Runs that are recorded there, also
    on another machine, are not repeated."""

    cifar: str | None = None
    """CIFAR-10 as npz file with x_train, y_train, x_test and y_test, for the studies that need it."""

    pets: str | None = None
    """Folder of Oxford-IIIT Pets with trimaps, for the studies that need it."""

    bf16: bool = False
    """Train in bfloat16 mixed precision, about twice as fast on a processor with AVX512_BF16 or AMX. Runs in
    float32 are not taken over."""

    workers: int | None = None
    """Runs at once, of one thread each; by default one per core."""

    def __post_init__(self) -> None:
        for name in ("seeds", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value} must be at least 1")


def run(config: ReproduceConfig) -> Result:
    """List the studies, or run those that are named."""
    if not config.studies:
        return _list(config)
    studies = [_find(config, name) for name in config.studies]
    paths = {"cifar": config.cifar, "pets": config.pets}
    for name in needed_paths(studies):
        data_spec(name, paths)
    return _run(config, studies, paths)


def _find(config: ReproduceConfig, name: str) -> Study:
    study = find_study(name)
    return study.in_bfloat16() if config.bf16 else study


def _list(config: ReproduceConfig) -> Result:
    from visualtokens.studies.jobs import all_jobs

    rows, document = [], []
    for name in study_names():
        study = _find(config, name)
        jobs = all_jobs([study], config.seeds)
        done = sum(job.record(Path(config.out)) is not None for job in jobs)
        state = f"{done} of {len(jobs)} runs" if done else "not started"
        needs = ", ".join(f"--{path}" for path in needed_paths([study])) or "—"
        rows.append((name, f"{study.price:.0f}", needs, "finished" if done == len(jobs) else state))
        document.append(
            {
                "name": name,
                "claim": study.claim,
                "core_minutes": study.price,
                "needs": needed_paths([study]),
                "runs": [done, len(jobs)],
            }
        )
    claims = "\n".join(f"{each['name']}: {each['claim']}" for each in document)
    listed = table(rows, header=("study", "core-minutes", "needs", "state"), right=(1,))
    return Result(f"{listed}\n\n{claims}", {"studies": document})


def _run(config: ReproduceConfig, studies: list[Study], paths: dict[str, str | None]) -> Result:
    from visualtokens.studies import results
    from visualtokens.studies.jobs import all_jobs, arm_jobs, give_record, take_records
    from visualtokens.studies.runner import run_jobs

    out, folder = Path(config.out), Path(config.results or config.out)
    keys = {
        study.name: {job.key for job in arm_jobs(study, range(config.seeds or study.seeds)).values()}
        for study in studies
    }

    def save(job: Job | None = None) -> dict[str, dict[str, Any]]:
        found = {}
        for study in studies:
            if job is not None and job.key not in keys[study.name]:
                continue
            result = results.collect(study, out, seeds=config.seeds)
            if result is not None:
                results.save(result, folder)
                found[study.name] = result
        return found

    def after(job: Job) -> None:
        if config.records is not None:
            give_record(job, out, Path(config.records))
        save(job)

    jobs = all_jobs(studies, config.seeds)
    if config.records is not None:
        take_records(jobs, out, Path(config.records))
    outcome = run_jobs(jobs, out, paths=paths, workers=config.workers, after=after)
    found = save()
    if outcome.failed:
        raise Failure(_failures(outcome))
    lines = [results.text(result) for result in found.values()]
    if outcome.signal is not None:
        lines.append(
            f"interrupted with {outcome.finished} of {len(jobs)} runs finished; resume: same command"
        )
    code = 0 if outcome.signal is None else 128 + outcome.signal
    return Result("\n\n".join(lines), {"results": found, "signal": outcome.signal}, code)


def _failures(outcome: Outcome) -> str:
    logs = ", ".join(map(str, outcome.failed.values()))
    return f"{len(outcome.failed)} runs failed, see {logs}; the same command tries them again"


VERB = Verb(
    config=ReproduceConfig,
    run=run,
    example="vtok reproduce vt-recipes --out studies",
    positional="studies",
    light=True,
)
