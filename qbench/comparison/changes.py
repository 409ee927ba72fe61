"""What changed between two sets of results of the same cells, document by document.

Serves ``qbench compare A B`` (two results folders) and the gate (a folder against a baseline).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from qbench.comparison.lines import judge
from qbench.comparison.metrics import REDUNDANT, base_metric, is_percentage
from qbench.comparison.statistics import Column, Effect, Panel, adjust, effect, value
from qbench.errors import ResultsError
from qbench.record import Record, Score
from qbench.store import Store

Name = tuple[str, str]  # task, metric
# Outcomes are compared to a thousandth of a nat, which is what a baseline file keeps.
DECIMALS = 3

AUDIT_MEASURES = ("weight_error", "bits_per_weight", "coverage")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CellResults:
    """One cell: what its scores are, and the outcomes that they rest on."""

    key: str
    key_parts: Mapping[str, object]
    method: str
    audited: bool
    measures: Mapping[str, float]  # of the audit; empty for unquantized cells
    scores: Mapping[Name, Score]
    columns: Mapping[Name, Column]
    documents: Mapping[str, str]  # task → digest of what was asked, wherever it came from

    @property
    def tasks(self) -> Mapping[str, str]:
        """Task → digest of its definition and data files, which stands in the key."""
        digests = self.key_parts.get("tasks", {})
        return digests if isinstance(digests, Mapping) else {}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ResultSet:
    """All cells of a results folder or baseline. ``broken`` says why a cell has none."""

    name: str
    cells: Mapping[str, CellResults]
    broken: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One metric of one task of one cell, before and after, on the documents that both saw."""

    cell: str
    task: str
    label: str
    metric: str
    higher_is_better: bool
    old: float
    new: float
    documents: int
    left_out: int  # documents that only one side saw, counted on both
    effect: Effect | None  # new − old; None where too few documents or an unknown aggregation

    @property
    def base_metric(self) -> str:
        """The metric without lm-eval's filter."""
        return base_metric(self.metric)

    @property
    def percent(self) -> bool:
        return is_percentage(self.metric)


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Two results side by side. ``problems``: cells that cannot be compared, and why."""

    old: str
    new: str
    lines: tuple[Change, ...]
    problems: tuple[str, ...]


def read_results(store: Store) -> ResultSet:
    """The cells of a results folder with their outcomes, redundant metrics left out."""
    grid = store.grid()
    cells, broken = {}, {}
    for cell in grid.cells:
        record = store.get(cell)
        status, reason = judge(record)
        if status != "ok":
            broken[cell.cell] = f"{status}: {reason}"
            continue
        cells[cell.cell] = _cell(store, record)
    return ResultSet(name=grid.name, cells=cells, broken=broken)


def compare_results(a: Store, b: Store) -> Changes:
    """What the results of folder ``b`` change against those of folder ``a``, paired.

    Raises ResultsError where the folders have no cell in common or score different data.
    """
    old, new = read_results(a), read_results(b)
    lines = compare_sets(old, new)
    if not lines:
        raise ResultsError(
            f"{a.directory} and {b.directory} have no scored cell in common; "
            "compare two results of one recipe"
        )
    problems = [f"{cell}: {a.directory}: {why}" for cell, why in old.broken.items()]
    problems += [f"{cell}: {b.directory}: {why}" for cell, why in new.broken.items()]
    for one, other, folder in ((old, new, b), (new, old, a)):
        known = other.cells.keys() | other.broken.keys()
        problems += [f"{cell}: not in {folder.directory}" for cell in one.cells.keys() - known]
    return Changes(
        old=str(a.directory), new=str(b.directory), lines=tuple(lines), problems=tuple(problems)
    )


def compare_sets(old: ResultSet, new: ResultSet) -> list[Change]:
    """Every metric that a cell has on both sides; p-values adjusted over all of them.

    Raises ResultsError where a task's definition or data differ.
    """
    lines = []
    for cell, before in old.cells.items():
        after = new.cells.get(cell)
        if after is None:
            continue
        _same_tasks(cell, before, after)
        for name, score in before.scores.items():
            if name in after.scores:
                lines.append(_change(cell, name, score, before, after))
    tested = [index for index, line in enumerate(lines) if line.effect]
    adjusted = adjust([lines[index].effect for index in tested])
    for index, one in zip(tested, adjusted, strict=True):
        lines[index] = dataclasses.replace(lines[index], effect=one)
    return lines


def _cell(store: Store, record: Record) -> CellResults:
    scores = {(score.task, score.metric): score for score in record.scores}
    kept = {
        name: score
        for name, score in scores.items()
        if (name[0], REDUNDANT.get(name[1])) not in scores
    }
    columns = {
        name: Column.of(
            rows["document"].to_numpy(),
            rows["value"].to_numpy(dtype=float).round(DECIMALS),
            rows["weight"].to_numpy(),
        )
        for name, rows in store.outcomes(record).groupby(["task", "metric"], sort=False)
        if name in kept
    }
    return CellResults(
        key=record.key,
        key_parts=record.key_parts,
        method=record.method,
        audited=record.audit is not None,
        measures=_measures(record),
        scores={name: score for name, score in kept.items() if name in columns},
        columns=columns,
        documents=record.documents,
    )


def _measures(record: Record) -> dict[str, float]:
    if record.audit is None or not record.quantized:
        return {}
    return {name: getattr(record.audit, name) for name in AUDIT_MEASURES}


def _same_tasks(cell: str, before: CellResults, after: CellResults) -> None:
    for task in dict.fromkeys([*before.documents, *before.tasks]):
        told = task in before.documents and task in after.documents
        sides = (before.documents, after.documents) if told else (before.tasks, after.tasks)
        one, other = (digests.get(task) for digests in sides)
        if None not in (one, other) and one != other:
            raise ResultsError(
                f"{cell}: {task}: its definition or data are not those of the other results, so "
                "documents cannot be paired; score both on the same data (or make a new baseline)"
            )


def _change(cell: str, name: Name, score: Score, before: CellResults, after: CellResults) -> Change:
    columns = {"new": after.columns[name], "old": before.columns[name]}
    panel = Panel.of(columns)
    found = None
    if panel.documents > 1:
        signs = {"new": 1, "old": -1}
        found = effect(panel, signs, score.aggregation)
    seen = sum(len(column.documents) for column in columns.values())
    # On the shared documents; as recorded where we do not know how the score is made.
    values = {
        side: value(panel, side, score.aggregation) if found else source.scores[name].value
        for side, source in (("old", before), ("new", after))
    }
    return Change(
        cell=cell,
        task=name[0],
        label=score.label,
        metric=name[1],
        higher_is_better=score.higher_is_better,
        old=values["old"],
        new=values["new"],
        documents=panel.documents,
        left_out=seen - 2 * panel.documents,
        effect=found,
    )
