"""A worker process: as its parent has it, and what it does itself.

Calls and answers go by a connection of its own, one after the other. It ends where the process
does, so that a death is seen at once and breaks nothing else.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from qbench.machine.devices import VISIBLE, gpu_of_environment
from qbench.machine.interrupt import interrupts_blocked
from qbench.plugins import Plugin, load, load_packages

SECONDS_TO_END = 2.0  # that a worker process has to be gone once it was told to end
THREADS = "OMP_NUM_THREADS"
GONE = (EOFError, OSError)


class First(NamedTuple):
    """What worker processes call before their first call. What it raises is said by the call that
    needs it."""

    alone: Callable[[], Any]  # in a process that is started by itself
    shared: Callable[[], Any] | None = None  # once, in the process that others are forked from
    forked: Callable[[], Any] | None = None  # in each of those


@dataclass(frozen=True, slots=True)
class Settings:
    """Of all worker processes of an executor."""

    threads: int  # of a process
    plugins: tuple[Plugin, ...]
    first: First | None

    def divide_cores(self) -> None:
        """In a process that was just started, before anything imports torch, which reads it.
        Threads that wait for a core slow all of them down."""
        os.environ.setdefault(THREADS, str(self.threads))

    def load_plugins(self) -> None:
        """In each worker process by itself: who knows what they start."""
        load(self.plugins)
        load_packages()


class Worker:
    """A process that is sent calls. It ends by a signal, or with the process that started it."""

    def __init__(self, connection: Connection, process: SpawnProcess | None = None) -> None:
        """``process``: None for one that another process has forked, which says its id."""
        self._connection, self._process = connection, process
        self.pid = process.pid if process is not None else None
        self._ready = False

    def wait(self) -> bool:
        """Whether it is ready for calls; False where it has died before."""
        if not self._ready:
            try:
                self.pid, self._ready = self._connection.recv(), True
            except GONE:
                return False
        return True

    def call(self, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What ``fn`` returns there, or raises. Raises BrokenExecutor where the process died."""
        request = pickle.dumps((fn, args, kwargs))
        try:
            self._connection.send_bytes(request)
            answer = self._connection.recv_bytes()
        except GONE:
            raise BrokenExecutor("a worker process has died") from None
        value, error, where = pickle.loads(answer)
        if error is not None:
            raise error from ElsewhereError(where)
        return value

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def end(self, until: float) -> None:
        """Once it has been told to end: at ``until`` (time.monotonic) it is killed."""
        if not self.ended(until - time.monotonic()):
            self._signal(signal.SIGKILL)
            self.ended(SECONDS_TO_END)

    def ended(self, seconds: float) -> bool:
        """Whether it has, waiting at most so long."""
        if self._process is not None:
            self._process.join(max(0.0, seconds))
            return not self._process.is_alive()
        # its end of the connection; what it has said before is left to whoever reads
        look = select.poll()
        look.register(self._connection, 0)
        return bool(look.poll(max(0.0, seconds) * 1000))

    def _signal(self, number: signal.Signals) -> None:
        """An id is of this process for as long as it is there."""
        if self.pid is not None and not self.ended(0.0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def spawned(settings: Settings, gpu: int | None) -> Worker:
    """A worker in a fresh interpreter. ``gpu``: the only one that it sees; None for the CPU."""
    ours, theirs = Pipe()
    with theirs, interrupts_blocked():
        process = get_context("spawn").Process(target=_work_alone, args=(theirs, settings, gpu))
        process.start()
    return Worker(ours, process)


def _work_alone(connection: Connection, settings: Settings, gpu: int | None) -> None:
    settings.load_plugins()
    settings.divide_cores()
    work(connection, gpu, settings.first.alone if settings.first else None)


def work(connection: Connection, gpu: int | None, first: Callable[[], Any] | None) -> None:
    """Answer calls until the connection ends, or the process that has started this one."""
    if gpu is not None:
        os.environ[VISIBLE] = gpu_of_environment(gpu)
    threading.Thread(target=end_with_parent, daemon=True).start()
    if first is not None:
        with contextlib.suppress(Exception):
            first()
    with contextlib.suppress(*GONE):
        connection.send(os.getpid())
        while True:
            connection.send_bytes(_answer(connection.recv_bytes()))


class ElsewhereError(Exception):
    """The traceback of an exception that was raised in a worker process: its cause here."""


def _answer(request: bytes) -> bytes:
    try:
        fn, args, kwargs = pickle.loads(request)
        return pickle.dumps((fn(*args, **kwargs), None, ""))
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> bytes:
    """An exception to raise elsewhere; in words, where it cannot be sent there."""
    where = f"in a worker process:\n{traceback.format_exc()}"
    try:
        found = pickle.dumps((None, error, where))
        pickle.loads(found)
    except Exception:
        found = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), where))
    return found


def end_with_parent() -> None:
    """In a thread of a child: one whose parent was killed must not go on, with a GPU's memory."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def end_all(workers: Sequence[Worker]) -> None:
    """Those that were told to end have, or are killed."""
    until = time.monotonic() + SECONDS_TO_END
    for worker in workers:
        worker.end(until)
