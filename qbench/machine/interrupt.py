"""Ctrl-C ends a command within two seconds, whatever it is doing. Imports nothing slow.

Python raises KeyboardInterrupt between two steps of the main thread, in whatever code runs. Long
steps, as products of large matrices, let it wait; libraries catch it now and then: while they are
imported, in a callback, where an object is freed. So a thread of our own hears of the signal too,
and ends who is still there a moment after. Nothing is lost: files are written whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading

STOPPED = "stopped; finished cells are kept, run the same command to go on"
CODE = 130  # as of a process that SIGINT ended
SECONDS = 1.5  # to end in good order


def settle_interrupts() -> None:
    """From now on. For the main thread of a process that is a command."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)  # written to at once, by no Python code
    terminal = os.dup(2)
    threading.Thread(target=_watch, args=(heard, terminal), name="interrupt", daemon=True).start()


def _watch(heard: int, terminal: int) -> None:
    while signal.SIGINT not in os.read(heard, 64):
        pass
    select.select([heard], [], [], SECONDS)  # a second time: at once
    _end(terminal)


def _end(terminal: int) -> None:
    with contextlib.suppress(Exception):
        os.write(terminal, f"{STOPPED}\n".encode())
    if "multiprocessing.process" in sys.modules:
        from multiprocessing import active_children

        with contextlib.suppress(Exception):
            for child in active_children():
                child.kill()
    os._exit(CODE)
