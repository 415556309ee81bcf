from __future__ import annotations

import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import pytest

from visualtokens import demo
from visualtokens.errors import UserError
from visualtokens.train import TrainConfig, train

from .explain.stubs import check_self_contained
from .train.helpers import at_step, history, signal_at


@pytest.fixture(autouse=True)
def no_measurement(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Skip the measurement of the inference speed, which takes seconds."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(demo, "_images_per_second", lambda *_: 1234.0)


def test_the_report_holds_the_results(tmp_path: Path) -> None:
    result = demo.run(tmp_path / "first run", epochs=1, progress=False, today=date(2031, 2, 3))
    page = check_self_contained(result.report.read_text(encoding="utf-8"))
    assert result.images == 360
    assert f"{result.accuracy:.1%}" in page.text
    assert "1,234" in page.text
    assert len(page.find("article")) == demo.SAMPLES
    assert any(line.startswith("✗") for line in page.text)  # after one epoch some are
    lines = [line for line in "".join(page.text).split("\n") if line]
    assert lines[-3:] == ["Model paca_vit_nano", "Checkpoint first run", "2031-02-03"]


def test_finished_demo_is_reported_again_but_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_samples", lambda *_: [])
    with monkeypatch.context() as patch:
        signal_at(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            demo.run(tmp_path / "demo", epochs=1, progress=False)
    first = demo.run(tmp_path / "demo", epochs=1, progress=False)
    (record,) = history(TrainConfig(out=str(tmp_path / "demo"), model="any", data="any"))
    assert (first.seconds, first.train_images_per_second) == (
        pytest.approx(record["seconds"]),
        pytest.approx(record["images_per_second"]),
    )
    first.report.unlink()
    at_step(monkeypatch, 0, lambda: pytest.fail("trained again"))
    assert demo.run(tmp_path / "demo", epochs=1, progress=False) == first
    assert first.report.exists()
    with pytest.raises(UserError, match="holds another run; give another --out"):
        demo.run(tmp_path / "demo", epochs=2, progress=False)


def test_killed_demo_resumes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_samples", lambda *_: [])
    code = f"from visualtokens import demo; demo.run({str(tmp_path)!r}, epochs=2, progress=False)"
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 300
    while not (tmp_path / "snapshots" / "epoch_0001_step_00000023").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    caplog.set_level("INFO")
    assert demo.run(tmp_path, epochs=2, progress=False).report.exists()
    assert "resumed after step 23" in caplog.text


def test_other_files_and_runs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(UserError, match="is not empty and holds no demo; give another --out"):
        demo.run(tmp_path, epochs=1, progress=False)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    options = dict(demo.CONFIG, epochs=1, lr=1e-3, out=str(tmp_path / "run"))
    signal_at(monkeypatch, 0)
    train(TrainConfig(**options), progress=False)  # type: ignore[arg-type]
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="holds another run; give another --out"):
        demo.run(tmp_path / "run", epochs=1, progress=False)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_the_model_learns_digits(tmp_path: Path) -> None:
    assert demo.run(tmp_path, progress=False).accuracy >= 0.985
