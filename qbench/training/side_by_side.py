"""Runs side by side, each a ``qbench train`` of its own on one GPU. Imports no torch.

A run's process has a pipe as its standard input that its parent holds open: where the parent ends,
however it does, the pipe ends too, and the process with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait

from qbench.machine import VISIBLE, gpu_of_environment, interrupts_blocked

PART = "QBENCH_TRAINING_PART"  # in the environment of a run's process: what it must train
THREADS = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_TO_END = 0.5  # that a process has after SIGTERM
READ = 1 << 16  # bytes at once
FAILED = 1  # exit code of what is no wrong input


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One run: its name, the command that trains it alone, and the digest of its settings."""

    name: str
    command: tuple[str, ...]
    settings: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """A run whose process failed: what it said last, and its exit code."""

    name: str
    error: str
    code: int


def train_side_by_side(
    parts: Sequence[Part], slots: Sequence[int], *, device: str, say: Callable[[str], None]
) -> list[Broken]:
    """Train ``parts`` in their order, as many at once as ``slots``, which holds the GPU of each (on
    a CPU its numbers play no part); the next one goes where the fewest are at work.

    ``say`` is told each line of each process, with its run's name. Returns those that failed, in
    the order of ``parts``. Where it is interrupted, all processes are ended.
    """
    waiting, at_work, broken = list(parts), list[_Child](), dict[str, Broken]()
    threads = max(1, (os.cpu_count() or 1) // max(1, min(len(slots), len(parts))))
    try:
        while waiting or at_work:
            while waiting and (gpu := _free(slots, at_work)) is not None:
                environment = _environment(gpu if device == "cuda" else None, threads)
                with interrupts_blocked():
                    at_work.append(_Child(waiting.pop(0), gpu, environment))
            wait([child.output for child in at_work], SECONDS_BETWEEN_LOOKS)
            for child in list(at_work):
                ended = child.process.poll() is not None  # before it is read: it says no more
                child.tell(say, last=ended)
                if ended:
                    at_work.remove(child)
                    child.close()
                    if (failure := child.broken()) is not None:
                        broken[child.part.name] = failure
    finally:
        _end(at_work)
    return [broken[part.name] for part in parts if part.name in broken]


def part_of_others() -> str | None:
    """In the process of one run: the digest of the settings that it must train; None in any other
    process. From now on it ends with the one that started it."""
    if (settings := os.environ.get(PART)) is not None:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    return settings


def _end_with_parent() -> None:
    with suppress(OSError):
        while os.read(0, READ):
            pass
    os._exit(1)


def _free(slots: Sequence[int], at_work: Sequence[_Child]) -> int | None:
    """The GPU with the fewest runs at work, of those that have room for one more."""
    room, busy = Counter(slots), Counter(child.gpu for child in at_work)
    gpus = [gpu for gpu in sorted(room) if busy[gpu] < room[gpu]]
    return min(gpus, key=lambda gpu: busy[gpu]) if gpus else None


def _environment(gpu: int | None, threads: int) -> dict[str, str]:
    """Threads that wait for a core slow all of them down, so the cores are divided."""
    environment = dict.fromkeys(THREADS, str(threads)) | os.environ
    if gpu is not None:
        environment[VISIBLE] = gpu_of_environment(gpu)
    return environment


class _Child:
    """The process of one run. What it prints is read here, in pieces as they come."""

    def __init__(self, part: Part, gpu: int, environment: dict[str, str]) -> None:
        self.part, self.gpu = part, gpu
        self.process = subprocess.Popen(
            part.command,
            env={**environment, PART: part.settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._rest, self._said_last = b"", ""

    def tell(self, say: Callable[[str], None], *, last: bool) -> None:
        """Pass on the whole lines that are there; all that is there, where it is the ``last``."""
        with suppress(BlockingIOError):
            while piece := os.read(self.output.fileno(), READ):
                self._rest += piece
        *lines, self._rest = self._rest.split(b"\n")
        if last:
            lines.append(self._rest)
        begin = f"{self.part.name}: "
        for line in lines:
            if text := line.decode(errors="replace").rstrip().removeprefix(begin):
                self._said_last = text
                say(f"{begin}{text}")

    def broken(self) -> Broken | None:
        """After its end."""
        code = self.process.returncode
        if code == 0:
            return None
        error = self._said_last if code > 0 else ""
        if code < 0:
            error = (
                f"its process was ended by signal {-code} ({signal.strsignal(-code)}), as where "
                "memory runs out; the same command goes on from its last state"
            )
        return Broken(
            name=self.part.name,
            error=error or f"its process ended with exit code {code}",
            code=code if code > 0 else FAILED,
        )

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.output.close()


def _end(children: Sequence[_Child]) -> None:
    """States are written whole or not at all, so that a process may be ended at any moment."""
    for child in children:
        child.process.terminate()
    until = time.monotonic() + SECONDS_TO_END
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, until - time.monotonic()))
        child.process.kill()
        child.process.wait()
        child.close()
