"""Define the interface through which running cells report progress. Imports nothing of qbench."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Advance = Callable[[float, float], None]  # pieces of work that are done, and how many there are


class Progress(Protocol):
    """Receives the progress of cells: a display, or a connection to the process that has one."""

    def begin(self, cell: str) -> None:
        """Note that the cell named ``cell`` begins."""

    def stage(self, cell: str, name: str, total: float | None = None) -> None:
        """Note that the cell's stage ``name`` begins, of ``total`` pieces (None: not known)."""

    def advance(self, cell: str, completed: float, total: float | None = None) -> None:
        """Note that ``completed`` of the stage's pieces of work are done; None keeps ``total``."""

    def end(self, cell: str) -> None:
        """Note that the cell ends."""

    def log(self, line: str, style: str = "") -> None:
        """Print ``line`` in rich's ``style``, such as "bold red"."""


class SilentProgress(Progress):
    """A Progress that shows nothing."""
