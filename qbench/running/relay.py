"""Progress of cells that run elsewhere, told to the one who draws.

Each cell at work has a connection of its own. One that is lost, whenever and however, ends that
cell's line and nothing else: no lock is shared that a dying process could take with it.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from pathlib import Path

from qbench.progress import Progress

SECONDS_BETWEEN_EVENTS = 0.1
SECONDS_TO_SETTLE = 2.0  # until what was sent before a process died has been read
WAITING = 64  # connections that may wait to be accepted
LONGEST_FOLDER = 60  # characters; a socket's whole path has at most 107
LOST = (EOFError, OSError, AuthenticationError)


Socket = str | tuple[str, int]  # its path, or host and port


@dataclass(frozen=True, slots=True)
class Address:
    """Where a relay listens. It can be pickled and sent to where cells run."""

    socket: Socket
    key: bytes

    def open(self) -> Sender:
        return Sender(self)


class Sender:
    """A Progress that connects back, from wherever it is, when it is first used.

    Where the other end is gone it says nothing: progress is no reason for a cell to fail.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: Connection | None = None
        self._gone = False
        self._last = 0.0

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

    def _send(self, *message: object) -> None:
        if self._gone:
            return
        try:
            if self._connection is None:
                self._connection = Client(self._address.socket, authkey=self._address.key)
            self._connection.send(message)
        except LOST:
            self._gone = True

    def close(self) -> None:
        """Nothing more will be said."""
        if self._connection is not None:
            self._connection.close()
        self._gone = True


class Relay:
    """Passes on to ``progress`` what senders tell, and knows which cells are at work.

    ``address`` is what to give them. ``host`` is the name of this host under which others reach
    it; None: senders are processes of this host. Use it as a context manager.
    """

    def __init__(self, progress: Progress, host: str | None = None) -> None:
        self._progress, self._lock = progress, threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="qbench-", dir=_short_folder()))
        key = secrets.token_bytes(32)
        socket: Socket = str(self._folder / "progress") if host is None else (host, 0)
        # without a key: who introduces himself slowly must not keep others waiting
        self._listener = Listener(socket, backlog=WAITING)
        self.address = Address(self._listener.address, key)
        self._readers: list[threading.Thread] = []
        self.begun: set[str] = set()  # cells that were ever at work
        self._at_work: set[str] = set()
        self._lost: dict[str, frozenset[str]] = {}
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="progress", daemon=True)
        self._accepting.start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Pass on what was sent before, and end; at once where the run breaks off, since those
        who send have not ended then."""
        for reader in self._readers if kind is None else ():
            reader.join(SECONDS_TO_SETTLE)
        with self._lock:  # from now on nothing is passed on: the progress may be closed next
            self._closed = True
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            Client(self.address.socket).close()
        self._accepting.join(SECONDS_TO_SETTLE)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def beside(self, cell: str) -> frozenset[str] | None:
        """Which cells were at work when the connection of ``cell`` was lost; None where it never
        said that it began. Waits a moment, since a death is seen before the last words are."""
        with self._changed:
            self._changed.wait_for(lambda: cell in self._lost, SECONDS_TO_SETTLE)
            return self._lost.pop(cell, None)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except OSError:  # the other end is gone already, or there are too many open files
                time.sleep(SECONDS_BETWEEN_EVENTS)
                continue
            reader = threading.Thread(target=self._read, args=(connection,), daemon=True)
            self._readers.append(reader)
            reader.start()

    def _read(self, connection: Connection) -> None:
        begun: set[str] = set()
        with connection:
            try:
                deliver_challenge(connection, self.address.key)
                answer_challenge(connection, self.address.key)
                while True:
                    message = connection.recv()
                    with self._lock:
                        if self._closed:
                            return
                        self._pass_on(begun, *message)
            except LOST:
                pass  # the cell has ended, or its process has
        with self._changed:
            for cell in begun:
                self._at_work.discard(cell)
                self._lost[cell] = frozenset(self._at_work)
                if not self._closed:
                    self._progress.end(cell)
            self._changed.notify_all()

    def _pass_on(self, begun: set[str], method: str, *arguments: object) -> None:
        cell = str(arguments[0])
        if method == "begin":
            begun.add(cell)
            self.begun.add(cell)
            self._at_work.add(cell)
        elif method == "end":
            begun.discard(cell)
            self._at_work.discard(cell)
        getattr(self._progress, method)(*arguments)


def _short_folder() -> str | None:
    return None if len(tempfile.gettempdir()) < LONGEST_FOLDER else "/tmp"
