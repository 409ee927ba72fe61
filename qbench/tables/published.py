"""Put a paper's printed numbers beside the same scores of ours.

``published.csv`` has every number of the papers' tables as printed, one per row, in lm-eval's
names for tasks and metrics and ours for quantization methods.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources

from qbench.comparison.rows import Comparison, Row
from qbench.errors import RecipeError
from qbench.metrics import base_metric
from qbench.text import MINUS, NO_VALUE

# Set → the size of its models and the paper's tables of a pair's scores.
SETS = {
    "softpick-340m": ("340M", ("Table 2", "Table 7", "Table 8", "Table 9", "Table 10")),
    "softpick-1.8b": ("1.8B", ("Table 3", "Table 11", "Table 12", "Table 13")),
}
DOUBTS = {
    "Table 2": "WikiText's word perplexities 23.85 and 24.32 are 204.94 and 141.56 in Table 6.",
    "Table 7": "96.9 of scalable-softmax is no multiple of 0.5, as the rates of 200 trials are.",
    "Table 13": "2 bits repeat 3 bits in all 18 scores, which lie within 0.16 of the unquantized "
    "ones of Table 3, as if nothing had been quantized.",
}


@cache
def published_rows() -> tuple[dict[str, str], ...]:
    """Return the rows of ``published.csv``."""
    text = resources.files(__package__).joinpath("published.csv").read_text("utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def _set(name: str) -> tuple[str, tuple[str, ...]]:
    if name not in SETS:
        raise RecipeError(f"--published {name}: unknown; possible: {', '.join(SETS)}")
    return SETS[name]


@cache
def _scores(name: str) -> Mapping[tuple[str, ...], dict[str, str]]:
    """Return a set's rows by (model, task, metric, method, bits)."""
    scale, tables = _set(name)
    return {
        tuple(row[part] for part in ("model", "task", "metric", "method", "bits")): row
        for row in published_rows()
        if row["scale"] == scale and row["table"] in tables
    }


def find_printed(
    comparison: Comparison, line: Row, checkpoint: str, published: str
) -> dict[str, str] | None:
    """Return the row of ``published.csv`` of the same normalizer, task, metric, method and bits.

    Raises RecipeError for an unknown set.
    """
    record = comparison.records.get(line.entry(checkpoint).cell)
    bits = "" if line.bits is None else f"{line.bits:g}"
    model = record.normalizer if record else checkpoint
    name = (model, line.task, base_metric(line.metric), line.method, bits)
    return _scores(published).get(name)


def standard_errors_away(line: Row, checkpoint: str, printed: float) -> float | None:
    """Return (ours − printed) / our standard error, of perplexities on their logarithms; None
    without a score or an error."""
    entry, interval = line.entry(checkpoint), line.intervals.get(checkpoint)
    stderr = entry.stderr or (interval.stderr if interval else None)
    if entry.value is None or not stderr:
        return None
    if line.ratio:
        return math.log(entry.value / printed) * entry.value / stderr
    return (entry.value - printed / (100.0 if line.percent else 1.0)) / stderr


def printed_cells(
    comparison: Comparison, line: Row, checkpoints: Sequence[str], published: str
) -> list[tuple[str, str]]:
    """Return (head, text) of the paper's number for each checkpoint of a row."""
    cells = []
    for name in checkpoints:
        row = find_printed(comparison, line, name, published)
        text = NO_VALUE
        if row is not None:
            away = standard_errors_away(line, name, float(row["value"]))
            text = row["value"] + ("" if away is None else f" ({away:+.1f} SE)")
        cells.append((f"{name}, printed", text.replace("-", MINUS)))
    return cells


def printed_notes(comparison: Comparison, lines: Iterable[Row], published: str) -> list[str]:
    """Return notes: in which tables the numbers stand, and what is doubtful about them."""
    printed_rows = (
        find_printed(comparison, line, entry.checkpoint, published)
        for line in lines
        for entry in line.entries
    )
    tables = list(dict.fromkeys(row["table"] for row in printed_rows if row))
    if not tables:
        return [f"{published} prints none of these cells."]
    return [
        f"Printed: {published}, {', '.join(tables)}; in brackets ours minus the printed value, in "
        "our standard errors.",
        *(f"Beware, {name}: {DOUBTS[name]}" for name in tables if name in DOUBTS),
    ]


def printed_measures(published: str) -> dict[str, dict[str, str]]:
    """Return model → measure → value of the softpick paper's table 4, of the set's size."""
    scale, _ = _set(published)
    measures: dict[str, dict[str, str]] = {}
    for row in published_rows():
        if row["table"] == "Table 4" and row["scale"] == scale:
            values = measures.setdefault(f"{scale} {row['model']}", {})
            values[row["metric"]] = row["value"].replace("-", MINUS)
    return measures
