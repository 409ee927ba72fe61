"""How the numbers were made, from the keys: quantizers, calibration, scoring, versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from qbench.comparison.explain import flat
from qbench.comparison.lines import Comparison
from qbench.records import Record
from qbench.report.table import Cell, DataTable, build, short
from qbench.text import NO_VALUE

# Parts of a key that have a table of their own, or follow from the others.
APART = ("quantizer", "calibration", "damage against")
PLAIN = {"None": "none", "True": "yes", "False": "no"}  # of a key's parts, which are Python's
SAID = ("name", "method", "bits", "title")  # of a quantizer's settings, in columns of their own


def headline(comparison: Comparison) -> list[str]:
    """Normalizers, dtype, scoring and machine, in a few words each."""
    records = [record for record in comparison.records.values() if record.status == "ok"]
    if not records:
        return []
    told = [
        ("Normalizer and kernel", _each(records, lambda r: r.attention)),
        ("Computed in", _each(records, _dtype)),
        ("Scoring", _each(records, lambda r: r.scoring.mode if r.scoring else "")),
        (
            "Machine",
            _each(records, lambda r: f"{r.environment.hardware} ({r.environment.device})"),
        ),
    ]
    return [f"{name}: {', '.join(values)}" for name, values in told if values]


def _each(records: Sequence[Record], of: Callable[[Record], str]) -> list[str]:
    return [value for value in dict.fromkeys(map(of, records)) if value]


def _dtype(record: Record) -> str:
    settings = _mapping(record.key_parts.get("quantizer"))
    return str(settings.get("compute_dtype") or settings.get("dtype") or "")


def quantizers(comparison: Comparison) -> Iterator[DataTable]:
    """One row a quantizer; a second one where checkpoints have it with other settings."""
    head = ["Quantizer", "Method", "Precision", "Settings", "Calibration", "Cells"]
    found: dict[tuple[str, ...], list[str]] = {}
    for record in comparison.records.values():
        settings = _mapping(record.key_parts.get("quantizer"))
        row = (
            record.quantizer,
            record.title,
            record.precision.name if record.quantized else "unquantized",
            _listed({name: value for name, value in settings.items() if name not in SAID}),
            _calibration(_mapping(record.key_parts.get("calibration"))),
        )
        found.setdefault(row, []).append(record.cell)
    every = len(comparison.checkpoints)
    rows = [
        [*(Cell(text=text) for text in row), Cell(text="" if len(on) == every else ", ".join(on))]
        for row, on in found.items()
    ]
    if rows:
        caption = "Every setting of each quantizer, and the text that it was calibrated on."
        yield build("quantizers", "settings", "Quantizers", caption, head, rows, keys=1)


def settings(comparison: Comparison) -> Iterator[DataTable]:
    """Every other part of the cells' keys: a row a value."""
    found: dict[str, dict[str, list[str]]] = {}
    for record in comparison.records.values():
        for part, value in flat(record.key_parts):
            if part.split(".")[0] not in APART:
                found.setdefault(part, {}).setdefault(value, []).append(record.cell)
    whole = len(comparison.records)
    rows = [
        [
            Cell(text=part),
            Cell(text=PLAIN.get(value, short(value)), title=value if value != short(value) else ""),
            Cell(text=_which(cells, comparison, whole)),
        ]
        for part, values in found.items()
        for value, cells in values.items()
    ]
    if rows:
        caption = (
            "What the key of a record is made of, quantizers aside: tasks (digests of definition "
            "and data), few-shot examples, scoring, attention, versions, weights. A change of any "
            "is a new record."
        )
        head = ["Setting", "Value", "In"]
        yield build("settings", "settings", "Everything else", caption, head, rows, keys=1)


def _which(cells: Sequence[str], comparison: Comparison, whole: int) -> str:
    """Cells in few words: all, those of a checkpoint, or by name."""
    if len(cells) == whole:
        return "all cells"
    named = set(cells)
    for checkpoint in comparison.checkpoints:
        own = {name for name, r in comparison.records.items() if r.checkpoint == checkpoint}
        if named == own:
            return f"{checkpoint}/*"
    labels = dict.fromkeys(cell.rpartition("/")[2] for cell in cells)
    full = {n for n, r in comparison.records.items() if r.quantizer in labels}
    return ", ".join(f"*/{label}" for label in labels) if named == full else ", ".join(cells)


def _calibration(parts: Mapping[str, object]) -> str:
    if not parts:
        return ""
    told = []
    if "samples" in parts and "length" in parts:
        told.append(f"{parts['samples']} × {parts['length']:,} tokens")
    rest = {name: value for name, value in parts.items() if name not in ("samples", "length")}
    return ", ".join([*told, *([_listed(rest)] if rest else [])])


def _listed(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in settings.items()) or NO_VALUE


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return f"({_listed(value)})"
    return "none" if value is None else short(str(value))


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
