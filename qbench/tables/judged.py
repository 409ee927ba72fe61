"""How far fast scores lie from exact ones where rounding is amplified, below the tables."""

from __future__ import annotations

from qbench.comparison.lines import Comparison
from qbench.records import SampleDifference
from qbench.tables.table import Table
from qbench.text import MINUS


def judged_notes(comparison: Comparison, table: Table) -> list[str]:
    """One line, where fast scores of ``table`` were judged by their mean difference."""
    entries = {entry.cell: entry for row in table.rows for entry in row.line.entries}
    samples = [sample for cell in entries for sample in _by_bias(comparison, cell)]
    if not samples:
        return []
    widest = max(sample.mean_per_token for sample in samples)
    worst = max(samples, key=lambda sample: abs(sample.bias_per_token or 0.0))
    error = f" ± {worst.bias_stderr:.2g}" if worst.bias_stderr is not None else ""
    bias = f"{worst.bias_per_token:+.2g}".replace("-", MINUS)
    return [
        "Where activations or the KV cache are quantized, rounding moves values by whole steps, so "
        "that two equally right computations differ: fast scores of single requests from exact "
        f"ones by up to {widest:.2g} nats a token in the mean of a task's sample. They were judged "
        f"by their mean difference with its sign, at most {bias}{error}."
    ]


def _by_bias(comparison: Comparison, cell: str) -> list[SampleDifference]:
    record = comparison.records.get(cell)
    difference = record.scoring.difference_from_exact if record and record.scoring else None
    return [sample for sample in difference.samples if sample.by_bias] if difference else []
