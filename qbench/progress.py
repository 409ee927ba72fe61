"""What a run shows while it works: bars on a terminal, a line a step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Progress of the grid and of the cell at work.

    ``cell`` opens a cell, ``step`` names what it does, ``advance`` says how far that is.
    """

    def __init__(self, stream: TextIO, cells: int) -> None:
        self.console = Console(file=stream, highlight=False, soft_wrap=True)
        self._cells, self._done = cells, 0
        self._cell = ""
        self._started = time.monotonic()
        self._bars: Progress | None = None
        if self.console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[unit]}"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._grid = self._bars.add_task("grid", total=cells, unit="cells")
            self._step = self._bars.add_task("", total=None, unit="", visible=False)

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

    @contextmanager
    def cell(self, name: str) -> Iterator[None]:
        self._cell = name
        try:
            yield
        finally:
            self._done += 1
            self._cell = ""
            if self._bars:
                self._bars.update(self._grid, completed=self._done)
                self._bars.update(self._step, visible=False)

    def step(self, name: str, total: float | None = None, unit: str = "") -> None:
        """The cell at work begins ``name``."""
        if self._bars:
            self._bars.reset(
                self._step, description=f"{self._cell}: {name}", total=total, unit=unit,
                visible=True,
            )  # fmt: skip
        else:
            elapsed = time.monotonic() - self._started
            place = f"[{self._done + 1}/{self._cells}]"
            self.say(f"{elapsed:7.1f}s {place} {self._cell}: {name}")

    def advance(self, completed: float, total: float | None = None) -> None:
        """How far the step at work is; bars only, so that plain output stays a line a step."""
        if self._bars:
            self._bars.update(self._step, completed=completed, total=total)
