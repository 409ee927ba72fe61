"""Files from one host's disk to another's, in parts, over the cluster's own connections.

What is called here on a worker runs beside its cells, and needs no slot of theirs. A folder or
file appears under its name only when all of it is there.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qbench.cluster.located import WHOLE, Wanted, sources_of
from qbench.errors import UnavailableError
from qbench.files import temporary

PART = 16 * 2**20  # bytes in one message
MOST = 200 * 2**30  # bytes that are sent for one folder; more belongs on a shared file system


class Transfers:
    """Who has what, and copies under way: a folder is sent to a cache once, however many cells
    want it there."""

    def __init__(self, ask: Callable[..., Any], say: Callable[[str], None]) -> None:
        """``ask(worker, function, *arguments)`` calls a function on a worker."""
        self._ask, self._say = ask, say
        self._lock = threading.Lock()
        self._under_way: dict[tuple[str, str], threading.Lock] = {}

    def send(self, wanted: Wanted, worker: str, cache: str, host: str) -> None:
        """From this host into the cache ``cache``, which ``worker`` can write."""
        with self._alone(cache, wanted.target):
            if self._ask(worker, is_whole, wanted.target):
                return
            files = sources_of(wanted)
            total = sum(path.stat().st_size for _, path in files)
            self._check(total, wanted, host)
            if total > PART:
                self._say(f"sending {wanted.name} ({total / 1e6:,.0f} MB) to {host}")
            self._copy(worker, wanted.target, [(name, _local_parts(path)) for name, path in files])

    def pass_on(self, target: str, origin: str, worker: str, cache: str, host: str) -> None:
        """A folder ``target`` of the cache that the worker ``origin`` sees, into ``cache``."""
        with self._alone(cache, target):
            if self._ask(worker, is_whole, target):
                return
            sizes = self._ask(origin, sizes_of, target)
            if sum(sizes.values()) > PART:
                self._say(f"passing {target} ({sum(sizes.values()) / 1e6:,.0f} MB) to {host}")

            def parts(name: str) -> Any:
                for start in range(0, max(sizes[name], 1), PART):
                    yield self._ask(origin, read_part, target, name, start)

            self._copy(worker, target, [(name, parts(name)) for name in sizes])

    def _copy(self, worker: str, target: str, files: Sequence[tuple[str, Any]]) -> None:
        self._ask(worker, begin, target)
        for name, parts in files:
            for number, part in enumerate(parts):
                self._ask(worker, write_part, target, name, part, number == 0)
        self._ask(worker, finish, target)

    def _check(self, total: int, wanted: Wanted, host: str) -> None:
        if total > MOST:
            raise UnavailableError(
                f"{wanted.name}: {total / 2**30:.0f} GiB are too much to send to {host}; put it "
                "on a file system that all workers see, at the same path"
            )

    def _alone(self, cache: str, target: str) -> threading.Lock:
        with self._lock:
            return self._under_way.setdefault((cache, target), threading.Lock())


def _local_parts(path: Path) -> Any:
    with path.open("rb") as file:
        yield file.read(PART)
        while part := file.read(PART):
            yield part


# On a worker


def is_whole(target: str) -> bool:
    """A folder of quantized weights appears in one step, others say that they are whole."""
    folder = _cache() / target
    return (folder / WHOLE).is_file() or (folder / "manifest.json").is_file()


def sizes_of(target: str) -> dict[str, int]:
    """Bytes of each file below the folder ``target``."""
    root = _cache() / target
    return {
        path.relative_to(root).as_posix(): path.stat().st_size
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def read_part(target: str, name: str, start: int) -> bytes:
    with (_cache() / target / name).open("rb") as file:
        file.seek(start)
        return file.read(PART)


def begin(target: str) -> None:
    shutil.rmtree(_making(target), ignore_errors=True)
    _making(target).mkdir(parents=True)


def write_part(target: str, name: str, part: bytes, first: bool) -> None:
    path = _making(target) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb" if first else "ab") as file:
        file.write(part)


def finish(target: str) -> None:
    """Put the folder under its name. One that another process made meanwhile stays."""
    making, final = _making(target), _cache() / target
    (making / WHOLE).touch()
    with suppress(OSError):  # it is there and not empty
        os.rename(making, final)
    if not is_whole(target):
        shutil.rmtree(final, ignore_errors=True)
        os.rename(making, final)
    shutil.rmtree(making, ignore_errors=True)


def _making(target: str) -> Path:
    return temporary(_cache() / target)


def _cache() -> Path:
    from qbench.cell import cache_folder

    return cache_folder()
