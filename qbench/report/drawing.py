"""Figures → SVG text and files: in this process, or half of them in another at the same time.

Drawing is most of a report's time, so a large report has a second process, which loads its
libraries while the first compares.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from threadpoolctl import threadpool_limits

from qbench.comparison.lines import Comparison
from qbench.errors import UnavailableError
from qbench.report.figures import Drawn, groups
from qbench.report.style import svg
from qbench.running.executors import end_with_parent
from qbench.store import write_atomically

Share = tuple[int, int]  # (n, of): every of-th group of figures, from the n-th
ALL: Share = (0, 1)
ENDING = 5.0  # seconds that a process whose pipe is closed has to end


@dataclass(frozen=True, kw_only=True, slots=True)
class Plate:
    """A figure that was drawn, and the files that it was written to."""

    place: tuple[int, int]  # in the page: group, and place in it
    name: str
    section: str
    caption: str
    svg: str = field(repr=False)
    paths: tuple[Path, ...]


def plates(
    comparison: Comparison, folder: Path, formats: Sequence[str], *, share: Share = ALL
) -> list[Plate]:
    """Draw the figures and write ``folder/<name>.<format>``."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for group, draw in enumerate(groups(comparison)):
        if group % share[1] == share[0]:
            for place, one in enumerate(draw()):
                text = svg(one.figure, name=one.name)
                found.append(
                    Plate(
                        place=(group, place),
                        name=one.name,
                        section=one.section,
                        caption=one.caption,
                        svg=text,
                        paths=tuple(_write(one, text, folder, format) for format in formats),
                    )
                )
    return found


def _write(one: Drawn, text: str, folder: Path, format: str) -> Path:
    path = folder / f"{one.name}.{format}"
    if format == "svg":
        write_atomically(path, text.encode())
    else:
        metadata = {"CreationDate": None} if format == "pdf" else None
        one.figure.savefig(path, format=format, metadata=metadata)
    return path


class Helper:
    """A process that draws every second group of the figures."""

    def __init__(self, connection: Connection, process: BaseProcess) -> None:
        self._connection = connection
        self._process = process

    def plates(self, comparison: Comparison, folder: Path, formats: Sequence[str]) -> list[Plate]:
        """As the function; UnavailableError where the process died, else what it raised."""
        try:
            self._connection.send((comparison, folder, formats))
            own = plates(comparison, folder, formats, share=(0, 2))
            theirs = self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(ENDING)
            code = self._process.exitcode
            how = "was killed (out of memory?)" if (code or 0) < 0 else f"ended with code {code}"
            raise UnavailableError(
                f"the process that helps to draw the figures {how}; "
                "name fewer formats, as in --figures svg"
            ) from None
        if isinstance(theirs, Exception):
            raise theirs
        return sorted(own + theirs, key=lambda plate: plate.place)


@contextmanager
def helper() -> Iterator[Helper]:
    """Start the process; it ends with the body, and with this process however that ends."""
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    # Ctrl-C reaches the whole group: leave it to this process, which ends the other. The tracker,
    # which any spawn starts, would unblock the signal again.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    there.close()
    try:
        # BLAS's threads, which wait by spinning, would take the core that the process needs.
        with threadpool_limits(1, user_api="blas"):
            yield Helper(here, process)
    finally:
        here.close()
        process.terminate()
        process.join()


def _serve(connection: Connection) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        comparison, folder, formats = connection.recv()
    except EOFError:
        return
    try:
        answer: object = plates(comparison, folder, formats, share=(1, 2))
    except Exception as error:
        answer = error
    connection.send(answer)


def processes() -> int:
    """How many to draw in: two where there are two cores to run them."""
    return 2 if sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1 else 1
