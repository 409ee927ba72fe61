"""Show the progress of a run, as bars on a terminal and else as lines, also of cells in other
processes."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, partialmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Column

from qbench.progress import Progress
from qbench.text import duration

FAILED = ": FAILED: "  # as qbench.runner.grid.summary says it
SECONDS_BETWEEN_ADVANCES = 0.2
SECONDS_OF_SILENCE = 15.0
SECONDS_BETWEEN_READS = 0.05

_now = time.monotonic


class Display:
    """Shows the progress of a run and of every running cell: bars on a terminal, else lines, one
    per step and one per running cell after ``SECONDS_OF_SILENCE`` without any."""

    def __init__(self, stream: TextIO, cells: int) -> None:
        self.console = Console(file=stream, highlight=False, soft_wrap=True, emoji=False)
        self._cells = cells
        self._started = self._printed = _now()
        self._stopped = threading.Event()
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
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
            expand=True,
            disable=not self.console.is_terminal,
        )
        self._grid = self._bars.add_task("starting", total=cells)

    def __enter__(self) -> Display:
        self._bars.start()
        if not self.console.is_terminal:
            threading.Thread(target=self._break_silence, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._bars.stop()

    def _break_silence(self) -> None:
        """Print the progress of each running cell after every ``SECONDS_OF_SILENCE`` without a
        line, until the run ends."""
        while not self._stopped.wait(max(0.1, self._printed + SECONDS_OF_SILENCE - _now())):
            if _now() - self._printed >= SECONDS_OF_SILENCE:
                tasks = {task.id: task for task in self._bars.tasks}
                for cell, row in list(self._rows.items()):
                    if (task := tasks.get(row)) is not None:
                        step = task.description.removeprefix(f"{cell}: ")
                        if task.total:
                            step += f", {task.completed:,.0f} of {task.total:,.0f}"
                        if task.time_remaining:
                            step += f", about {duration(task.time_remaining)} left"
                        self._print_step(cell, step)
                self._printed = _now()

    def _print_step(self, cell: str, step: str) -> None:
        elapsed = _now() - self._started
        self.log(f"{elapsed:7.1f}s [{self._numbers[cell]}/{self._cells}] {cell}: {step}")

    def log(self, line: str, style: str = "") -> None:
        """Print a line that stays, in rich's ``style``. A reason for which several cells fail is
        printed once; later lines name the first cell."""
        cell, failed, reason = line.partition(FAILED)
        if failed:
            first = self._reasons.setdefault(reason, cell)
            line = line if first == cell else f"{cell}: FAILED, as {first}"
        self._printed = _now()
        self.console.print(line, style=style, markup=False)

    def begin(self, cell: str) -> None:
        """Show that ``cell`` begins, or begins again after its process died."""
        self.end(cell)  # a cell whose process died begins again
        self._ended.discard(cell)
        self._numbers.setdefault(cell, len(self._numbers) + 1)
        self._rows[cell] = self._bars.add_task(f"{cell}: starting", total=None)
        self._count()

    def stage(self, cell: str, name: str, total: float | None = None) -> None:
        """Show that ``cell`` begins the stage ``name``, of ``total`` pieces of work if given."""
        if cell in self._rows:
            self._bars.reset(self._rows[cell], description=f"{cell}: {name}")
            [task] = (task for task in self._bars.tasks if task.id == self._rows[cell])
            task.total = total  # None too, which ``reset`` passes over
        if not self.console.is_terminal:
            self._print_step(cell, name)

    def advance(self, cell: str, completed: float, total: float | None = None) -> None:
        """Show that ``completed`` of ``total`` pieces of the cell's stage are done; None keeps its
        total."""
        if cell in self._rows:
            self._bars.update(self._rows[cell], completed=completed, total=total)

    def end(self, cell: str) -> None:
        """Show that ``cell`` ended or that its process died."""
        if cell in self._rows:
            self._bars.remove_task(self._rows.pop(cell))
            self._ended.add(cell)
            self._count()

    def _count(self) -> None:
        done = len(self._ended)
        self._bars.update(self._grid, completed=done, description=f"{done} of {self._cells} cells")


@dataclass(slots=True)
class RemoteProgress:
    """A Progress in a worker process: ``send`` takes each call to the run, as a tuple of the
    method's name and its arguments. A run that is gone is no error."""

    send: Callable[[tuple[Any, ...]], None]
    _last: float = field(default=0.0, repr=False)

    def _send(self, *message: Any, **last: Any) -> None:
        with suppress(OSError):
            self.send((*message, *last.values()))

    def advance(self, cell: str, completed: float, total: float | None = None) -> None:
        """Send the call to the run, at most one in 0.2 seconds over all cells; the others are
        dropped."""
        now = _now()
        if now - self._last > SECONDS_BETWEEN_ADVANCES:
            self._last = now
            self._send("advance", cell, completed, total)

    begin = partialmethod(_send, "begin")
    stage = partialmethod(_send, "stage")
    end = partialmethod(_send, "end")
    log = partialmethod(_send, "log")


@contextmanager
def listening(progress: Progress) -> Iterator[RemoteProgress]:
    """Yield a RemoteProgress for processes of this host: they append lines of JSON to a file, which
    a thread reads and passes on to ``progress``."""
    ended = threading.Event()
    with TemporaryDirectory(prefix="qbench-") as folder:
        path = Path(folder) / "progress"
        path.touch()
        thread = threading.Thread(target=_follow, args=(path, progress, ended), daemon=True)
        thread.start()
        try:
            yield RemoteProgress(partial(append_line, path))
        finally:
            ended.set()
            thread.join()


def append_line(path: Path, message: tuple[Any, ...]) -> None:
    """Append ``message`` as a line to the file, which must exist, in one write."""
    line = json.dumps(message, default=float) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def _follow(path: Path, progress: Progress, ended: threading.Event) -> None:
    """Read lines from the file ``path`` and pass them on, until ``ended`` is set."""
    begun = ""  # of a line whose end is not written yet
    with path.open() as file:
        while True:
            last = ended.wait(SECONDS_BETWEEN_READS)
            for line in file:
                begun += line
                if begun.endswith("\n"):
                    with suppress(ValueError):  # cut, as its process was killed
                        pass_on(progress, *json.loads(begun))
                    begun = ""
            if last:
                return


def pass_on(progress: Progress, method: str, *arguments: Any) -> None:
    """Call ``progress.<method>(*arguments)``, a call that a RemoteProgress sent."""
    with suppress(OSError):  # of a terminal that is gone
        getattr(progress, method)(*arguments)
