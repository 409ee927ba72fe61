"""What a run shows while it works: bars on a terminal, a line a step elsewhere; and the way there
from cells in other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError, get_context
from multiprocessing.managers import RemoteError, SyncManager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    ProgressColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from qbench.machine import interrupts_blocked
from qbench.progress import Progress
from qbench.runner.estimates import TimeLeft, duration
from qbench.runner.workers import end_with_parent
from qbench.text import reason_alone

FAILED = ": FAILED: "  # as qbench.runner.grid.summary says it
SECONDS_BETWEEN_ADVANCES = 0.2
SECONDS_TO_SETTLE = 2.0  # until what was said before has been passed on
LOST = (EOFError, OSError, AuthenticationError, RemoteError)  # of a connection


class Left(ProgressColumn):
    """Time that is left: of the grid by the estimate, of a step by its own speed."""

    def __init__(self, estimate: TimeLeft | None) -> None:
        super().__init__()
        self._estimate, self._of_steps = estimate, TimeRemainingColumn(compact=True)

    def render(self, task: Task) -> Text:
        if task.id or self._estimate is None:  # the grid's is the first
            return self._of_steps.render(task)
        seconds = self._estimate.left()
        return Text("" if seconds is None else _left(seconds), style="progress.remaining")


def _left(seconds: float) -> str:
    return f"about {duration(seconds)} left"


class Display:
    """Progress of the grid and of every cell at work. ``estimate``: of the time that is left."""

    def __init__(self, stream: TextIO, cells: int, estimate: TimeLeft | None = None) -> None:
        self._estimate = estimate
        self.console = Console(file=stream, highlight=False, soft_wrap=True)
        self._cells = cells
        self._started = time.monotonic()
        self._reasons: dict[str, str] = {}  # of failures, and the first cell that had each
        self._numbers: dict[str, int] = {}
        self._ended: set[str] = set()
        self._rows: dict[str, TaskID] = {}
        self._bars: Bars | None = None
        if self.console.is_terminal:
            narrow = Column(no_wrap=True, overflow="ellipsis", ratio=1)
            self._bars = Bars(
                TextColumn("{task.description}", table_column=narrow),
                BarColumn(bar_width=8),
                TaskProgressColumn(show_speed=False),
                TimeElapsedColumn(),
                Left(estimate),
                console=self.console,
                transient=True,
                expand=True,
            )
            self._grid = self._bars.add_task("starting", total=cells)

    def __enter__(self) -> Display:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self._bars.stop()

    def log(self, line: str, style: str = "") -> None:
        """A line that stays. A reason for which several cells fail is said once."""
        cell, failed, reason = line.partition(FAILED)
        if failed:
            first = self._reasons.setdefault(reason_alone(reason), cell)
            line = line if first == cell else f"{cell}: FAILED, as {first}"
        self.console.print(line, style=style, markup=False)

    def begin(self, cell: str) -> None:
        self._numbers.setdefault(cell, len(self._numbers) + 1)  # one that died begins again
        if self._estimate:
            self._estimate.begin(cell)
        if self._bars:
            self._count()
            self._rows[cell] = self._bars.add_task(cell, total=None)

    def stage(self, cell: str, name: str, total: float | None = None) -> None:
        """``cell`` begins ``name``, which is ``total`` pieces of work if that is known."""
        if self._estimate:
            self._estimate.stage(cell, name)
        if self._bars:
            self._bars.reset(self._rows[cell], description=f"{cell}: {name}", total=total)
        else:
            elapsed = time.monotonic() - self._started
            counter = f"[{self._numbers[cell]}/{self._cells}]"
            seconds = self._estimate.left() if self._estimate else None
            left = "" if seconds is None else f" ({_left(seconds)})"
            self.log(f"{elapsed:7.1f}s {counter} {cell}: {name}{left}")

    def advance(self, cell: str, completed: float, total: float | None = None) -> None:
        """How far the step is; on bars alone, so that plain output stays a line a step."""
        if self._estimate:
            self._estimate.advance(cell, completed, total)
        if self._bars:
            self._bars.update(self._rows[cell], completed=completed, total=total)

    def end(self, cell: str) -> None:
        if self._estimate:
            self._estimate.end(cell)
        if self._bars:
            self._bars.remove_task(self._rows.pop(cell))
            self._ended.add(cell)
            self._count()

    def _count(self) -> None:
        assert self._bars is not None
        done = len(self._ended)
        self._bars.update(self._grid, completed=done, description=f"{done} of {self._cells} cells")


@dataclass(slots=True)
class RemoteProgress:
    """A Progress in another process, whose words ``send`` takes to a Listener. It can be pickled
    where that can. Where nobody listens any more it says nothing: no reason for a cell to fail."""

    send: Callable[[tuple[Any, ...]], None]
    _last: float = field(default=0.0, repr=False)

    def begin(self, cell: str) -> None:
        self._send("begin", cell)

    def stage(self, cell: str, name: str, total: float | None = None) -> None:
        self._send("stage", cell, name, total)

    def advance(self, cell: str, completed: float, total: float | None = None) -> None:
        now = time.monotonic()
        if now - self._last > SECONDS_BETWEEN_ADVANCES:
            self._last = now
            self._send("advance", cell, completed, total)

    def end(self, cell: str) -> None:
        self._send("end", cell)

    def log(self, line: str, style: str = "") -> None:
        self._send("log", line, style)

    def _send(self, *message: Any) -> None:
        with suppress(*LOST):
            self.send(message)


class Listener:
    """Passes on to ``progress`` what remote ones say, and knows which cells ever began. Use it as
    a context manager; ``remote`` is what to give them: ``progress`` itself in this process."""

    def __init__(self, progress: Progress) -> None:
        self.remote = progress
        self._progress, self._lock, self._closed = progress, threading.Lock(), False
        self._at_work: set[str] = set()
        self.begun: set[str] = set()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # from now on nothing is passed on: the progress may be closed next
            self._closed = True

    def settle(self) -> None:
        """Wait until what was said before has been passed on."""

    def log(self, line: str, style: str = "") -> None:
        with self._lock:
            self._progress.log(line, style)

    def died(self, cell: str) -> None:
        """The process of ``cell`` says nothing more."""
        self.settle()
        with self._lock:
            self._end(cell)

    def pass_on(self, method: str, *arguments: Any) -> None:
        with self._lock:
            if self._closed:
                return
            if method == "log":
                self._progress.log(*arguments)
            elif method == "end":
                self._end(arguments[0])
            elif method == "begin":
                self._end(arguments[0])  # once more, after a death
                self._at_work.add(arguments[0])
                self.begun.add(arguments[0])
                self._progress.begin(arguments[0])
            elif arguments[0] in self._at_work:
                getattr(self._progress, method)(*arguments)

    def _end(self, cell: str) -> None:
        if cell in self._at_work:
            self._at_work.remove(cell)
            self._progress.end(cell)


class QueueListener(Listener):
    """Of processes of this host, through a queue in a process of its own: no lock is shared that a
    process that is killed could take with it."""

    def __enter__(self) -> QueueListener:
        self._manager = SyncManager(ctx=get_context("spawn"))
        with interrupts_blocked():
            self._manager.start(_end_with_parent)
        self._queue = self._manager.Queue()
        self.remote = RemoteProgress(self._queue.put)
        self._thread = threading.Thread(target=self._listen, name="progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.settle()
        super().__exit__()
        self._manager.shutdown()

    def settle(self) -> None:
        settled = threading.Event()
        self._settled = settled
        with suppress(*LOST):
            self._queue.put(None)
            settled.wait(SECONDS_TO_SETTLE)

    def _listen(self) -> None:
        with suppress(*LOST):
            while True:
                message = self._queue.get()
                if message is None:
                    self._settled.set()
                else:
                    self.pass_on(*message)


def _end_with_parent() -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
