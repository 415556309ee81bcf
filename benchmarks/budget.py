"""A limit in minutes for scripts that train: what is done by then is saved, and the same command goes on."""

from __future__ import annotations

import os
import signal
import threading


def stop_after(minutes: float | None) -> None:
    """Ask this process to stop, as a scheduler would, once the minutes are over; None sets no limit."""
    if minutes is not None:
        timer = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()
