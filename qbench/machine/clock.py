"""At which second of a command each stage began, in every one of its processes.

``QBENCH_CLOCK=clock.txt qbench run …`` appends a line a stage: seconds since the command began,
the
CPU seconds of its process so far, the process's id, and the stage. Nothing is written without it.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

FILE = "QBENCH_CLOCK"
BEGAN = "QBENCH_CLOCK_BEGAN"  # seconds since the epoch; worker processes inherit it


def mark(stage: str) -> None:
    """Say that ``stage`` begins now. Its first call in a command is second 0."""
    path = os.environ.get(FILE)
    if not path:
        return
    now = time.time()
    began = float(os.environ.setdefault(BEGAN, repr(now)))
    with suppress(OSError), open(path, "a", encoding="utf-8") as file:
        line = f"{now - began:8.2f}  {time.process_time():8.2f}  {os.getpid():>7}  {stage}"
        file.write(line + "\n")
