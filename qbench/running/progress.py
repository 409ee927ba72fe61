"""What a run shows while it works: bars on a terminal, a line a step elsewhere."""

from __future__ import annotations

import time
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Display:
    """Progress of the grid and of every cell at work."""

    def __init__(self, stream: TextIO, cells: int) -> None:
        self.console = Console(file=stream, highlight=False, soft_wrap=True)
        self._cells = cells
        self._started = time.monotonic()
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
                TimeRemainingColumn(),
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

    def say(self, line: str, style: str = "") -> None:
        """A line that stays."""
        self.console.print(line, style=style, markup=False)

    def begin(self, cell: str) -> None:
        self._numbers.setdefault(cell, len(self._numbers) + 1)  # one that died begins again
        if self._bars:
            self._rows[cell] = self._bars.add_task(cell, total=None, unit="")

    def step(self, cell: str, name: str, total: float | None = None, unit: str = "") -> None:
        """``cell`` begins ``name``, which is ``total`` units of work if that is known."""
        if self._bars:
            self._bars.reset(
                self._rows[cell], description=f"{cell}: {name}", total=total, unit=unit
            )
        else:
            elapsed = time.monotonic() - self._started
            counter = f"[{self._numbers[cell]}/{self._cells}]"
            self.say(f"{elapsed:7.1f}s {counter} {cell}: {name}")

    def advance(self, cell: str, completed: float, total: float | None = None) -> None:
        """How far the step is; on bars alone, so that plain output stays a line a step."""
        if self._bars:
            self._bars.update(self._rows[cell], completed=completed, total=total)

    def end(self, cell: str) -> None:
        if self._bars:
            self._bars.remove_task(self._rows.pop(cell))
            self._ended.add(cell)
            self._bars.update(self._grid, completed=len(self._ended))
