"""Correct accuracies for chance, and find the tasks that a model only guesses."""

from __future__ import annotations

from collections.abc import Mapping

from qbench.comparison.rows import Comparison, Row, status_of
from qbench.errors import ResultsError
from qbench.metrics import base_metric
from qbench.statistics import Interval
from qbench.store import Store

ACCURACIES = ("acc", "acc_norm")


def chance_of_tasks(comparison: Comparison, store: Store) -> dict[str, float]:
    """Return task → the accuracy of guessing: the mean of 1 / choices over its documents, 0 if it
    has none to choose from. Tasks of which no record's responses can be read are left out.
    """
    found: dict[str, float] = {}
    for record in comparison.records.values():
        tasks = {score.task for score in record.scores} - found.keys()
        if not tasks or status_of(record)[0] != "ok" or "responses" not in record.files:
            continue
        try:
            responses = store.responses(record)
        except ResultsError:  # archives may leave them out; those who show them say so
            continue
        choices = responses.groupby(["task", "document"])["request"].nunique()
        for task, counts in choices.groupby(level="task"):
            guessed = float((1 / counts).mean()) if (counts > 1).all() else 0.0
            found.setdefault(str(task), guessed)
    return found


def chance_of(comparison: Comparison, row: Row) -> float | None:
    """Return the score of guessing; None if the metric is no accuracy or nothing is known."""
    return comparison.chance.get(row.task) if base_metric(row.metric) in ACCURACIES else None


def kept(comparison: Comparison, row: Row, checkpoint: str) -> float | None:
    """Return the share of the ability that is kept, (acc − chance) / (acc unquantized − chance);
    None if that is not known or the unquantized model guesses."""
    chance = chance_of(comparison, row)
    base = comparison.unquantized_of(row.quantizer)
    if chance is None or base is None or (checkpoint, row.task, row.metric) in comparison.at_chance:
        return None
    before = next(
        (
            one.entry(checkpoint).value
            for one in comparison.lines
            if (one.task, one.metric, one.quantizer) == (row.task, row.metric, base)
        ),
        None,
    )
    after = row.entry(checkpoint).value
    if None in (before, after) or before == chance:  # nothing above chance could be kept
        return None
    return (after - chance) / (before - chance)


def find_at_chance(
    comparison: Comparison, intervals: Mapping[int, Mapping[str, Interval]]
) -> frozenset[tuple[str, str, str]]:
    """Return (checkpoint, task, metric) of each accuracy of an unquantized model whose interval
    reaches down to chance; ``intervals``: by the row's index and checkpoint."""
    found = set()
    for index, row in enumerate(comparison.lines):
        chance = chance_of(comparison, row)
        if row.quantized or not chance:
            continue
        for checkpoint, interval in intervals.get(index, {}).items():
            if interval.low <= chance:
                found.add((checkpoint, row.task, row.metric))
    return frozenset(found)
