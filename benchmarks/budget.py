"""Time limit and CPU time of benchmark scripts that train."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path


def stop_after(minutes: float | None) -> None:
    """Send SIGTERM to this process after the given minutes, as a scheduler would; None sets no limit."""
    if minutes is not None:
        timer = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()


def core_minutes(out: Path, *, began: float) -> float:
    """CPU minutes of the run in ``out``, from ``time.process_time()`` at ``began`` until now.

    Earlier processes of the same run are included. CPU time does not depend on the load of the machine.
    """
    file = out / "core_minutes.txt"
    before = float(file.read_text()) if file.exists() else 0.0
    total = before + (time.process_time() - began) / 60
    file.write_text(str(total))
    return round(total, 1)
