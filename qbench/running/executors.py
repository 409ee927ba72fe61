"""Where cells run: in this process, or side by side in processes that each see one GPU.

Both are executors of ``concurrent.futures``, so that another, such as a cluster's, can take their
place without the runner knowing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from concurrent.futures import ThreadPoolExecutor as Threads
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from queue import SimpleQueue
from typing import Any

from qbench.machine.devices import VISIBLE, gpu_of_environment
from qbench.machine.interrupt import interrupts_blocked
from qbench.plugins import Plugin, load, load_packages, loaded
from qbench.registry import Registry

# By name, for --executor: given "cpu" or "cuda", an executor of concurrent.futures, whose processes
# are of this host
EXECUTORS: Registry[Callable[[str], Executor]] = Registry("executor")
SECONDS_TO_END = 2.0  # that a worker process has after SIGTERM


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
    starts now and calls ``first``; where there is none, it starts with its first call. There will
    be ``at_most`` processes, which share the cores (None: as many as ``slots``).

    With ``idle_ends`` a process ends once no call is left for it while others are at work: a GPU
    takes a moment to let go of each, and nobody then waits for that at the end. For whoever
    submits all calls at once; one that comes later may have to wait for a new process.
    """

    def __init__(
        self,
        slots: Sequence[int],
        *,
        device: str,
        first: Callable[[], Any] | None = None,
        at_most: int | None = None,
        idle_ends: bool = False,
    ) -> None:
        assert slots
        _ignore_locks_of_the_dead()
        self._device, self._first = device, first
        self._threads_each = max(1, (os.cpu_count() or 1) // (at_most or len(slots)))
        self._idle_ends, self._lock = idle_ends, threading.Lock()
        self._waiting = self._at_work = 0  # calls
        self._slots: list[_Slot] = []
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        self.start(slots)

    def start(self, slots: Sequence[int]) -> None:
        """Further processes; before the first call is submitted."""
        for gpu in slots:
            of = gpu if self._device == "cuda" else None
            slot = _Slot(of, self._threads_each, self._first)
            self._slots.append(slot)
            self._free.put(slot)
            if self._first is not None:
                slot.submit(os.getpid)  # the process starts with its first call
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
            return slot.submit(fn, *args, **kwargs).result()
        finally:
            with self._lock:
                self._at_work -= 1
                idle = self._at_work > 0 and not self._waiting
            if idle and self._idle_ends:
                with contextlib.suppress(OSError):  # no room to prepare another: it stays
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

    def _end(self) -> None:
        self.terminate()
        for slot in self._slots:
            slot.end()


class _Slot:
    """One process, and another in its place when it has died."""

    def __init__(self, gpu: int | None, threads: int, first: Callable[[], Any] | None) -> None:
        self._initargs = (gpu, threads, loaded(), first)
        self._ended = False
        self._lock = threading.Lock()
        self.ending: list[SpawnProcess] = []  # were told to while nothing was left for them
        self._start()

    def _start(self) -> None:
        context = _Context()
        self._pool = ProcessPoolExecutor(
            1, mp_context=context, initializer=_settle, initargs=self._initargs
        )
        self._context = context

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        with self._lock, interrupts_blocked():
            if self._ended:
                raise BrokenExecutor("the run was ended")
            try:
                return self._pool.submit(fn, *args, **kwargs)
            except BrokenExecutor:  # what ran before has killed the process
                self._start()
                return self._pool.submit(fn, *args, **kwargs)

    def rest(self) -> None:
        """The process ends; a call that comes nevertheless has another."""
        with self._lock:
            started = self._context.started
            self._start()  # none runs before the next call
            for process in started:
                process.terminate()
            self.ending += started

    def terminate(self) -> None:
        with self._lock:
            self._ended = True
            for process in self._context.started:
                process.terminate()

    def end(self) -> None:
        self.terminate()
        with self._lock:
            for process in (*self.ending, *self._context.started):
                process.join(SECONDS_TO_END)
                process.kill()
            self._pool.shutdown(cancel_futures=True)


class _Context(SpawnContext):
    """Fresh interpreters, and a list of them: an executor does not show its processes."""

    def __init__(self) -> None:
        self.started: list[SpawnProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:
        process = SpawnProcess(*args, **kwargs)
        self.started.append(process)
        return process


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


def _settle(
    gpu: int | None, threads: int, plugins: tuple[Plugin, ...], first: Callable[[], Any] | None
) -> None:
    """In a worker process, before anything imports torch or is unpickled. ``first`` is called here
    and not sent as a call: what is sent waits for threads of a parent that is busy planning."""
    load(plugins)
    load_packages()
    # threads that wait for a core slow all of them down; read when torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if gpu is not None:
        os.environ[VISIBLE] = gpu_of_environment(gpu)
    threading.Thread(target=end_with_parent, daemon=True).start()
    if first is not None:
        with contextlib.suppress(Exception):  # said by the call that needs it
            first()


def end_with_parent() -> None:
    """In a thread of a child: one whose parent was killed must not go on, with a GPU's memory."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
