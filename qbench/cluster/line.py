"""Who waits for a worker: first come, first served, and one thread is woken for one worker."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_IN_LINE = 5.0  # until who waits looks whether there is still something to wait for


class Line:
    """``room()`` is how many may be served at once, ``check()`` raises where nobody will be."""

    def __init__(self, room: Callable[[], int], check: Callable[[], None]) -> None:
        self._room, self._check = room, check
        self._lock = threading.Lock()
        self._taken = 0
        self._waiting: deque[_Turn] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Raises what ``check`` does."""
        mine = _Turn()
        with self._lock:
            self._waiting.append(mine)
        self.serve()
        try:
            while not mine.come.wait(SECONDS_IN_LINE):
                self._check()
            self._check()
            yield
        finally:
            with self._lock:
                if mine.served:
                    self._taken -= 1
                else:
                    self._waiting.remove(mine)
            self.serve()

    def serve(self) -> None:
        """To be called when there is more room."""
        with self._lock:
            while self._waiting and self._taken < self._room():
                first = self._waiting.popleft()
                first.served = True
                self._taken += 1
                first.come.set()

    def wake(self) -> None:
        """All who wait look at once whether there is still something to wait for."""
        with self._lock:
            for turn in self._waiting:
                turn.come.set()


class _Turn:
    """Somebody's place."""

    def __init__(self) -> None:
        self.come, self.served = threading.Event(), False
