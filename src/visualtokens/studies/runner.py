"""Runs the trainings of studies: one process and one thread each, as many at once as there are cores.

Every run resumes from its last snapshot, and finished runs are recorded and never repeated, so the runner can
be stopped or killed at any moment and started again with the same result.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from visualtokens.errors import UserError
from visualtokens.processes import Stop, catch_signals
from visualtokens.progress import Progress
from visualtokens.studies.jobs import Job
from visualtokens.train.lock import lock

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.2
LOG = "log.txt"
WORKER = (
    sys.executable,
    "-m",
    "visualtokens.studies.worker",
)  # the process of a run; takes its folder and our id
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass
class Outcome:
    """What a call of :func:`run_jobs` achieved."""

    finished: int  # runs that are recorded
    failed: dict[str, Path] = field(default_factory=dict)  # the last line of the log, and the log, by run
    signal: int | None = None  # that stopped the runner


def run_jobs(
    jobs: Sequence[Job],
    out: Path,
    *,
    paths: Mapping[str, str | None],
    workers: int | None = None,
    after: Callable[[Job], object] = lambda job: None,
    shown: bool | None = None,
) -> Outcome:
    """Run the jobs that are not finished, in order, each as soon as its stages are; call ``after`` each.

    ``paths`` are those of the data. SIGINT and SIGTERM stop all runs, with snapshots. A run that fails does
    not stop the others.
    """
    if workers is not None and workers < 1:
        raise UserError(f"workers={workers} must be at least 1")
    out.mkdir(parents=True, exist_ok=True)
    with lock(out), catch_signals() as stop:
        queue = Queue(jobs, out, paths=paths)
        total, done = sum(job.epochs for job in jobs), queue.epochs_done()
        report = Progress("studies", total=total, done=done, unit="epoch", shown=shown, rated=False)
        with report as progress, queue.stopping():
            while queue.step(workers or _cores(), after) and not stop:
                _show(progress, queue)
                time.sleep(POLL_SECONDS)
            _show(progress, queue)
        return queue.outcome(stop)


def _show(progress: Progress, queue: Queue) -> None:
    for _ in range(queue.epochs_done() - progress.done):
        progress.advance(note=queue.state)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Queue:
    """The jobs that wait, run and failed."""

    def __init__(self, jobs: Sequence[Job], out: Path, *, paths: Mapping[str, str | None]) -> None:
        self.jobs, self.out, self.paths = jobs, out, paths
        self.waiting = [job for job in jobs if job.record(out) is None]
        self.running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}
        self.failed: dict[str, Path] = {}
        self._epochs = {job.key: job.epochs_done(out) for job in jobs}

    def epochs_done(self) -> int:
        self._epochs |= {key: job.epochs_done(self.out) for key, (job, _) in self.running.items()}
        return sum(self._epochs.values())

    def state(self) -> str:
        """Return what runs now as text."""
        names = ", ".join(job.label for job, _ in self.running.values())
        return f"{len(self.waiting)} runs wait, now {names or 'none'}"

    def step(self, workers: int, after: Callable[[Job], object]) -> bool:
        """Collect the runs that ended and start others; return whether any is left."""
        for key, (job, process) in list(self.running.items()):
            if process.poll() is None:
                continue
            del self.running[key]
            self._epochs[key] = job.epochs_done(self.out)
            if job.record(self.out) is None:
                self._fail(job)
            else:
                after(job)
        while len(self.running) < workers:
            ready = next((job for job in self.waiting if job.ready(self.out)), None)
            if ready is None:
                break
            self.waiting.remove(ready)
            self.running[ready.key] = ready, self._start(ready)
        return bool(self.running)

    def _start(self, job: Job) -> subprocess.Popen[bytes]:
        folder = job.write(self.out, self.paths)
        command = [*WORKER, str(folder), str(os.getpid())]
        with (folder / LOG).open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | ONE_THREAD
            )

    def _fail(self, job: Job) -> None:
        log = job.folder(self.out) / LOG
        self.failed[job.key] = log
        lines = log.read_text("utf-8", errors="replace").splitlines()
        logger.warning("%s failed: %s (see %s)", job.key, lines[-1] if lines else "no output", log)

    @contextlib.contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop what still runs at the end of the block, and wait until it has saved its state."""
        try:
            yield
        finally:
            for _, process in self.running.values():
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
            for _, process in self.running.values():
                process.wait()

    def outcome(self, stop: Stop) -> Outcome:
        finished = sum(job.record(self.out) is not None for job in self.jobs)
        return Outcome(finished, self.failed, stop.signal)
