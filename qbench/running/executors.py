"""Where cells run: in this process, or side by side in processes that each see one GPU.

Both are executors of ``concurrent.futures``, so that another, such as a cluster's, can take their
place without the runner knowing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from concurrent.futures import ThreadPoolExecutor as Threads
from multiprocessing import resource_tracker
from queue import SimpleQueue
from typing import Any

from qbench.plugins import loaded
from qbench.registry import Registry
from qbench.running.template import FORKS, Template
from qbench.running.workers import First, Settings, Worker, end_all, spawned

# By name, for --executor: given "cpu" or "cuda", an executor of concurrent.futures, whose processes
# are of this host
EXECUTORS: Registry[Callable[[str], Executor]] = Registry("executor")


def register(name: str, make: Callable[[str], Executor]) -> None:
    """Give an executor a name that ``--executor`` can say."""
    EXECUTORS.add(name, make)


class SerialExecutor(Executor):
    """Runs each call when it is submitted, in this process."""

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Processes(Executor):
    """One process a slot. A process that dies breaks the future of its own call and no other:
    ``ProcessPoolExecutor`` would end its neighbours too, and break what still waits.

    ``slots`` holds the GPU of each process; on the CPU its numbers play no part. Every process
    starts now and does ``first``; where there is none, it starts with its first call. Several that
    start at once are forked from one that has done what they share, and end if that is killed.
    There will be ``at_most``
    processes, which share the cores (None: as many as ``slots``).

    With ``idle_ends`` a process ends once no call is left for it while others are at work: a GPU
    takes a moment to let go of each, and nobody then waits for that at the end. For whoever
    submits all calls at once; one that comes later may have to wait for a new process.
    """

    def __init__(
        self,
        slots: Sequence[int],
        *,
        device: str,
        first: First | None = None,
        at_most: int | None = None,
        idle_ends: bool = False,
    ) -> None:
        assert slots
        _ignore_locks_of_the_dead()
        threads = max(1, (os.cpu_count() or 1) // (at_most or len(slots)))
        self._device, self._settings = device, Settings(threads, loaded(), first)
        self._idle_ends, self._lock = idle_ends, threading.Lock()
        self._waiting = self._at_work = 0  # calls
        self._slots: list[_Slot] = []
        self._template: Template | None = None
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        self.start(slots)

    def start(self, slots: Sequence[int]) -> None:
        """Further processes; before the first call is submitted."""
        first = self._settings.first
        several = len(slots) > 1 and first is not None and first.shared is not None
        if FORKS and several and self._template is None:
            self._template = Template(self._settings)
        for gpu in slots:
            of = gpu if self._device == "cuda" else None
            slot = _Slot(of, self._settings, self._template)
            self._slots.append(slot)
            self._free.put(slot)
            if first is not None:
                slot.start()
        self._threads = Threads(len(self._slots), thread_name_prefix="slot")

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        with self._lock:
            self._waiting += 1
        return self._threads.submit(self._call, fn, args, kwargs)

    def _call(self, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        with self._lock:
            self._waiting, self._at_work = self._waiting - 1, self._at_work + 1
        slot = self._free.get()  # as many threads as slots: one is always free
        try:
            return slot.call(fn, args, kwargs)
        finally:
            with self._lock:
                self._at_work -= 1
                idle = self._at_work > 0 and not self._waiting
            if idle and self._idle_ends:
                slot.rest()
            self._free.put(slot)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """With ``cancel_futures`` running calls are ended too, with their processes."""
        if cancel_futures:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._end()
        self._threads.shutdown(wait=wait)
        self._end()

    def terminate(self) -> None:
        """Tell every process to end, and wait for none: a GPU takes a moment to let go of one.
        Nothing can be submitted after that; ``shutdown`` waits for them."""
        for slot in self._slots:
            slot.terminate()
        if self._template is not None:
            self._template.terminate()

    def workers(self) -> list[Worker]:
        """Those there are, and those that were told to end."""
        return [worker for slot in self._slots for worker in slot.workers()]

    def _end(self) -> None:
        self.terminate()
        end_all(self.workers())
        if self._template is not None:
            self._template.end()


class _Slot:
    """One process, and another in its place when it has died."""

    def __init__(self, gpu: int | None, settings: Settings, template: Template | None) -> None:
        self._gpu, self._settings, self._template = gpu, settings, template
        self._lock = threading.Lock()
        self._ended = False
        self._worker: Worker | None = None
        self._ending: list[Worker] = []  # were told to while nothing was left for them

    def start(self, *, alone: bool = False) -> Worker:
        """A process from now on, which is not waited for; ``alone``: not of the template."""
        with self._lock:
            if self._ended:
                raise BrokenExecutor("the run was ended")
            forked = self._template.fork(self._gpu) if self._template and not alone else None
            self._worker = forked or spawned(self._settings, self._gpu)
            return self._worker

    def call(self, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Raises BrokenExecutor where the process dies, or none can be started."""
        worker = self._worker
        try:
            if worker is None or worker.ended(0.0):
                worker = self.start()
            if not worker.wait() and self._template and not self._template.lives():
                worker = self.start(alone=True)
        except OSError as error:
            raise BrokenExecutor(f"a worker process cannot be started: {error}") from error
        try:
            if not worker.wait():
                raise BrokenExecutor("a worker process has died while it started")
            return worker.call(fn, args, kwargs)
        except BrokenExecutor:
            self.rest()
            raise

    def rest(self) -> None:
        """The process ends; a call that comes nevertheless has another."""
        with self._lock:
            if self._worker is not None:
                self._worker.terminate()
                still = [worker for worker in self._ending if not worker.ended(0.0)]
                self._ending, self._worker = [*still, self._worker], None

    def terminate(self) -> None:
        with self._lock:
            self._ended = True
            if self._worker is not None:
                self._worker.terminate()

    def workers(self) -> list[Worker]:
        with self._lock:
            return [*self._ending, *([self._worker] if self._worker is not None else [])]


def _ignore_locks_of_the_dead() -> None:
    """Python's process that frees the locks of ended processes says so on the terminal; that
    worker processes are ended, not asked to end, is meant so."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before
