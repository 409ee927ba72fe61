"""What runs keep for later ones: quantized weights, rows that damage is measured against, and by
key which results folder has a cell's record.

Weights are used under a lock of their own, and reading an entry notes the time, so that what nobody
has used for longest is known. Imports no torch.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from qbench.errors import OutputError, ResultsError
from qbench.files import clean_temporaries, read_regular, write_atomically
from qbench.machine import GIB
from qbench.records import KEY_DIGITS, GridCell, Record
from qbench.store import Store

MANIFEST = "manifest.json"
MIB = 2**20


def cache_folder() -> Path:
    """Where quantized weights are kept: $QBENCH_CACHE, else ~/.cache/qbench."""
    return Path(os.environ.get("QBENCH_CACHE") or Path.home() / ".cache" / "qbench")


def in_words(bytes: int) -> str:
    """A size: 0.5 MiB, 12.3 GiB."""
    return f"{bytes / GIB:,.1f} GiB" if bytes >= GIB else f"{bytes / MIB:,.1f} MiB"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One artifact or one cell's rows. ``used_by``: cells of the results that were looked at."""

    kind: str  # "weights" or "rows"
    path: Path
    files: tuple[Path, ...]
    bytes: int
    used: float  # when it was last read or written, seconds since 1970
    about: str
    used_by: tuple[str, ...] = ()

    @property
    def lock(self) -> FileLock:
        """As those take it who read and write quantized weights."""
        return FileLock(self.path.with_name(f".{self.path.name}.lock"))


def entries(cache: Path, results: Sequence[Path] = ()) -> list[Entry]:
    """What the folder ``cache`` holds, the least recently used first. Cells of the records below
    the folders ``results`` are named where they use an entry."""
    cells = _cells(results)
    found = [*_weights(cache / "artifacts", cells), *_rows(cache / "distributions", cells)]
    return sorted(found, key=lambda entry: entry.used)


def prune(
    cache: Path, *, max_bytes: float, dry_run: bool = False
) -> tuple[list[Entry], list[Path]]:
    """Remove the least recently used entries until the rest is at most ``max_bytes``, and what
    processes that died have left. What a run is at work on stays.

    Returns the entries and the leftovers that were removed.
    """
    leftovers = [] if dry_run else clean_temporaries(cache)
    known = entries(cache)
    total, removed = sum(entry.bytes for entry in known), []
    for entry in known:
        if total <= max_bytes:
            break
        if dry_run or _remove(entry):
            total -= entry.bytes
            removed.append(entry)
    return removed, leftovers


def remember_record(cache: Path, record: Record, folder: Path) -> None:
    """Note that the results ``folder`` has a good ``record``, for other folders' runs."""
    place = {"folder": str(folder.resolve()), "cell": [record.checkpoint, record.quantizer]}
    path = _note(cache, record.key)
    with suppress(OutputError):  # a disk that is full: the record itself is written
        payload = json.dumps(place).encode()
        if not path.is_file() or path.read_bytes() != payload:
            write_atomically(path, payload)


def find_record(cache: Path, cell: GridCell, *, beside: Path) -> tuple[Store, Record] | None:
    """A whole record under the key of ``cell``, whatever it is called there, in another folder
    than ``beside``; None where nobody noted one, or it is gone or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, ResultsError, OutputError):
        note = json.loads(_note(cache, cell.key).read_bytes())
        store = Store(Path(note["folder"]))
        checkpoint, quantizer = note["cell"]
        there = cell.model_copy(update={"checkpoint": checkpoint, "quantizer": quantizer})
        if store.directory != beside.resolve() and (record := store.get_valid(there)) is not None:
            return store, record
    return None


def _note(cache: Path, key: str) -> Path:
    return cache / "records" / f"{key[:KEY_DIGITS]}.json"


def _remove(entry: Entry) -> bool:
    with suppress(Timeout), entry.lock.acquire(timeout=0):
        for path in entry.files:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(True)
        return True
    return False


def _weights(folder: Path, cells: Mapping[str, list[str]]) -> Iterator[Entry]:
    for manifest in folder.glob(f"*/*/{MANIFEST}"):
        path = manifest.parent
        quantizer = path.name.rpartition("-")[0]
        settings = None
        with suppress(OSError, ValueError, KeyError, TypeError):  # damaged: nobody uses it
            settings = json.loads(manifest.read_bytes())["parts"]["quantizer"]
        yield _entry(
            "weights", path, (path,), f"{quantizer} of {path.parent.name}",
            cells.get(_use(path.parent.name, settings), ()),
        )  # fmt: skip


def _rows(folder: Path, cells: Mapping[str, list[str]]) -> Iterator[Entry]:
    for path in sorted(folder.glob("*.safetensors")):
        files = path, path.with_name(f"{path.name}.digest")
        yield _entry("rows", path, files, f"unquantized cell {path.stem}", cells.get(path.stem, ()))


def _entry(
    kind: str, path: Path, files: tuple[Path, ...], about: str, used_by: Sequence[str]
) -> Entry:
    inside = [one for file in files for one in ([*file.iterdir()] if file.is_dir() else [file])]
    stats = [one.stat() for one in inside if one.exists()]
    times = [one.stat().st_mtime for one in (path, *inside) if one.exists()]
    return Entry(
        kind=kind,
        path=path,
        files=files,
        bytes=sum(one.st_size for one in stats),
        used=max(times, default=0.0),
        about=about,
        used_by=tuple(dict.fromkeys(used_by)),
    )


def _cells(results: Sequence[Path]) -> dict[str, list[str]]:
    """Cells by what they use: the key of the unquantized cell, and weights with the settings of
    a quantizer, or of a part of one."""
    found: dict[str, list[str]] = {}
    for path in (path for one in results for path in sorted(one.rglob("records/*/*/*.json"))):
        try:
            record = json.loads(read_regular(path))
            parts, name = record["key_parts"], f"{record['checkpoint']}/{record['quantizer']}"
            weights, quantizer = str(parts["weights"])[:KEY_DIGITS], parts["quantizer"]
            settings = [quantizer, *(v for v in quantizer.values() if isinstance(v, dict))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # damaged, or no record of ours: it uses nothing
        keys = [*(_use(weights, one) for one in settings), str(record.get("key"))[:KEY_DIGITS]]
        keys.append(str(parts.get("damage against"))[:KEY_DIGITS])
        for key in keys:
            found.setdefault(key, []).append(f"{path.parents[3].name}: {name}")
    return found


def _use(weights: str, settings: object) -> str:
    return f"{weights}/{json.dumps(settings, sort_keys=True)}"
