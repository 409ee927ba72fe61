"""Count answers that quantization changed, from the outcomes of two records."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from qbench.comparison.rows import Comparison, status_of
from qbench.errors import ResultsError
from qbench.records import Flips, Record
from qbench.store import Store

ByTask = Mapping[str, Mapping[str, Flips]]  # task → metric → its flips


def flips_of(comparison: Comparison, store: Store) -> dict[str, ByTask]:
    """Return the flips of every quantized cell against the unquantized cell of its checkpoint.

    Raises ResultsError if a table of outcomes is damaged.
    """
    outcomes: dict[str, pd.DataFrame] = {}

    def read(cell: str) -> pd.DataFrame:
        if cell not in outcomes:
            outcomes[cell] = store.outcomes(comparison.records[cell])
        return outcomes[cell]

    names = {cell.key: cell.cell for cell in comparison.grid.cells}
    found: dict[str, ByTask] = {}
    for cell in comparison.grid.cells:
        record = comparison.records.get(cell.cell)
        if not cell.quantized or status_of(record)[0] != "ok":
            continue
        base = names.get(record.key_parts.get("damage against"))  # what the run measured against
        if base is None and not comparison.no_damage(cell.cell):
            base = f"{cell.checkpoint}/{comparison.unquantized_of(cell.quantizer)}"
        if base is None or status_of(comparison.records.get(base))[0] != "ok":
            continue
        by_task = count_flips(read(base), read(cell.cell))
        found[cell.cell] = by_task | _of_groups(record, by_task)
    return found


def cell_flips(store: Store, record: Record) -> ByTask:
    """Return the flips of one record against the unquantized cell that its key names; nothing if
    it names none, or that cell has no outcomes here."""
    base = record.key_parts.get("damage against")
    for cell in store.manifest().cells if base and store.has_manifest() else ():
        if cell.key == base:
            try:
                before = store.get(cell)
                if before is None:
                    return {}
                by_task = count_flips(store.outcomes(before), store.outcomes(record))
            except ResultsError:
                return {}
            ordered: dict[str, dict[str, Flips]] = {}
            for score in record.scores:  # as the record lists them
                if (flips := by_task.get(score.task, {}).get(score.metric)) is not None:
                    ordered.setdefault(score.task, {})[score.metric] = flips
            return ordered
    return {}


def count_flips(base: pd.DataFrame, quantized: pd.DataFrame) -> dict[str, dict[str, Flips]]:
    """Return, by task and metric, how many documents quantization made wrong and how many right.

    Both tables have the columns ``OUTCOME_COLUMNS``; metrics whose documents are neither right nor
    wrong are left out.
    """
    on = ["task", "metric", "document"]
    pairs = quantized.merge(base, on=on, suffixes=("", "_base"), validate="one_to_one")
    found: dict[str, dict[str, Flips]] = {}
    for (task, metric), rows in pairs.groupby(["task", "metric"], sort=False):
        before = rows[["value_base", "weight_base"]].set_axis(["value", "weight"], axis=1)
        right = right_answers(before, rows[["value", "weight"]])
        if right is None:
            continue
        right_before, right_after = right
        found.setdefault(str(task), {})[str(metric)] = Flips(
            documents=len(rows),
            right_to_wrong=int((right_before & ~right_after).sum()),
            wrong_to_right=int((~right_before & right_after).sum()),
        )
    return found


def right_answers(before: pd.DataFrame, after: pd.DataFrame) -> tuple[pd.Series, pd.Series] | None:
    """Return which documents of one metric are right in two cells; None if they are neither right
    nor wrong.

    ``value`` is 0 or 1 (``weight`` 1). For f1 and mcc ``value`` is the right answer, the same in
    both cells, and ``weight`` the prediction.
    """
    if (before["weight"] == 1).all() and (after["weight"] == 1).all():
        binary = before["value"].isin((0, 1)).all() and after["value"].isin((0, 1)).all()
        return (before["value"] == 1, after["value"] == 1) if binary else None
    integers = all((one % 1 == 0).all() for table in (before, after) for _, one in table.items())
    if not integers or (before["value"] != after["value"]).any():
        return None
    return before["value"] == before["weight"], after["value"] == after["weight"]


def _of_groups(record: Record, by_task: ByTask) -> dict[str, dict[str, Flips]]:
    """The sums over the tasks of each group, if all of them have flips."""
    found: dict[str, dict[str, Flips]] = {}
    for group in record.groups:
        every = [by_task.get(task, {}).get(group.metric) for task in group.tasks]
        if None not in every:
            sums = {name: sum(getattr(one, name) for one in every) for name in Flips.model_fields}
            found.setdefault(group.group, {})[group.metric] = Flips(**sums)
    return found
