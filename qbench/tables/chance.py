"""Scores that guessing reaches as well."""

from __future__ import annotations

from qbench.passkey import CHANCE, DIGITS, task_length
from qbench.tables.table import Table
from qbench.text import metric_title

AT_CHANCE = 0.05  # a score that guessing reaches in so large a share of runs, or larger


def at_chance(metric: str, value: float, documents: int) -> bool:
    """Whether guessing the digits of passkeys gives ``value``, or more, in 5 % of runs or oftener:
    P(X ≥ k) of a binomial distribution. ``metric`` is one of passkey retrieval's."""
    from scipy import stats  # slow to import, and most tables have none of these

    tried = documents * (DIGITS if metric == "acc_digits" else 1)
    return float(stats.binom.sf(round(value * tried) - 1, tried, CHANCE[metric])) > AT_CHANCE


def chance_notes(table: Table) -> list[str]:
    """A line on the scores of ``table`` that are at chance, if there are any."""
    cells: dict[tuple[str, str], dict[str, bool]] = {}
    for line in (row.line for row in table.rows):
        if task_length(line.task) is None or line.metric not in CHANCE:
            continue
        own = cells.setdefault((line.label, metric_title(line.metric)), {})
        for entry in line.entries:
            if entry.value is not None:
                own[entry.cell] = at_chance(line.metric, entry.value, entry.documents or 1)
    found = [
        f"{label} {metric} of {'all' if all(own.values()) else ', '.join(guessed)}"
        for (label, metric), own in cells.items()
        if (guessed := [cell for cell, yes in own.items() if yes])
    ]
    if not found:
        return []
    return [f"At chance, which guessing reaches in one of twenty runs or more: {'; '.join(found)}."]
