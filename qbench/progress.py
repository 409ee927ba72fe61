"""Where a cell at work says what it does. Imports nothing of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Advance = Callable[[float, float], None]  # pieces of work that are done, and how many there are


class Progress(Protocol):
    """Where a cell at work says what it does; a display, or a line to the one that draws."""

    def begin(self, cell: str) -> None: ...
    def stage(self, cell: str, name: str, total: float | None = None) -> None: ...
    def advance(self, cell: str, completed: float, total: float | None = None) -> None: ...
    def end(self, cell: str) -> None: ...
    def log(self, line: str, style: str = "") -> None: ...


class SilentProgress(Progress):
    """A Progress that shows nothing."""
