"""The unquantized cell as its quantized ones find it: whole, or still at work, when it hands over
the rows of one task after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from qbench.errors import ResultsError
from qbench.evaluation.base_file import Parts, base_rows_file, handed_over, stated
from qbench.evaluation.scoring.base_rows import BaseRows
from qbench.records import GridCell, Record
from qbench.store import Store

LOOK_SECONDS = 0.05
SAID_SECONDS = 1.0  # a shorter wait is not worth a line


class Awaited:
    """The unquantized ``cell`` of the results ``store``, whose rows are below ``folder``.

    While a process is at work on it, that holds its lock, and says which parts it has kept. Once
    nobody is, only its record and its index count: they must name the very parts that were used.
    ``waits`` is told its name where a wait lasts: who sees a step that does not end takes it for
    one that hangs.
    """

    def __init__(
        self, cell: GridCell, store: Store, folder: Path, waits: Callable[[str], None]
    ) -> None:
        self.reason = ""  # why nothing can be measured against it
        self.waited = 0.0  # seconds
        self._cell, self._store, self._waits = cell, store, waits
        self._path = base_rows_file(folder, cell.key)
        self._record: Record | None = None
        self._rows: BaseRows | None = None
        self._used = Parts()
        self._ended = self._broken = False

    def rows(self, task: str) -> BaseRows | None:
        """Those of ``task`` are among them, where any are kept of it. Waits for them; None where
        they cannot be had, and ``reason`` says why."""
        self._wait(lambda: self._ended or self._taken(task) or self.look())
        return None if self.reason else self._rows

    def record(self) -> Record | None:
        """Waits until it is done; None where it cannot be used, and ``reason`` says why."""
        self._wait(self.look)
        return None if self.reason else self._record

    def look(self) -> bool:
        """Whether nobody is at work on it any more."""
        if self._ended:
            return True
        try:
            with FileLock(self._store.lock_file(self._cell), timeout=0):
                self._record = self._store.whole(self._cell)
        except Timeout:
            return False
        self._ended = True
        if self._record is None or self._record.status != "ok":
            self.reason = f"{self._cell.cell} has no good record; run it, then this again"
            return True
        try:
            self._settle(stated(self._path, self._cell.key))
        except ResultsError as error:
            self.reason = str(error)
        return True

    def _wait(self, done: Callable[[], bool]) -> None:
        begun, said = time.perf_counter(), False
        while not done():
            if not said and time.perf_counter() - begun > SAID_SECONDS:
                self._waits(self._cell.cell)
                said = True
            time.sleep(LOOK_SECONDS)
        self.waited += time.perf_counter() - begun

    def _settle(self, parts: Parts) -> None:
        """All of ``parts``, those that were used already among them."""
        other = [task for task, one in self._used.tasks.items() if parts.tasks.get(task) != one]
        if other or (self._used.head or parts.head) != parts.head:
            raise ResultsError(f"{self._cell.cell} was scored anew meanwhile; run this again")
        self._add(parts)

    def _taken(self, task: str) -> bool:
        """Whether the rows of ``task`` were handed over, or none are kept of it."""
        if task in self._used.tasks:
            return True
        there = handed_over(self._store.handed_over(self._cell))
        if self._broken or task not in there.tasks:
            return False
        try:
            self._add(Parts(head=there.head, tasks={task: there.tasks[task]}))
        except ResultsError:  # it will be known when the cell is done
            self._broken = True
        return not self._broken

    def _add(self, parts: Parts) -> None:
        if self._rows is None or (parts.head and not self._used.head):
            self._rows = BaseRows.with_head(self._path, self._cell.key, parts.head)
        self._rows.add(self._path, parts)
        self._used = Parts(head=parts.head, tasks=self._used.tasks | parts.tasks)
