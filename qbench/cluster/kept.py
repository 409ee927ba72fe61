"""What the caches of a cluster's workers hold that cells on other hosts need: quantized weights,
and rows of unquantized cells. The host of the run keeps a list, so that it need not ask every
worker for every cell."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.cell import cache_folder, distributions_folder
from qbench.cluster.located import WHOLE
from qbench.errors import ResultsError
from qbench.evaluation.baseline import baseline_file, checksum_file, verify_baseline
from qbench.machine.environment import versions
from qbench.plan import Cell, Plan, content_key

if TYPE_CHECKING:
    from distributed import Client

SECONDS_KNOWN = 10.0  # other runs quantize on the same workers, too
SECONDS_BETWEEN_LOOKS = 2.0
IDENTIFYING = ("original", "quantizer", "versions", "code", "device")  # parts of an artifact's key


class Kept:
    """What is where. ``ask_all(function, …)`` asks one worker of each cache; ``there(worker)``
    says whether one still is."""

    def __init__(self, ask_all: Callable[..., dict], there: Callable[[str], bool]) -> None:
        self._ask_all, self._there = ask_all, there
        self._lock = threading.Lock()
        self._artifacts: dict[str, set[str]] = {}  # stage → folders
        self._asked: dict[str, float] = {}  # checkpoint → when all were asked
        self._rows: dict[str, tuple[str, str]] = {}  # key of a cell → worker, folder

    def artifacts(self, cell: Cell, stages: Sequence[str], *, anew: bool) -> tuple[str, ...]:
        """Folders of the caches with the quantized weights of ``stages``; ``anew``: another run
        has just made some."""
        of = cell.checkpoint.digest
        if stages and (anew or time.monotonic() - self._asked.get(of, -1e9) > SECONDS_KNOWN):
            self._asked[of] = time.monotonic()
            for found in self._ask_all(artifacts_here, of).values():
                self.learn(found)
        with self._lock:
            return tuple(sorted({f for stage in stages for f in self._artifacts.get(stage, ())}))

    def learn(self, artifacts: dict[str, list[str]]) -> None:
        with self._lock:
            for stage, folders in artifacts.items():
                self._artifacts.setdefault(stage, set()).update(folders)

    def rows(self, key: str) -> tuple[str, str] | None:
        """A worker that has the rows, and the folder of its cache that they are in."""
        known = self._rows.get(key)
        if known is not None and self._there(known[0]):
            return known
        for worker, target in self._ask_all(rows_here, key).items():
            if target is not None:
                self._rows[key] = worker, target
                return worker, target
        self._rows.pop(key, None)
        return None

    def lost(self, target: str) -> None:
        """Nobody has the folder any more."""
        with self._lock:
            for folders in self._artifacts.values():
                folders.discard(target)
            self._rows = {key: one for key, one in self._rows.items() if one[1] != target}


class Alone:
    """Cells that quantize the same do so one after the other: those of this run wait here, before
    they take a worker, and those of other runs on the cluster by its locks. ``check`` raises where
    the run has ended, ``say`` is told of others."""

    def __init__(
        self, client: Client, check: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self._client, self._check, self._say = client, check, say
        self._lock = threading.Lock()
        self._here: dict[str, threading.Lock] = {}

    @contextmanager
    def here(self, stages: Iterable[str]) -> Iterator[None]:
        with ExitStack() as stack:
            for stage in stages:
                with self._lock:
                    lock = self._here.setdefault(stage, threading.Lock())
                while not lock.acquire(timeout=SECONDS_BETWEEN_LOOKS):
                    self._check()
                stack.callback(lock.release)
            yield

    @contextmanager
    def everywhere(self, cell: str, stages: Iterable[str]) -> Iterator[bool]:
        """Whether another run held one of them, or was killed while it did."""
        from distributed import Lock

        with ExitStack() as stack:
            waited = False
            for stage in stages:
                lock = Lock(
                    f"qbench-{stage}", scheduler_rpc=self._client.scheduler, loop=self._client.loop
                )
                while not lock.acquire(timeout=SECONDS_BETWEEN_LOOKS):
                    if not waited:
                        self._say(f"{cell}: waiting for another run at the same weights")
                    waited = True
                    self._check()
                stack.callback(_release, lock)
            yield waited


def _release(lock: Any) -> None:
    with suppress(OSError, RuntimeError):  # the cluster was lost
        lock.release()


def stages_of(cell: Cell, plan: Plan) -> tuple[str, ...]:
    """What is made and kept of a cell's quantized weights: a name of each that is the same on all
    hosts and for all cells that share it; in a fixed order."""
    if not cell.quantization.precision.quantized:
        return ()
    device = plan.hardware if plan.device == "cuda" else plan.device
    found = set()
    for stage in cell.quantization.stages:
        libraries = ("torch", "transformers", "triton", *stage.requirements)
        installed = versions(libraries)
        found.add(
            _identity(
                {
                    "original": cell.checkpoint.digest,
                    "quantizer": stage.to_dict(),
                    "versions": {name: installed[name] for name in libraries},
                    "code": cell.key_parts["code"],
                    "device": device,
                }
            )
        )
    return tuple(sorted(found))


def _identity(parts: dict[str, Any]) -> str:
    return content_key({name: parts[name] for name in IDENTIFYING})[:32]


# On a worker


def artifacts_here(digest: str) -> dict[str, list[str]]:
    """Folders of this worker's cache with quantized weights of the checkpoint ``digest``, by the
    stage that made them. Those of one stage differ in their calibration."""
    root, found = cache_folder() / "artifacts" / digest[:16], {}
    for manifest in sorted(root.glob("*/manifest.json")):
        with suppress(OSError, ValueError, KeyError):
            stage = _identity(json.loads(manifest.read_bytes())["parts"])
            folder = manifest.parent.relative_to(cache_folder()).as_posix()
            found.setdefault(stage, []).append(folder)
    return found


def rows_here(key: str) -> str | None:
    """The folder of this worker's cache from which the rows of the unquantized cell ``key`` can be
    read by others; None where they are not here."""
    cache = cache_folder()
    path = baseline_file(distributions_folder(cache), key)
    if not usable(path, key):
        return None
    sidecar = checksum_file(path)
    target = f"files/rows-{key[:16]}-{sidecar.read_text()[:16]}"
    folder = cache / target
    if not (folder / WHOLE).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for source in (path, sidecar):
            with suppress(FileExistsError):
                os.link(source, folder / source.name)
        (folder / WHOLE).touch()
    return target


_checked: dict[Path, tuple[int, int]] = {}  # files that were read whole, and their state then


def usable(path: Path, key: str) -> bool:
    """Whether rows are there, whole and of the cell ``key``. Reads all of a file that has changed
    since it was read: gigabytes."""
    try:
        found = path.stat()
    except OSError:
        return False
    state = found.st_size, found.st_ino
    if _checked.get(path) == state:
        return True
    try:
        verify_baseline(path, key)
    except ResultsError:
        return False
    _checked[path] = state
    return True
