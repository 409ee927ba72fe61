"""Define the interface through which running cells report progress. Imports nothing of qbench."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Advance = Callable[[float, float], None]  # pieces of work that are done, and how many there are


class Progress(Protocol):
    """Receives the progress of cells: a display, or a connection to the process that has one.

    ``begin`` and ``end``: the cell named ``cell`` begins and ends. ``stage``: its stage ``name``
    begins, with ``total`` pieces of work (None: not known). ``advance``: ``completed`` of them are
    done; None keeps the ``total``. ``log``: a line to print, in rich's ``style``, such as "bold
    red".
    """

    def begin(self, cell: str) -> None: ...
    def stage(self, cell: str, name: str, total: float | None = None) -> None: ...
    def advance(self, cell: str, completed: float, total: float | None = None) -> None: ...
    def end(self, cell: str) -> None: ...
    def log(self, line: str, style: str = "") -> None: ...


class SilentProgress(Progress):
    """A Progress that shows nothing."""
