"""What a run shows while it works: bars on a terminal, a line a step elsewhere; and the way there
from cells in other processes."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
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

from qbench.progress import Progress
from qbench.runner.estimates import TimeLeft
from qbench.text import duration

FAILED = ": FAILED: "  # as qbench.runner.grid.summary says it
SECONDS_BETWEEN_ADVANCES = 0.2
SECONDS_TO_SEND = 2.0  # at most, to a run that does not listen, as one whose terminal is held
MOST_BYTES = 2**17  # of a message; Linux allows twice as many


class Left(TimeRemainingColumn):
    """Time that is left: of the grid, which is the first task, by the estimate where there is one;
    else by the task's own speed."""

    def __init__(self, estimate: TimeLeft) -> None:
        super().__init__(compact=True)
        self._estimate = estimate

    def render(self, task: Task) -> Text:
        seconds = None if task.id else self._estimate.left()
        if seconds is None:
            return super().render(task)
        return Text(_left(seconds), style="progress.remaining")


def _left(seconds: float) -> str:
    return f"about {duration(seconds)} left"


class Display:
    """Progress of the grid and of every cell at work. ``estimate``: of the time that is left."""

    def __init__(self, stream: TextIO, cells: int, estimate: TimeLeft | None = None) -> None:
        self._estimate = estimate or TimeLeft([])
        self.console = Console(file=stream, highlight=False, soft_wrap=True, emoji=False)
        self._cells = cells
        self._started = time.monotonic()
        self._reasons: dict[str, str] = {}  # of failures, and the first cell that had each
        self._numbers: dict[str, int] = {}
        self._ended: set[str] = set()
        self._rows: dict[str, TaskID] = {}
        self._bars = Bars(
            TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
            BarColumn(bar_width=8),
            TaskProgressColumn(show_speed=False),
            TimeElapsedColumn(),
            Left(self._estimate),
            console=self.console,
            transient=True,
            expand=True,
            disable=not self.console.is_terminal,
        )
        self._grid = self._bars.add_task("starting", total=cells)

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def log(self, line: str, style: str = "") -> None:
        """A line that stays. A reason for which several cells fail is said once."""
        cell, failed, reason = line.partition(FAILED)
        if failed:
            first = self._reasons.setdefault(reason, cell)
            line = line if first == cell else f"{cell}: FAILED, as {first}"
        self.console.print(line, style=style, markup=False)

    def begin(self, cell: str) -> None:
        self.end(cell)  # one whose process died begins again
        self._ended.discard(cell)
        self._numbers.setdefault(cell, len(self._numbers) + 1)
        self._estimate.begin(cell)
        self._rows[cell] = self._bars.add_task(cell, total=None)
        self._count()

    def stage(self, cell: str, name: str, total: float | None = None) -> None:
        """``cell`` begins ``name``, which is ``total`` pieces of work if that is known."""
        self._estimate.stage(cell, name)
        if cell in self._rows:
            self._bars.reset(self._rows[cell], description=f"{cell}: {name}", total=total)
        if not self.console.is_terminal:
            elapsed = time.monotonic() - self._started
            counter = f"[{self._numbers[cell]}/{self._cells}]"
            seconds = self._estimate.left()
            left = "" if seconds is None else f" ({_left(seconds)})"
            self.log(f"{elapsed:7.1f}s {counter} {cell}: {name}{left}")

    def advance(self, cell: str, completed: float, total: float | None = None) -> None:
        """How far the step is; on bars alone, so that plain output stays a line a step."""
        if cell in self._rows:
            self._bars.update(self._rows[cell], completed=completed, total=total)

    def end(self, cell: str) -> None:
        """``cell`` is done, or its process died; nothing where it is not at work."""
        self._estimate.end(cell)
        if cell in self._rows:
            self._bars.remove_task(self._rows.pop(cell))
            self._ended.add(cell)
            self._count()

    def _count(self) -> None:
        done = len(self._ended)
        self._bars.update(self._grid, completed=done, description=f"{done} of {self._cells} cells")


@dataclass(slots=True)
class RemoteProgress:
    """A Progress in another process, whose words ``send`` takes to the run. It can be pickled
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
        with suppress(OSError):
            self.send(message)


@contextmanager
def listening(progress: Progress) -> Iterator[RemoteProgress]:
    """What cells in processes of this host say to the one that is yielded, ``progress`` is told.
    Each message is a datagram, whole or not there: a process may be killed at any moment."""
    with TemporaryDirectory(prefix="qbench-") as folder, _datagrams() as server:
        send = partial(send_datagram, f"{folder}/progress")
        server.bind(f"{folder}/progress")
        thread = threading.Thread(target=_listen, args=(server, progress), daemon=True)
        thread.start()
        try:
            yield RemoteProgress(send)
        finally:
            with suppress(OSError):
                send(())  # comes after all that was said before
            thread.join(SECONDS_TO_SEND)


def send_datagram(address: str, message: tuple[Any, ...]) -> None:
    with _datagrams() as client:
        client.settimeout(SECONDS_TO_SEND)
        client.sendto(json.dumps(message, default=float).encode(), address)


def _datagrams() -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
    return one


def _listen(server: socket.socket, progress: Progress) -> None:
    while message := json.loads(server.recv(2 * MOST_BYTES)):
        pass_on(progress, *message)


def pass_on(progress: Progress, method: str, *arguments: Any) -> None:
    """Tell ``progress`` what a RemoteProgress said."""
    with suppress(OSError):  # of a terminal that is gone
        getattr(progress, method)(*arguments)
