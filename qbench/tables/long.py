"""Delta tables as CSV: one row a score, each with the key of the record that it comes from."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from qbench.compare import Comparison, Entry, Line

COLUMNS = (
    "task",
    "label",
    "metric",
    "direction",
    "method",
    "bits",
    "quantizer",
    "checkpoint",
    "status",
    "value",
    "stderr",
    "documents",
    "delta",
    "key",
    "reason",
)


def comma_separated(comparison: Comparison) -> str:
    """All scores of the grid in full precision and the record's units, failed and missing too."""
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    for line in comparison.lines:
        for entry in line.entries:
            table.writerow(dict(_row(comparison, line, entry)))
    return text.getvalue()


def _row(comparison: Comparison, line: Line, entry: Entry) -> Iterator[tuple[str, object]]:
    yield "task", line.task
    yield "label", line.label
    yield "metric", line.metric
    yield "direction", "up" if line.higher_is_better else "down"
    yield "method", line.method
    yield "bits", line.bits
    yield "quantizer", line.quantizer
    yield "checkpoint", entry.checkpoint
    yield "status", entry.status
    yield "value", entry.value
    yield "stderr", entry.stderr
    yield "documents", entry.documents
    yield "delta", line.delta(entry.checkpoint) if entry.checkpoint in comparison.others else None
    yield "key", entry.key
    yield "reason", entry.reason
