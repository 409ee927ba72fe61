"""Baselines of the gate: a run's records with their per-document outcomes, as a results archive.

A results folder, or its ``records.tar.xz``, is a baseline too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from qbench.comparison.compare import Name, of_groups, read_columns, rounded
from qbench.comparison.rows import status_of
from qbench.errors import ResultsError
from qbench.metrics import REDUNDANT, variance_name
from qbench.records import Record, Score
from qbench.statistics import TESTABLE, Column
from qbench.store import XZ_MAGIC, Store, extract, pack
from qbench.text import group_by_reason

DECIMALS = 3  # of an outcome: a thousandth of a nat, to which results are compared with it
REMEDY = "make it with `qbench baseline DIR --out FILE`"


@dataclass(frozen=True, slots=True, eq=False)
class CellResults:
    """Hold one cell's record, its scores and their outcomes. Scores that repeat another of the same
    task are left out. The column of a score without a test, such as bleu, is empty. ``variances``:
    of the mean over each prompt's drawn answers."""

    record: Record
    columns: Mapping[Name, Column]
    scores: Mapping[Name, Score]
    variances: Mapping[Name, Column] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Record, columns: Mapping[Name, Column]) -> CellResults:
        """Return the results of one record, whose outcomes are ``columns``; other columns than its
        scores' are left out."""
        every, nothing = record.by_name(), Column.of(np.arange(0), [], [])
        names = [(score.task, score.metric) for score in record.scores]
        names = [name for name in names if (name[0], REDUNDANT.get(name[1])) not in names]
        testable = {name for name in columns.keys() & every.keys()
                    if every[name].aggregation in TESTABLE}  # fmt: skip
        kept = {name: columns[name] if name in testable else nothing for name in names}
        kept |= of_groups(record, kept)
        drawn = {name: columns.get((name[0], variance_name(name[1]))) for name in kept}
        variances = {name: column for name, column in drawn.items() if column is not None}
        return cls(record, kept, {name: every[name] for name in kept}, variances)


@dataclass(frozen=True, slots=True, eq=False)
class ResultSet:
    """Hold the cells of a results folder or baseline; ``broken`` says why a cell has no scores."""

    cells: Mapping[str, CellResults]
    broken: Mapping[str, str]


def read_results(store: Store) -> ResultSet:
    """Read the cells of a results folder with their outcomes, rounded to ``DECIMALS``. Raises
    ResultsError for a damaged file."""
    cells, broken = {}, {}
    for cell in store.manifest().cells:
        record = store.get(cell)
        status, reason = status_of(record)
        if status == "ok":
            columns = read_columns(store, record, decimals=DECIMALS)
            cells[cell.cell] = CellResults.of(record, columns)
        else:
            broken[cell.cell] = f"{status}: {reason}"
    return ResultSet(cells, broken)


def make(store: Store, out: Path, *, replace: bool = False) -> None:
    """Write the baseline of a results folder to the file ``out``: its records, and their outcomes
    rounded to ``DECIMALS``. Raises ResultsError if a cell is missing, failed or unaudited, a task
    failed or a score is not finite; if ``out`` exists and ``replace`` is False or it is no
    baseline."""
    results = read_results(store)
    unfit = [*results.broken.items()]
    for cell, scored in results.cells.items():
        record = scored.record
        unfit += [(cell, "not audited")] * (record.audit is None)
        unfit += [(cell, f"{task} failed: {why}") for task, why in record.failed_tasks.items()]
        unfit += [
            (cell, f"{score.task} {score.metric} is {score.value}")
            for score in scored.scores.values()
            if not math.isfinite(score.value)
        ]
    if unfit:
        reasons = "; ".join(group_by_reason(unfit))
        raise ResultsError(
            f"{store.directory}: no baseline can be made from it: {reasons}; run these cells again"
        )
    if out.exists() and not replace:
        raise ResultsError(
            f"{out}: exists already; `qbench check {store.directory} --baseline {out}` shows what "
            "changed; then add --replace"
        )
    if out.exists() and not out.read_bytes().startswith(XZ_MAGIC):
        raise ResultsError(f"{out}: exists and is no baseline to replace; name another file")
    with TemporaryDirectory() as folder:
        copy = Store(Path(folder))
        for scored in results.cells.values():
            outcomes = store.outcomes(scored.record)
            values = outcomes.groupby("metric")["value"]
            outcomes["value"] = values.transform(lambda v: rounded(v.to_numpy(), v.name, DECIMALS))
            copy.put(scored.record, outcomes)
        copy.put_manifest(store.manifest())
        pack(copy.directory, copy.directory.rglob("*"), out)


def read(path: Path) -> ResultSet:
    """Read a baseline: an archive, or a results folder. Raises ResultsError if it is missing,
    damaged, incomplete or of another version."""
    if not (path.is_dir() or path.is_file()):
        raise ResultsError(f"{path}: no such baseline; {REMEDY}")
    with TemporaryDirectory() as folder:
        if not path.is_dir():
            extract(path, Path(folder), REMEDY)
        store = Store(path if path.is_dir() else Path(folder))
        try:
            results = read_results(store)
            why = "; ".join(group_by_reason(results.broken.items()))
        except ResultsError as error:
            why = str(error).partition("; ")[0]
            why = why.replace(f"{store.directory}/", "").removeprefix(f"{store.directory}: ")
    if why:
        raise ResultsError(f"{path}: incomplete ({why}); {REMEDY}")
    return results
