"""Time of scripts that train: a limit, at which what is done is saved, and what the training took."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path


def stop_after(minutes: float | None) -> None:
    """Ask this process to stop, as a scheduler would, once the minutes are over; None sets no limit."""
    if minutes is not None:
        timer = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()


def core_minutes(out: Path, *, began: float) -> float:
    """Minutes of the processor that the run in ``out`` took since ``time.process_time()`` was ``began``.

    Those of earlier processes that worked on the same run are added. It does not matter what else the
    machine did meanwhile.
    """
    file = out / "core_minutes.txt"
    before = float(file.read_text()) if file.exists() else 0.0
    total = before + (time.process_time() - began) / 60
    file.write_text(str(total))
    return round(total, 1)
