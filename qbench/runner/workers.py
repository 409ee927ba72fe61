"""Run cells in worker processes of this host, each a ``ProcessPoolExecutor`` of one process.

On a CPU processes are forked from Python's fork server, which imports what every cell needs once.
On GPUs, and without a fork server, each process imports by itself while the run plans.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from concurrent.futures import ThreadPoolExecutor as Threads
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from multiprocessing import (
    active_children,
    forkserver,
    get_context,
    parent_process,
    resource_tracker,
)
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

from qbench.errors import first_line
from qbench.machine import (
    CELLS_PER_GPU,
    VISIBLE,
    broken_device,
    cells_per_gpu,
    cores,
    interrupts_blocked,
    set_library_env,
    tidy_memory_seldom,
    visible_gpus,
    without_current_folder,
)

PRELOAD = "qbench.runner.preload"
SAFE_PATH = "PYTHONSAFEPATH"  # of Python
UNTIL_BEGUN = "until begun"  # its value until a worker begins, which removes it
LONGEST_FOLDER = 70  # bytes of the path of temporary files
# Python's lock goes to a thread that waited for the GPU or a file after 0.1 ms, not 5 ms: tasks are
# prepared while weights are quantized and others are scored, and judged then
SWITCH_SECONDS = 1e-4
_starting = threading.Lock()


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for processes started in the body, unless the user set it. They
    import from the current folder only if this one does: sys.path is ours after some imports."""
    values = {name: value} | ({SAFE_PATH: UNTIL_BEGUN} if without_current_folder() else {})
    values = {key: text for key, text in values.items() if key not in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for key in values:
            os.environ.pop(key, None)


def _share(processes: int) -> AbstractContextManager[None]:
    """Give each of ``processes`` that start in the body, and its children, a share of the cores:
    too many threads slow each other down."""
    return _environment("OMP_NUM_THREADS", str(max(1, cores() // processes)))


def _start_server(processes: int) -> bool:
    """Start Python's fork server, unless it runs, which imports in the background what so many
    ``processes`` need; return whether this system has one."""
    # the path of its socket has at most 107 bytes
    short = len(os.fsencode(tempfile.gettempdir())) <= LONGEST_FOLDER
    if sys.platform != "linux" or not short:
        return False
    _start_tracker()
    with interrupts_blocked(), _share(processes):
        get_context("forkserver").set_forkserver_preload([PRELOAD])
        forkserver.ensure_running()
    return True


class LostExecutorError(BrokenExecutor):
    """A whole executor is gone, not only one of its processes; the message names the remedy."""


class Workers(Executor):
    """An executor with one process per slot. A process that dies breaks the future of its own call
    alone, and a new process takes its slot; one common pool would break the other calls too.

    ``slots`` holds the index of the one GPU that each process sees; on the CPU only its length
    counts.
    """

    def __init__(self, slots: Sequence[int], *, device: str) -> None:
        assert slots
        if device == "cpu":
            if _shares != [len(slots)]:  # or processes would have too few threads
                drop_early()
            _shares.clear()
        # transformers starts the GPU's driver when it is imported, and no fork can use it then
        self._forked = device == "cpu" and _start_server(len(slots))
        _start_tracker()
        method = "forkserver" if self._forked else "spawn"
        self._new_slot = partial(_Slot, method=method, processes=len(slots))
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        self._slots: list[_Slot] = []
        self._threads = Threads(len(slots), thread_name_prefix="slot")
        self._add(slots if device == "cuda" else [None] * len(slots))

    def _add(self, gpus: Sequence[int | None]) -> None:
        """Add a slot for a process on each of ``gpus``; the first on GPU 0 is that of
        ``start_early``."""
        for gpu in gpus:
            slot = _early.pop() if gpu == 0 and _early else self._new_slot(gpu)
            self._slots.append(slot)
            self._free.put(slot)

    @property
    def processes(self) -> int:
        """Return how many calls run at a time."""
        return len(self._slots)

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        """Call ``fn`` in the next free process; return its future, which raises BrokenExecutor if
        the process dies. ``fn``, arguments and result are pickled."""
        return self._threads.submit(self._call, fn, args, kwargs)

    def preload(self) -> None:
        """Start every process now and have it import what cells need, while the run plans.
        Processes of the fork server need not."""
        if not self._forked:
            for _ in self._slots:  # a call each: free slots come in turn
                self.submit(preload)

    def grow(self, gib: float, *, at_most: int) -> None:
        """Start more processes, ``at_most`` in all, if the GPUs have memory for more calls at a
        time that take ``gib`` each."""
        gpus = sorted({slot.gpu for slot in self._slots})
        per_gpu = cells_per_gpu(gib, len(gpus))
        more = [gpu for _ in range(per_gpu) for gpu in gpus][len(self._slots) : at_most]
        self._threads._max_workers += len(more)  # which each call reads anew
        self._add(more)
        for _ in more:
            self.submit(preload)

    def _call(self, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call ``fn`` in the process of a free slot; return its result."""
        slot = self._free.get()  # as many threads as slots: one is always free
        try:
            return slot.call(fn, args, kwargs)
        finally:
            self._free.put(slot)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for running and waiting calls, then end the processes. With ``cancel_futures``, or
        without ``wait``, processes are killed at once: running calls raise BrokenExecutor."""
        self._threads.shutdown(wait=wait and not cancel_futures, cancel_futures=cancel_futures)
        for slot in self._slots:
            slot.kill()


class _Slot:
    """A pool of one process, one of ``processes`` that share the cores; replaced when the process
    dies, until the slot is killed."""

    def __init__(self, gpu: int | None, *, method: str, processes: int) -> None:
        self.gpu, self._method, self._of = gpu, method, processes
        self._killed = False
        self._pool: ProcessPoolExecutor | None = None
        self._processes: set[BaseProcess] = set()

    def call(self, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return ``fn(*args, **kwargs)``, computed in the slot's process; a process whose GPU is
        broken is replaced afterwards. Raises BrokenExecutor if the process dies."""
        try:
            if self._pool is None:
                self._pool = self._start()
            result, broken = self._pool.submit(_with_state, fn, args, kwargs).result()
            if broken:  # the next call gets a process whose GPU works
                self._pool.shutdown(wait=False)
                self._pool = None
            return result
        except BrokenExecutor:
            if self._pool is not None:
                self._pool.shutdown(wait=False)
            self._pool = None
            raise
        except (OSError, EOFError) as error:  # EOFError: the fork server died
            if self._pool is not None:
                raise  # the call's own
            raise BrokenExecutor(
                f"a worker process cannot be started: {first_line(error)}; try fewer --workers"
            ) from (error)

    def _start(self) -> ProcessPoolExecutor:
        """Return a new pool of one process. Raises BrokenExecutor if the run has ended."""
        if self._killed:
            raise BrokenExecutor("the run was ended")
        pool = ProcessPoolExecutor(
            1, mp_context=get_context(self._method), initializer=begin,
            initargs=(self.gpu,),
        )  # fmt: skip
        # one at a time, to tell the processes of slots apart
        with _starting, interrupts_blocked(), _share(self._of):
            before = set(active_children())
            pool.submit(os.getpid)
            self._processes = set(active_children()) - before
        if self._killed:  # meanwhile
            self.kill()
        return pool

    def kill(self) -> None:
        """End the slot's process; no other is started."""
        self._killed = True
        for process in self._processes:
            process.kill()


_calls = itertools.count()
_early: list[_Slot] = []  # at most one, that no Workers has taken yet
_shares: list[int] = []  # of how many processes a fork server is that no Workers has taken yet


def start_early(words: Sequence[str]) -> None:
    """Start and preload the process on GPU 0 of the next ``Workers`` now, if there is a GPU, beside
    the imports of the command itself: nothing else before a cell takes as long as the process's
    own. On a CPU start the fork server of several processes. ``words``: of the command line.
    Whoever calls this calls ``drop_early`` at the end."""
    if "cpu" not in words and visible_gpus():
        _start_tracker()
        slot = _Slot(0, method="spawn", processes=CELLS_PER_GPU)
        slot._pool = slot._start()
        slot._pool.submit(preload)
        _early.append(slot)
    elif count := re.search(r" --workers[ =]0*([2-9]|[1-9]\d+) ", f" {' '.join(words)} "):
        _shares.extend([int(count[1])] * _start_server(int(count[1])))


def drop_early() -> None:
    """End the process or the fork server of ``start_early`` if no ``Workers`` has taken it."""
    while _early:
        _early.pop().kill()
    if _shares:
        _shares.clear()
        if pid := forkserver._forkserver._forkserver_pid:
            os.kill(pid, signal.SIGKILL)  # while it imports
        forkserver._forkserver._stop()


def _start_tracker() -> None:
    """Start Python's process that frees locks of ended ones, so that it does not warn of each
    killed worker."""
    with _environment("PYTHONWARNINGS", "ignore:resource_tracker"):
        resource_tracker.ensure_running()


def _with_state(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Call ``fn`` in a worker process; return its result, and whether the GPU is broken now."""
    if next(_calls) == 1:  # what the first left, of libraries above all, is looked through no more
        gc.collect()
        gc.freeze()
    return fn(*args, **kwargs), broken_device() is not None


def begin(gpu: int | None) -> None:
    """Prepare a worker process before its first call. ``gpu``: index of the GPU that it sees, None
    on the CPU."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    tidy_memory_seldom()
    if os.environ.get(SAFE_PATH) == UNTIL_BEGUN:
        del os.environ[SAFE_PATH]
    if gpu is not None:
        visible = os.environ.get(VISIBLE)
        os.environ[VISIBLE] = visible.split(",")[gpu] if visible else str(gpu)
        set_library_env()
        sys.setswitchinterval(SWITCH_SECONDS)
        threading.Thread(target=start_gpu, daemon=True).start()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # else all forks would draw the same


def start_gpu() -> None:
    """Load PyTorch's libraries, create the context in which it will use this process's first GPU,
    if there is one, and have the kernels loaded that every model runs. Together that takes as long
    as importing PyTorch, mostly without Python's lock: other threads import meanwhile."""
    if (torch := find_spec("torch")) and torch.origin:
        with suppress(OSError):  # said where it is imported
            ctypes.CDLL(os.path.join(os.path.dirname(torch.origin), "lib", "libtorch_python.so"))
    device, context = ctypes.c_int(), ctypes.c_void_p()
    with suppress(OSError):  # no driver
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    with suppress(ImportError, RuntimeError):  # said where the GPU is used
        _first_kernels()


def _first_kernels() -> None:
    """Run a norm, products, a softmax, and comparisons of logits, of a few ones."""
    import torch  # waits if another thread imports it
    from torch.nn import functional

    if not torch.cuda.is_available():
        return
    x = torch.ones(2, 64, 64, device="cuda", dtype=torch.bfloat16)
    ids = torch.arange(64, device="cuda")
    normed = x.float() * (x.float().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    gated = functional.silu(functional.linear(normed.to(x.dtype), x[0]))
    h = gated * functional.embedding(ids, x[0])
    turned = h * x.cos() + torch.cat((-h[..., 32:], h[..., :32]), -1) * x.sin()
    masked = (turned @ x.transpose(1, 2)).masked_fill(ids > ids[:, None], -1e4)
    logits = (masked.softmax(-1, dtype=torch.float32).to(x.dtype) @ h).float()
    off = (logits - normed).norm(dim=-1) / normed.norm(dim=-1)
    (off.median() + off.quantile(0.8) + logits.abs().max()).isfinite().item()


def preload() -> None:
    """Import what cells need, in a worker process."""
    importlib.import_module(PRELOAD)


def end_with_parent() -> None:
    """End this worker process when its parent ends, so that no orphan holds a GPU's memory."""
    parent = parent_process()
    assert parent is not None
    with suppress(OSError):
        parent.join()
    os._exit(1)
