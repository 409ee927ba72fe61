"""Read the outcomes of documents, and count the answers that quantization changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import numpy as np

from qbench.comparison.rows import Comparison, status_of
from qbench.errors import ResultsError
from qbench.metrics import VARIANCE
from qbench.records import Flips, Record
from qbench.statistics import Column, Panel, joined
from qbench.store import Store

Name = tuple[str, str]  # task, metric


def of_groups(record: Record, columns: Mapping[Name, Column]) -> dict[Name, Column]:
    """Return (group, metric) → outcomes of groups such as mmlu: all documents of their tasks.
    Groups are left out if ``columns`` lacks one of their tasks."""
    return {
        (group.group, group.metric): joined(
            {task: columns[task, group.metric] for task in group.tasks}
        )
        for group in record.pooled_groups
        if all((task, group.metric) in columns for task in group.tasks)
    }


def read_columns(
    store: Store,
    record: Record,
    names: Collection[Name] | None = None,
    decimals: int | None = None,
) -> dict[Name, Column]:
    """Return (task, metric) → outcomes of a record, of the scores ``names`` only (None: all), in
    their order in the file; values rounded to ``decimals`` (None: as stored)."""
    columns = {}
    for name, (document, values, weight) in store.outcome_arrays(record).items():
        if names is None or name in names:
            if decimals is not None:
                values = rounded(values, name[1], decimals)
            columns[name] = Column.of(document, values, weight)
    return columns


def rounded(values: np.ndarray, metric: str, decimals: int) -> np.ndarray:
    """Return outcomes of ``metric`` rounded to ``decimals``; KL and variances to four more."""
    fine = metric == "kl" or metric.endswith(VARIANCE)
    return values.astype(float).round(decimals + 4 * fine)


ByTask = Mapping[str, Mapping[str, Flips]]  # task → metric → its flips


def flips_of(
    comparison: Comparison, columns: Mapping[str, Mapping[tuple[str, str], Column]]
) -> dict[str, ByTask]:
    """Return cell → task → metric → flips, of every quantized cell against the unquantized cell of
    its checkpoint; cells without scores, or without such a cell, are left out. ``columns``: the
    outcomes by task, then by cell and metric."""
    by_cell: dict[str, dict[Name, Column]] = defaultdict(dict)
    for task in comparison.grid.tasks:  # groups have sums of theirs
        for (cell, metric), column in columns.get(task, {}).items():
            by_cell[cell][task, metric] = column
    names = {cell.key: cell.cell for cell in comparison.grid.cells}
    flips: dict[str, ByTask] = {}
    for cell in comparison.grid.cells:
        record = comparison.records.get(cell.cell)
        if not cell.quantized or status_of(record)[0] != "ok":
            continue
        base = names.get(record.key_parts.get("damage against"))  # what the run measured against
        if base is None and not comparison.no_damage(cell.cell):
            base = f"{cell.checkpoint}/{comparison.unquantized_of[cell.quantizer]}"
        if base is None or status_of(comparison.records.get(base))[0] != "ok":
            continue
        by_task = count_flips(by_cell[base], by_cell[cell.cell])
        flips[cell.cell] = by_task
        for group in record.groups:  # sums over the tasks, if all of them have flips
            every = [by_task.get(task, {}).get(group.metric) for task in group.tasks]
            if None not in every:
                sums = {n: sum(getattr(each, n) for each in every) for n in Flips.model_fields}
                by_task.setdefault(group.group, {})[group.metric] = Flips(**sums)
    return flips


def cell_flips(store: Store, record: Record) -> ByTask:
    """Return task → metric → flips of one record against the unquantized cell that its key names;
    an empty mapping without such a cell or its outcomes."""
    base = record.key_parts.get("damage against")
    for cell in store.manifest().cells if base and store.has_manifest() else ():
        if cell.key == base:
            try:
                before = store.get(cell)
                if before is None:
                    return {}
                by_task = count_flips(read_columns(store, before), read_columns(store, record))
            except ResultsError:
                return {}
            ordered: dict[str, dict[str, Flips]] = {}
            for score in record.scores:  # as the record lists them
                if (flips := by_task.get(score.task, {}).get(score.metric)) is not None:
                    ordered.setdefault(score.task, {})[score.metric] = flips
            return ordered
    return {}


def count_flips(
    base: Mapping[Name, Column], quantized: Mapping[Name, Column]
) -> dict[str, dict[str, Flips]]:
    """Return, by task and metric, how many of the documents that both have quantization made wrong
    and how many right. Metrics that are in one only are left out, and those whose documents are
    neither right nor wrong: only values 0 and 1, of weight 1, are."""
    flips: dict[str, dict[str, Flips]] = {}
    for (task, metric), after in quantized.items():
        if (before := base.get((task, metric))) is None:
            continue
        panel = Panel.of({"before": before, "after": after})
        binary = (panel.weights == 1).all() and np.isin(panel.values, (0, 1)).all()
        if not (panel.documents and binary):
            continue
        right_before, right_after = (panel.values == 1).T
        flips.setdefault(task, {})[metric] = Flips(
            documents=panel.documents,
            right_to_wrong=int((right_before & ~right_after).sum()),
            wrong_to_right=int((~right_before & right_after).sum()),
        )
    return flips
