"""Keep results of runs for later runs, each under its content key. Imports no torch.

    CACHE/artifacts/<weights16>/<config>-<key16>/        quantized weights
    CACHE/distributions/<key16>.safetensors              hidden states that damage is measured with
    CACHE/cells/<key16>.json, <key16>.….parquet          finished records with their tables
    CACHE/tasks/<key16>.json, <key16>.….parquet          finished tasks of a cell with their tables
    CACHE/digests/<key16>.json                           of large files, with their identity
    CACHE/fits/<key16>.json                              which tensors of a checkpoint do not fit
    CACHE/sources/<run>.json                             where a run of this machine read its tasks

A run that finds a key here does not compute it again. Reading an entry sets its time, so that
pruning removes what was not used for longest.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from qbench.errors import OutputError, ResultsError
from qbench.files import (
    clean_temporaries,
    content_key,
    mark_used,
    write_atomically,
)
from qbench.machine import GIB
from qbench.records import CellKey, Record
from qbench.store import KeyedStore, Store, Table

MANIFEST = "manifest.json"
MIB = 2**20


def in_words(size: int) -> str:
    """Return a number of bytes as text: 0.5 MiB, 12.3 GiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"


def task_key(
    parts: Mapping[str, Any], task: str, base_parts: Mapping[str, Any] | None = None
) -> str:
    """Return the key of one ``task`` of the cell with the key parts ``parts``.

    It does not depend on the cell's other tasks. ``base_parts`` are those of the unquantized cell
    that damage is measured against; None if it is not measured.
    """
    single = {
        name: part for name, part in parts.items() if name not in ("groups", "damage against")
    }
    for name in ("tasks", "few-shot"):
        single[name] = {task: parts[name][task]}
    if base_parts is not None:
        single["damage against"] = task_key(base_parts, task)
    return content_key(single)


def head_key(parts: Mapping[str, Any]) -> str:
    """Return the key under which a cell keeps its LM head, the same for all of its tasks."""
    left_out = ("groups", "damage against", "tasks", "few-shot", "scoring")
    return content_key({name: part for name, part in parts.items() if name not in left_out})


def keep_cell(cache: Path, record: Record, store: Store) -> None:
    """Copy a finished ``record`` of ``store`` and its tables into the cache, unless it is there.

    Does nothing if the disk is full: the record itself is written.
    """
    cells = KeyedStore(cache, Record)
    if not cells.path(record).is_file():
        with suppress(OutputError):
            cells.put(record, **{name: store.payload(record, name) for name in record.files})


def find_cell(cache: Path, cell: CellKey) -> tuple[Record, dict[Table, bytes]] | None:
    """Return the intact record under the key of ``cell``, under the names of ``cell``, and the
    content of its tables; None if there is none."""
    cells = KeyedStore(cache, Record)
    with suppress(ResultsError, OSError):
        record = cells.get_valid(cell)
        if record is not None:
            mark_used(cells.path(cell))
            names = {"checkpoint": cell.checkpoint, "quantizer": cell.quantizer}
            tables = {name: cells.payload(record, name) for name in record.files}
            return record.model_copy(update=names), tables
    return None


class Sources(NamedTuple):
    """What a run read on this machine: folders of tasks (None: the hub's data, lm-eval's
    definitions), the file of calibration text, and checkpoints by name."""

    data: Path | None = None
    definitions: Path | None = None
    calibration: Path | None = None
    checkpoints: Mapping[str, Path] = MappingProxyType({})


def keep_sources(cache: Path, run: str, sources: Sources) -> None:
    """Keep what the run with the id ``run`` read, for ``qbench view`` and ``qbench export``.

    They are kept here, not in the results: those may come from another person, and definitions may
    hold code.
    """
    values: dict[str, Any] = sources._asdict()
    values["checkpoints"] = {name: str(path) for name, path in sources.checkpoints.items()}
    for name in ("data", "definitions", "calibration"):
        values[name] = values[name] and str(values[name].resolve())
    with suppress(OutputError):
        write_atomically(cache / "sources" / f"{run}.json", json.dumps(values).encode())


def find_sources(cache: Path, run: str) -> Sources:
    """Return what :func:`keep_sources` kept of the run; nothing if it ran on another machine."""
    with suppress(OSError, ValueError, TypeError):
        values = json.loads((cache / "sources" / f"{run}.json").read_bytes())
        checkpoints = {name: Path(path) for name, path in values.pop("checkpoints", {}).items()}
        paths = {name: Path(path) for name, path in values.items() if path}
        return Sources(**paths, checkpoints=checkpoints)
    return Sources()


@contextmanager
def hold(paths: Iterable[Path]) -> Iterator[None]:
    """Keep the entries ``paths`` of the cache, which need not exist yet, from being pruned while
    the body runs. Several processes may hold the same entry."""
    with ExitStack() as stack:
        for path in paths:
            lock = _lock_path(path)
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(lock.open("a"))
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _lock_path(path: Path) -> Path:
    """Return the lock file of an entry, the same as ``quantizers.artifacts`` takes."""
    return path.with_name(f".{path.name}.lock")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One entry of the cache: its files, their size in bytes and the time of its last use in
    seconds since 1970."""

    kind: str  # "weights", "hidden states", "cell" or "task"
    path: Path
    files: tuple[Path, ...]
    bytes: int
    used: float

    @property
    def name(self) -> str:
        folder = f"{self.path.parent.name}/" if self.kind == "weights" else ""
        return f"{self.kind} {folder}{self.path.stem if self.path.suffix else self.path.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """What :func:`prune` removed, what it left because a run uses it, and the files of killed
    processes that it removed."""

    removed: list[Entry]
    in_use: list[Entry]
    leftovers: list[Path]


def entries(cache: Path) -> list[Entry]:
    """Return the entries of the folder ``cache``, the least recently used first."""
    files = {
        "weights": [
            (path.parent, [path.parent]) for path in cache.glob(f"artifacts/*/*/{MANIFEST}")
        ],
        "hidden states": [
            (path, [path, path.with_name(f"{path.name}.digest")])
            for path in cache.glob("distributions/*.safetensors")
        ],
    }
    for kind in ("cell", "task"):
        files[kind] = [
            (path, [path, *path.parent.glob(f"{path.stem}.*.parquet")])
            for path in cache.glob(f"{kind}s/*.json")
        ]
    listed = [_entry(kind, *item) for kind, each in files.items() for item in each]
    return sorted(listed, key=lambda entry: entry.used)


def prune(cache: Path, *, max_bytes: float, dry_run: bool = False) -> Pruned:
    """Remove the least recently used entries until the rest is at most ``max_bytes``, and the
    files that killed processes left. Entries that a run uses stay."""
    pruned = Pruned(removed=[], in_use=[], leftovers=[] if dry_run else clean_temporaries(cache))
    kept = entries(cache)
    total = sum(entry.bytes for entry in kept)
    for entry in kept:
        if total <= max_bytes:
            break
        if _remove(entry, dry_run):
            total -= entry.bytes
            pruned.removed.append(entry)
        else:
            pruned.in_use.append(entry)
    return pruned


def _remove(entry: Entry, dry_run: bool) -> bool:
    """Remove the files of ``entry`` (not with ``dry_run``); return False if a run uses it."""
    with _lock_path(entry.path).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        for path in () if dry_run else entry.files:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(True)
    return True


def _entry(kind: str, path: Path, files: list[Path]) -> Entry:
    size, used = 0, 0.0
    for part in {path, *files, *(path.iterdir() if path.is_dir() else ())}:
        with suppress(OSError):  # removed meanwhile
            status = part.stat()
            size += 0 if part.is_dir() else status.st_size
            used = max(used, status.st_mtime)
    return Entry(kind=kind, path=path, files=tuple(files), bytes=size, used=used)
