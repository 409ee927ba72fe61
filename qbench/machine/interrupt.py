"""Ctrl-C ends a command within two seconds, whatever it is doing. Imports nothing slow.

Python raises KeyboardInterrupt between two steps of the main thread, in whatever code runs. Long
steps, as products of large matrices, let it wait; libraries catch it now and then: while they are
imported, in a callback, where an object is freed. So a thread of our own hears of the signal too,
and ends who is still there a moment after. No thread runs while a large library is mapped, which
takes seconds on a busy machine: a process of our own stands by for that, forked before there is
anything to copy. Nothing is lost: files are written whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator

STOPPED = "stopped; finished cells are kept, run the same command to go on"
CODE = 130  # as of a process that SIGINT ended
SECONDS = 1.0  # to end in good order
LATEST = 1.7  # for the thread to end it


def settle_interrupts() -> None:
    """From now on. For the main thread of a process that is a command, before it has others."""
    heard, told = os.pipe()
    passed_on, passing = os.pipe()
    terminal = os.dup(2)
    _stand_by(heard, passing, terminal, without=(told, passed_on))
    os.close(heard)
    os.close(passing)
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)  # written to at once, by no Python code
    threading.Thread(
        target=_watch, args=(passed_on, terminal), name="interrupt", daemon=True
    ).start()


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """A process that is started in the body never sees Ctrl-C: its parent ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(heard: int, terminal: int) -> None:
    while signal.SIGINT not in (said := os.read(heard, 64)):
        if not said:
            return  # whoever stands by was killed
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


def _stand_by(heard: int, passing: int, terminal: int, without: tuple[int, ...]) -> None:
    """Fork the process that passes signals on to the thread, and ends this one where the thread
    cannot. It ends with this one."""
    command = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        if os.fork() == 0:
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all
                for number in (0, 1, 2, *without):
                    os.close(number)  # nobody waits for an end of output that this one holds
                _pass_on(heard, passing, terminal, command)
            finally:
                os._exit(0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _pass_on(heard: int, passing: int, terminal: int, command: int) -> None:
    ends = None
    while os.getppid() == command:
        wait = 60.0 if ends is None else max(0.0, ends - time.monotonic())
        if not select.select([heard], [], [], wait)[0]:
            if ends is not None:
                break
            continue
        if not (said := os.read(heard, 64)):
            return  # the command has ended
        with contextlib.suppress(OSError):
            os.write(passing, said)
        if signal.SIGINT in said and ends is None:
            ends = time.monotonic() + LATEST
    if os.getppid() == command:
        os.write(terminal, f"{STOPPED}\n".encode())
        os.kill(command, signal.SIGKILL)
