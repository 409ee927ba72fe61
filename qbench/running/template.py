"""A process that imports what all workers need, once, and is forked for each of them.

Processes that import torch and transformers side by side hold each other up: eighteen need two to
three times as long as one. A fork has all of it at once. Linux only; and a process that has
started a GPU's driver cannot be forked into one that uses the GPU, so that none may be started
here: the workers of a template do that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait

from qbench.machine.clock import mark
from qbench.machine.devices import driver_has_started
from qbench.machine.interrupt import interrupts_blocked
from qbench.running.workers import Settings, Worker, work

# has PyTorch ask NVIDIA's management library, not the driver, whether there is a GPU
ASKS_NO_DRIVER = "PYTORCH_NVML_BASED_CUDA_CHECK"
PR_SET_PDEATHSIG = 1  # of Linux's prctl
SECONDS_TO_SETTLE = 0.2  # from the end of a process until its parent sees it
LONGEST = 64  # bytes of a request
FORKS = sys.platform == "linux"


class Template:
    """The parent's side. Starts at once, and is ready when ``settings.first.shared`` returns."""

    def __init__(self, settings: Settings) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, interrupts_blocked():
            self.process = get_context("spawn").Process(target=_serve, args=(theirs, settings))
            self.process.start()

    def fork(self, gpu: int | None) -> Worker | None:
        """A worker that comes up when the template is ready; None where that has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._requests, [repr(gpu).encode()], [theirs.fileno()])
            except OSError:
                ours.close()
                return None
        return Worker(Connection(ours.detach()))

    def lives(self) -> bool:
        """False where it has ended, too, by a moment ago. Of its end of the requests: several
        threads that ask the system for the process itself take each other's answer."""
        look = select.poll()
        look.register(self._requests, 0)
        return not look.poll(SECONDS_TO_SETTLE * 1000)

    def terminate(self) -> None:
        """All its workers end with it."""
        self.process.kill()

    def end(self) -> None:
        """Once it has been told to."""
        self.process.join()
        self._requests.close()


def _serve(requests: socket.socket, settings: Settings) -> None:
    """Whatever happens, it ends at once: nobody is to wait for an answer that never comes."""
    try:
        _serve_until_the_end(requests, settings)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _serve_until_the_end(requests: socket.socket, settings: Settings) -> None:
    settings.divide_cores()
    first = settings.first
    assert first is not None
    assert first.shared is not None
    with _driver_unasked(), contextlib.suppress(Exception):
        first.shared()
    if driver_has_started():
        mark("an import has started the GPU's driver: each worker process imports by itself")
        return
    # Python warns of threads, which may hold a lock: those here are of libraries that see to it
    warnings.filterwarnings("ignore", r".*fork\(\) may lead to deadlocks", DeprecationWarning)
    mark("worker processes fork")
    context, parent = get_context("fork"), parent_process()
    assert parent is not None
    children: list = []
    while True:
        wait([requests, parent.sentinel, *(child.sentinel for child in children)])
        children = [child for child in children if child.is_alive()]  # frees those that ended
        if wait([parent.sentinel], 0):
            return
        if not wait([requests], 0):
            continue
        request, descriptors, _, _ = socket.recv_fds(requests, LONGEST, 1)
        if not request:  # the other end is closed
            return
        if not descriptors:  # too many open files: its worker is seen to be dead
            continue
        gpu = None if request == b"None" else int(request)
        arguments = (requests, descriptors[0], gpu, settings)
        child = context.Process(target=_forked, args=arguments)
        try:
            child.start()
            children.append(child)
        except OSError:  # no room: its worker is seen to be dead
            pass
        finally:
            os.close(descriptors[0])


def _forked(requests: socket.socket, descriptor: int, gpu: int | None, settings: Settings) -> None:
    end_with_template()
    requests.close()
    os.set_inheritable(descriptor, False)
    settings.load_plugins()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # else all forks would draw the same
    assert settings.first is not None
    work(Connection(descriptor), gpu, settings.first.forked)


def end_with_template() -> None:
    """The kernel ends this process with the one that has forked it. A pipe would not tell: those
    forked later hold its other end, too."""
    template = parent_process()
    assert template is not None
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != template.pid:
        os._exit(1)


@contextlib.contextmanager
def _driver_unasked() -> Iterator[None]:
    before = os.environ.get(ASKS_NO_DRIVER)
    os.environ[ASKS_NO_DRIVER] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ASKS_NO_DRIVER]
        else:
            os.environ[ASKS_NO_DRIVER] = before
