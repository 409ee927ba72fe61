"""Which precision is best under a size: of each score the best one, and which others are not
significantly worse."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from qbench.comparison.changes import CellResults, adjusted, change, read_results
from qbench.comparison.lines import Comparison, Entry, Line, redundant
from qbench.comparison.wording import metric_text
from qbench.errors import ResultsError
from qbench.store import Store
from qbench.tables.scores import entry_text, gib
from qbench.tables.table import Table, from_rows
from qbench.text import MINUS, NO_VALUE, significant

ALPHA = 0.05
NOTES = (
    "Best: the best score of the quantized precisions.",
    "Points a GiB: what a GiB saved against the unquantized model changes the score by.",
    "Worse: significantly, paired by document, at 5 % after Holm's correction over this table.",
)


def ranking(comparison: Comparison, store: Store, max_gib: float | None = None) -> list[Table]:
    """A row a checkpoint and score. ``max_gib``: only precisions whose weights take no more.

    Raises ResultsError where no quantized cell is so small or has a score.
    """
    results = read_results(store).cells
    allowed = {
        cell.cell
        for cell in comparison.grid.cells
        if cell.quantized
        and cell.cell in results
        and (max_gib is None or (gib(comparison.records[cell.cell]) or math.inf) <= max_gib)
    }
    found = list(_best(comparison, allowed))
    if not found:
        limit = "" if max_gib is None else f" of at most {max_gib:g} GiB of weights"
        raise ResultsError(f"{store.directory}: no quantized cell{limit} has a score to rank")
    worse = _worse(found, results)
    rows = []
    for line, entries, best, others in found:
        apart, alike = (
            [one for one in others if worse[entries[one].cell, line.task, line.metric] is answer]
            for answer in (True, False)
        )
        size = gib(comparison.records[entries[best].cell])
        rows.append(
            {
                "Task": line.label,
                "Metric": metric_text(line),
                "Checkpoint": entries[best].checkpoint,
                "Best": best,
                "GiB": NO_VALUE if size is None else significant(size),
                "Score": entry_text(entries[best], line),
                "Points a GiB": _points_a_gib(comparison, line, entries, best),
                "Not significantly worse": ", ".join(alike) or NO_VALUE,
                "Worse": ", ".join(apart) or NO_VALUE,
            }
        )
    return from_rows(
        rows,
        title="Best precision" + ("" if max_gib is None else f" under {max_gib:g} GiB"),
        notes=NOTES,
        words=4,
        also_words=("Not significantly worse", "Worse"),
        grouped=True,
    )


def _points_a_gib(
    comparison: Comparison, line: Line, entries: Mapping[str, Entry], best: str
) -> str:
    """Of accuracies, which have points."""
    pair = [entries.get(name) for name in (comparison.unquantized, best)]
    if not line.percent or None in pair:
        return NO_VALUE
    sizes = [gib(comparison.records.get(one.cell)) for one in pair]
    scores = [one.value for one in pair]
    if None in (*sizes, *scores) or sizes[0] <= sizes[1]:
        return NO_VALUE
    return f"{100 * (scores[1] - scores[0]) / (sizes[0] - sizes[1]):+.3g}".replace("-", MINUS)


# A line of a score, its entries of one checkpoint by quantizer, the best quantizer, the others.
Ranked = tuple[Line, Mapping[str, Entry], str, list[str]]


def _best(comparison: Comparison, allowed: Collection[str]) -> Iterator[Ranked]:
    """Of each score and checkpoint, over the cells that are ``allowed``."""
    scores: dict[tuple[str, str], list[Line]] = {}
    for line in comparison.lines:
        if not redundant(line, comparison.lines):
            scores.setdefault((line.task, line.metric), []).append(line)
    for lines in scores.values():
        for checkpoint in comparison.checkpoints:
            entries = {line.quantizer: line.entry(checkpoint) for line in lines}
            values = {
                name: one.value
                for name, one in entries.items()
                if one.cell in allowed and one.value is not None
            }
            if values:
                sign = 1 if lines[0].higher_is_better else -1
                best = max(values, key=lambda name: sign * values[name])
                yield lines[0], entries, best, [name for name in values if name != best]


def _worse(
    found: Sequence[Ranked], results: Mapping[str, CellResults]
) -> dict[tuple[str, str, str], bool | None]:
    """By cell, task and metric: whether it is significantly worse than the best; None where no
    test is known, as of bleu."""
    changes = [
        change(
            entries[other].cell,
            (line.task, line.metric),
            results[entries[best].cell],
            results[entries[other].cell],
        )
        for line, entries, best, others in found
        for other in others
    ]
    return {
        (one.cell, one.task, one.metric): one.effect and one.effect.p_holm < ALPHA
        for one in adjusted(changes)
    }
