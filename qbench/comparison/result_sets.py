"""All cells of a results folder with the outcomes that their scores rest on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qbench.comparison.lines import judge
from qbench.comparison.metrics import REDUNDANT
from qbench.comparison.statistics import Column
from qbench.records import Precision, Record, Score, Trained
from qbench.store import Store

Name = tuple[str, str]  # task, metric
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
    precision: Precision = field(default_factory=Precision)
    training: Trained | None = None  # None where the checkpoint does not say

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
    replicates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def read_results(store: Store, *, decimals: int | None = None) -> ResultSet:
    """The cells of a results folder with their outcomes, redundant metrics left out.

    ``decimals``: outcomes are rounded to so many, to be compared with what was kept so.
    """
    grid = store.grid()
    cells, broken = {}, {}
    for cell in grid.cells:
        record = store.get(cell)
        status, reason = judge(record)
        if status != "ok":
            broken[cell.cell] = f"{status}: {reason}"
            continue
        cells[cell.cell] = _cell(store, record, decimals)
    return ResultSet(name=grid.name, cells=cells, broken=broken, replicates=grid.replicates)


def _cell(store: Store, record: Record, decimals: int | None) -> CellResults:
    scores = {(score.task, score.metric): score for score in record.scores}
    kept = {
        name: score
        for name, score in scores.items()
        if (name[0], REDUNDANT.get(name[1])) not in scores
    }
    columns = {
        name: Column.of(
            rows["document"].to_numpy(),
            values if decimals is None else values.round(decimals),
            rows["weight"].to_numpy(),
        )
        for name, rows in store.outcomes(record).groupby(["task", "metric"], sort=False)
        if name in kept
        for values in [rows["value"].to_numpy(dtype=float)]
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
        precision=record.precision,
        training=record.training,
    )


def _measures(record: Record) -> dict[str, float]:
    if record.audit is None or not record.quantized:
        return {}
    measures = {name: getattr(record.audit, name) for name in AUDIT_MEASURES}
    if record.audit.activations is not None:
        measures["activation_error"] = record.audit.activations.error
    if record.audit.kv_cache is not None:
        measures["key_error"] = record.audit.kv_cache.key_error
        measures["value_error"] = record.audit.kv_cache.value_error
    return measures
