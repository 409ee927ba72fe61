"""Progress of cells through the cluster's scheduler: workers need not reach the run's host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qbench.progress import Progress, RemoteProgress

if TYPE_CHECKING:
    from distributed import Client, Worker

SECONDS_BETWEEN_EVENTS = 1.0
SECONDS_TO_SETTLE = 2.0  # until what a worker said before its result has come


@dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """Where the events of one try at one cell go. It can be pickled."""

    run: str
    cell: str
    attempt: str
    most_deaths: int

    def open(self) -> Teller:
        from distributed import get_worker

        return Teller(self, get_worker())

    @property
    def marks(self) -> str:
        """Where it is marked that the cell began."""
        return f"{self.run}-{self.attempt}"

    def mark(self, worker: Worker) -> None:
        """Say that the cell begins: what is not followed by its result was a death."""
        worker.log_event(self.marks, "begun")

    def deaths(self, worker: Worker) -> int:
        """How often it began before; the engine itself begins it again when a worker dies."""
        from distributed.utils import sync

        events = sync(worker.loop, worker.scheduler.events, topic=self.marks)
        return len(events)


class Teller:
    """A Progress on a worker."""

    def __init__(self, topic: Topic, worker: Worker) -> None:
        self._topic, self._worker, self._last = topic, worker, 0.0

    def begin(self, cell: str) -> None:
        self._send("begin", cell)

    def stage(self, cell: str, name: str, total: float | None = None, unit: str = "") -> None:
        self._send("stage", cell, name, total, unit)

    def advance(self, cell: str, completed: float, total: float | None = None) -> None:
        now = time.monotonic()
        if now - self._last > SECONDS_BETWEEN_EVENTS:
            self._last = now
            self._send("advance", cell, completed, total)

    def end(self, cell: str) -> None:
        self._send("end", cell)

    def log(self, line: str, style: str = "") -> None:
        self._send("log", line, style)

    def close(self) -> None:
        """Nothing is held open."""

    def _send(self, *message: object) -> None:
        self._worker.log_event(self._topic.run, [self._topic.attempt, *message])


class EventRelay:
    """Passes on to ``progress`` what workers tell. Use it as a context manager.

    What comes from a try that is over, such as one on a worker that was given up, is left out.
    """

    def __init__(self, client: Client, run: str, progress: Progress) -> None:
        self._client, self.run, self._progress = client, run, progress
        self._lock = threading.Condition()
        self._open: dict[str, str | None] = {}  # attempt → cell, once it began
        self._ended: set[str] = set()
        self.begun: set[str] = set()

    @property
    def address(self) -> RemoteProgress:
        return Topic(run=self.run, cell="", attempt="", most_deaths=0)

    def __enter__(self) -> EventRelay:
        self._client.subscribe_topic(self.run, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        from distributed.client import ClosedClientError

        with suppress(ClosedClientError):  # the cluster was lost
            self._client.unsubscribe_topic(self.run)

    def beside(self, cell: str) -> frozenset[str] | None:
        """A worker runs one cell at a time: nobody."""
        return frozenset()

    def log(self, line: str, style: str = "") -> None:
        with self._lock:
            self._progress.log(line, style)

    def expect(self, attempt: str) -> None:
        """From now on what ``attempt`` says is passed on."""
        with self._lock:
            self._open[attempt] = None

    def settle(self, attempt: str, *, wait: bool) -> None:
        """What ``attempt`` has said is passed on, and nothing later; ``wait`` for its end."""
        with self._lock:
            if wait:
                self._lock.wait_for(lambda: attempt in self._ended, SECONDS_TO_SETTLE)
            cell = self._open.pop(attempt, None)
            if cell is not None:
                self._progress.end(cell)

    def _hear(self, event: tuple[float, Any]) -> None:
        attempt, method, *arguments = event[1]
        with self._lock:
            if attempt not in self._open:
                return
            self._tell(attempt, method, arguments)
            self._lock.notify_all()

    def _tell(self, attempt: str, method: str, arguments: list[Any]) -> None:
        tell: Callable[..., None] = getattr(self._progress, method)
        if method == "begin":
            if self._open[attempt] is not None:  # once more, after a death
                self._progress.end(self._open[attempt])
            self._open[attempt] = arguments[0]
            self.begun.add(arguments[0])
        elif method == "end":
            if self._open[attempt] is None:
                return
            self._open[attempt] = None
            self._ended.add(attempt)
        elif method in ("stage", "advance") and self._open[attempt] is None:
            return
        tell(*arguments)
