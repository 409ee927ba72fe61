"""Say which parts of the keys of two cells differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qbench.errors import ResultsError
from qbench.records import Record, read_record
from qbench.store import Store
from qbench.text import one_line

ABSENT = "(absent)"


def key_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (name, value in a, value in b) for each part of two keys that differs, in the order
    of the key; an empty list if the keys are equal."""
    left, right = (dict(flat(parts)) for parts in (a, b))
    parts = dict.fromkeys([*left, *right])
    found = [(part, left.get(part, ABSENT), right.get(part, ABSENT)) for part in parts]
    return [(part, one, other) for part, one, other in found if one != other]


FILES = {
    "weights": "other weights",
    "config": "another config.json",
    "tokenizer": "another tokenizer",
}


def changed_files(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return which files of the checkpoint differ; those of older records are not told apart."""
    before, after = old.get("checkpoint"), new.get("checkpoint")
    if not before or not after:
        return "other weights, configuration or tokenizer"
    changed = [words for part, words in FILES.items() if before.get(part) != after.get(part)]
    return " and ".join(changed) or "other files of the checkpoint"


def text(a: Record, b: Record) -> str:
    """Return the differences between two records' keys, one per line, aligned."""
    found = key_differences(a.key_parts, b.key_parts)
    if not found:
        return f"{a.cell} and {b.cell} have the same key, {a.key[:16]}."
    width = max(len(part) for part, _, _ in found)
    return "\n".join(f"{part.ljust(width)}  {one}  →  {other}" for part, one, other in found)


def find_cell(name: str, run: str | None = None) -> tuple[Store, Record]:
    """The record called ``name``, a record's JSON file or DIR/CHECKPOINT/QUANTIZER, and the store
    that it lies in.

    Raises ResultsError where there is none, naming the folder's cells, or it is damaged.
    """
    path = Path(name)
    if path.is_file():
        if b'"key_parts"' not in path.read_bytes():
            raise ResultsError(f"{name}: not a record; name a records/…/KEY.json file")
        above = path.absolute().parents
        return Store(above[min(3, len(above) - 1)], run=run), read_record(path, Record)
    if len(path.parts) < 3 and not Store(path.parent.parent).has_manifest():
        raise ResultsError(f"{name}: write DIR/CHECKPOINT/QUANTIZER, or a record's JSON file")
    store = Store(path.parent.parent, run=run)
    cell = "/".join(path.parts[-2:])
    cells = {one.cell: one for one in store.manifest().cells}
    if cell not in cells:
        raise ResultsError(f"{name}: no cell {cell}; {store.directory} has {', '.join(cells)}")
    record = store.get(cells[cell])
    if record is None:
        raise ResultsError(f"{name}: this cell has no record yet; run the recipe again")
    return store, record


def flat(parts: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, value as text) of every part of a key."""
    if isinstance(parts, Mapping) and parts:
        for name, part in parts.items():
            yield from flat(part, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield one_line(prefix), one_line(str(parts))
