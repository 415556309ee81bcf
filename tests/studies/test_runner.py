"""The runner: order, failures and stops with scripts in place of trainings; a real study when killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from visualtokens.files import read_tensors
from visualtokens.studies import runner
from visualtokens.studies.jobs import RECORD, Job, all_jobs, give_record, take_records
from visualtokens.studies.runner import run_jobs
from visualtokens.studies.study import Study, find_study

# A process that notes its beginning and end, and waits for the file "go".
SCRIPT = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
root = folder.parents[1]
job = json.loads((folder / "job.json").read_text())
def note(what):
    with (root / "notes.txt").open("a") as file:
        file.write(f"{what} {folder.name}\\n")
note("begin")
if (root / "fail").exists() and job["seed"] == 0 and "48" in json.dumps(job):
    sys.exit("no such thing")
while (root / "wait").exists():
    time.sleep(0.02)
end = time.monotonic() + 10
while (root / "pairs").exists() and time.monotonic() < end:
    lines = (root / "notes.txt").read_text().splitlines()
    if sum(line.startswith("begin") for line in lines) % 2 == 0:
        break
    time.sleep(0.02)
time.sleep(0.05)
note("end")
(folder / "new").write_text(json.dumps({"seed": job["seed"]}))
(folder / "new").rename(folder / "record.json")  # at once, as the runner reads it at any moment
"""


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces trainings by the script; returns the output folder."""
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(runner, "WORKER", (sys.executable, "-S", str(script)))
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def notes(out: Path) -> list[list[str]]:
    return [line.split() for line in (out / "notes.txt").read_text().splitlines()]


def test_all_arms_of_a_seed_before_the_next(tiny: Study, quick: Path, few: Path) -> None:
    jobs = all_jobs([tiny], None)
    outcome = run_jobs(jobs, quick, paths={"cifar": str(few)}, workers=1, shown=False)
    assert (outcome.finished, outcome.failed, outcome.signal) == (4, {}, None)
    assert [key for what, key in notes(quick) if what == "begin"] == [job.key for job in jobs]


def test_as_many_at_once_as_workers(tiny: Study, quick: Path, few: Path) -> None:
    (quick / "pairs").touch()  # each run waits for another one
    run_jobs(all_jobs([tiny], 3), quick, paths={"cifar": str(few)}, workers=2, shown=False)
    running = most = 0
    for what, _ in notes(quick):
        running += 1 if what == "begin" else -1
        most = max(most, running)
    assert most == 2


def test_nothing_is_repeated(tiny: Study, quick: Path, few: Path) -> None:
    paths, seen = {"cifar": str(few)}, []
    run_jobs(all_jobs([tiny], 1), quick, paths=paths, shown=False)
    run_jobs(all_jobs([tiny], 2), quick, paths=paths, shown=False, after=lambda job: seen.append(job.seed))
    assert seen == [1, 1]
    begun = [key for what, key in notes(quick) if what == "begin"]
    assert len(begun) == len(set(begun)) == 4


def test_a_failure_does_not_stop_the_others(
    tiny: Study, quick: Path, few: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (quick / "fail").touch()
    outcome = run_jobs(all_jobs([tiny], None), quick, paths={"cifar": str(few)}, shown=False)
    (log,) = outcome.failed.values()
    assert (outcome.finished, log.read_text()) == (3, "no such thing\n")
    assert "failed: no such thing" in caplog.text
    (quick / "fail").unlink()
    outcome = run_jobs(all_jobs([tiny], None), quick, paths={"cifar": str(few)}, shown=False)
    assert (outcome.finished, outcome.failed) == (4, {})


def test_runs_wait_for_their_stages(quick: Path, few: Path) -> None:
    """A stage that fails leaves the runs that need it undone."""
    teacher = Job("teacher", {"data": "digits", "epochs": 1, "mark": 48}, 0, {})
    student = Job("student", {"data": "digits", "epochs": 1, "teacher": "teacher"}, 1, {"teacher": teacher})
    (quick / "fail").touch()
    assert run_jobs([student, teacher], quick, paths={}, shown=False).finished == 0
    assert [key for what, key in notes(quick)] == [teacher.key]
    (quick / "fail").unlink()
    assert run_jobs([student, teacher], quick, paths={}, shown=False).finished == 2
    assert [key for what, key in notes(quick) if what == "end"] == [teacher.key, student.key]


def test_recorded_runs_are_not_repeated_on_another_machine(quick: Path, tmp_path: Path) -> None:
    """Stages are trained again only for runs that are not recorded."""
    teacher = Job("teacher", {"data": "digits", "epochs": 1}, 0, {})
    needs = {"teacher": teacher}
    first, second = (Job("student", {"data": "digits", "epochs": 1, "lr": i}, 0, needs) for i in (1, 2))
    jobs, records = [teacher, first, second], tmp_path / "records"
    run_jobs(jobs, quick, paths={}, shown=False, after=lambda job: give_record(job, quick, records))
    assert sorted(path.stem for path in records.iterdir()) == sorted(job.key for job in jobs)
    elsewhere = tmp_path / "elsewhere"
    take_records(jobs, elsewhere, records)
    assert [job.record(elsewhere) for job in jobs] == [{"seed": 0}] * 3
    (records / f"{second.key}.json").unlink()
    half = tmp_path / "half"
    take_records(jobs, half, records)
    assert [job.record(half) for job in jobs] == [None, {"seed": 0}, None]


def test_a_signal_stops_all_runs(tiny: Study, quick: Path, few: Path) -> None:
    (quick / "wait").touch()
    command = (
        "import sys\n"
        "from pathlib import Path\n"
        "from visualtokens.studies import runner\n"
        "from visualtokens.studies.jobs import all_jobs\n"
        "from visualtokens.studies.study import read_study\n"
        f"runner.WORKER = {runner.WORKER!r}\n"
        f"jobs = all_jobs([read_study(Path({str(quick.parent / 'tiny.yaml')!r}))], None)\n"
        f"print(runner.run_jobs(jobs, Path({str(quick)!r}), paths={{'cifar': {str(few)!r}}}, shown=False))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
    while not (quick / "notes.txt").exists():
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate()
    assert "finished=0" in text
    assert f"signal={int(signal.SIGTERM)}" in text


def wait_for(holds: object, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_study_gives_the_same_result(tiny_file: Path, few: Path, tmp_path: Path) -> None:
    """Stopped at three random moments and started again: the same figures and weights, bit for bit."""

    def start(out: str) -> subprocess.Popen[bytes]:
        arguments = [str(tiny_file), "--cifar", str(few), "--out", str(tmp_path / out), "--workers", "2"]
        return subprocess.Popen(
            [sys.executable, "-m", "visualtokens", "reproduce", *arguments], stdout=subprocess.DEVNULL
        )

    assert start("whole").wait() == 0
    rng = random.Random()
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        process = start("killed")
        time.sleep(rng.uniform(4.0, 20.0))
        children = _children(process.pid)
        if process.poll() is None:
            process.send_signal(number)
            process.wait()
        wait_for(lambda: not any(map(_alive, children)))  # noqa: B023 - called before the next round
    assert start("killed").wait() == 0
    assert _figures(tmp_path / "killed") == _figures(tmp_path / "whole")
    jobs = sorted(path.parent for path in (tmp_path / "whole" / "runs").glob(f"*/{RECORD}"))
    assert len(jobs) == 4
    for folder in jobs:
        again = tmp_path / "killed" / "runs" / folder.name
        a, b = (read_tensors(each / "run" / "model.safetensors") for each in (folder, again))
        assert a.keys() == b.keys()
        assert all(a[name].equal(b[name]) for name in a)


def _figures(out: Path) -> dict[str, object]:
    result = json.loads((out / "tiny.json").read_text())
    del result["core_minutes"]
    return result


def _children(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except FileNotFoundError:
        return []


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_stages_searches_and_insertions(few: Path, tmp_path: Path, tiny_file: Path) -> None:
    """All kinds of runs: a base per seed, a search, fine-tuning with its schedule, insertion."""
    assert find_study("pooling-carry")  # the included studies use the same entries
    study = tmp_path / "pooling.yaml"
    study.write_text(POOLING)
    arguments = [str(study), "--cifar", str(few), "--out", str(tmp_path / "out")]
    subprocess.run([sys.executable, "-m", "visualtokens", "reproduce", *arguments], check=True)
    result = json.loads((tmp_path / "out" / "pooling.json").read_text())
    assert result["runs"] == [4, 4]
    assert result["arms"]["trained"]["keep"] == result["arms"]["inserted"]["keep"]
    assert set(result["stages"]) == {"searched"}
    assert result["arms"]["inserted"]["macs"] == result["arms"]["trained"]["macs"]


POOLING = """
claim: Training helps.
source: {paper: token-pooling, tables: ["2"], section: E}
data: cifar
recipe: {model: reduced_vit, size: 16, epochs: 1, batch: 16}
stages:
  base:
    data: cifar
    model: deit_tiny_patch16_224
    model_args: {patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}
    size: 16
    epochs: 1
    batch: 16
    per_seed: true
  searched: {data: cifar, init: base, search: 0.001, epochs: 1, batch: 16, per_seed: true}
arms:
  trained: {init: searched, model_args: {method: weighted_kmedoids}}
  inserted: {init: searched, insert: true, model_args: {method: weighted_kmedoids}}
seeds: 2
compare:
  - {claim: Training helps., table: "2", a: trained, b: inserted, expect: above}
price: 1
full_scale: vtok reduce
"""
