"""What a run shows while it works: bars on a terminal, a line a step elsewhere."""

from __future__ import annotations

import time
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from qbench.running.estimate import Estimate, in_words
from qbench.text import reason_alone


class Left(ProgressColumn):
    """Time that is left: of the grid by the estimate, of a step by its own speed."""

    def __init__(self, estimate: Estimate | None) -> None:
        super().__init__()
        self._estimate, self._of_steps = estimate, TimeRemainingColumn()

    def render(self, task: Task) -> Text:
        if self._estimate is None or task.fields["unit"] != "cells":
            return self._of_steps.render(task)
        seconds = self._estimate.left()
        return Text("" if seconds is None else in_words(seconds), style="progress.remaining")


FAILED = ": FAILED: "  # as qbench.running.work says it


class Display:
    """Progress of the grid and of every cell at work. ``estimate``: of the time that is left."""

    def __init__(self, stream: TextIO, cells: int, estimate: Estimate | None = None) -> None:
        self._estimate = estimate
        self.console = Console(file=stream, highlight=False, soft_wrap=True)
        self._cells = cells
        self._started = time.monotonic()
        self._reasons: dict[str, str] = {}  # of failures, and the first cell that had each
        self._numbers: dict[str, int] = {}
        self._ended: set[str] = set()
        self._rows: dict[str, TaskID] = {}
        self._bars: Progress | None = None
        if self.console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[unit]}"),
                TimeElapsedColumn(),
                Left(estimate),
                console=self.console,
                transient=True,
            )
            self._grid = self._bars.add_task("grid", total=cells, unit="cells")

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
            self._rows[cell] = self._bars.add_task(cell, total=None, unit="")

    def stage(self, cell: str, name: str, total: float | None = None, unit: str = "") -> None:
        """``cell`` begins ``name``, which is ``total`` units of work if that is known."""
        if self._estimate:
            self._estimate.stage(cell, name)
        if self._bars:
            self._bars.reset(
                self._rows[cell], description=f"{cell}: {name}", total=total, unit=unit
            )
        else:
            elapsed = time.monotonic() - self._started
            counter = f"[{self._numbers[cell]}/{self._cells}]"
            seconds = self._estimate.left() if self._estimate else None
            left = "" if seconds is None else f" ({in_words(seconds)})"
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
            self._bars.update(self._grid, completed=len(self._ended))
