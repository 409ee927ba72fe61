"""Collect the results of a cell while it runs, and make its record. Imports no torch: a run writes
the record of a cell whose process died."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from qbench.evaluation.settings import merge_differences
from qbench.machine import environment, peak_memory_gib, reset_peak_memory, synchronize
from qbench.plan import Cell, Plan
from qbench.progress import Progress, SilentProgress
from qbench.records import (
    Audit,
    Damage,
    GroupScore,
    Record,
    ScoringReport,
    Stage,
    TaskRecord,
    Unavailable,
)

if TYPE_CHECKING:
    import pandas as pd

    from qbench.store import Store, Table


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The record of one task of a cell, and its tables by name."""

    record: TaskRecord
    tables: dict[Table, pd.DataFrame]


def merge_reports(reports: Sequence[ScoringReport]) -> ScoringReport | None:
    """Return one scoring report for all tasks of a cell: counts added up, the peak's maximum,
    settings of the first; None if ``reports`` is empty."""
    if not reports:
        return None
    merged: dict[str, Any] = {}
    for name in ("requests", "batches", "tokens", "truncated", "halvings"):
        counts = [count for report in reports if (count := getattr(report, name)) is not None]
        merged[name] = sum(counts) if counts else None
    for name in ("truncated_shares", "exact_tasks", "transformers_generation"):
        merged[name] = {
            key: value for report in reports for key, value in getattr(report, name).items()
        }
    merged["doubled_bos"] = tuple(task for report in reports for task in report.doubled_bos)
    merged["graph_error"] = next(filter(None, (each.graph_error for each in reports)), None)
    merged["peak_memory_gib"] = max(report.peak_memory_gib for report in reports)
    if compared := [each for report in reports if (each := report.difference_from_exact)]:
        merged["difference_from_exact"] = merge_differences(compared)
    return reports[0].model_copy(update=merged)


@dataclass(kw_only=True, slots=True)
class CellResult:
    """Holds the results of a cell of ``plan`` up to now; if the cell fails, they stay."""

    cell: Cell
    plan: Plan
    progress: Progress = field(default_factory=SilentProgress)
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    stages: list[Stage] = field(default_factory=list)
    documents: dict[str, str] = field(default_factory=dict)  # task → digest of its documents
    audit: Audit | None = None
    groups: tuple[GroupScore, ...] = ()
    failed_tasks: dict[str, str] = field(default_factory=dict)  # task → why
    tasks: list[TaskResult] = field(default_factory=list)
    no_damage: Unavailable | None = None  # why damage was not measured
    bad_input: bool = False  # the cell failed because its checkpoint cannot be loaded

    @contextmanager
    def stage(
        self, name: str, total: float | None = None, *, shown: bool = True
    ) -> Iterator[list[str]]:
        """Time the body as a stage of the record, with peak memory, also if it raises; texts that
        the body appends to the yielded list become its detail. If it is ``shown``, its progress is,
        of ``total`` pieces of work (None: not known)."""
        if shown:
            self.progress.stage(self.cell.name, name, total)
        detail: list[str] = []
        device = self.plan.device
        reset_peak_memory(device)
        start = time.perf_counter()
        try:
            yield detail
        finally:
            synchronize(device)
            stage = Stage(
                name=name,
                seconds=round(time.perf_counter() - start, 3),
                peak_memory_gib=round(peak_memory_gib(device), 3),
                detail="; ".join(detail),
            )
            self.stages.append(stage)

    def advance(self, completed: float, total: float | None = None) -> None:
        """Show that ``completed`` of the stage's ``total`` pieces of work are done; None keeps its
        total."""
        self.progress.advance(self.cell.name, completed, total)

    def common_fields(self, error: str | None) -> dict[str, Any]:
        """Return the fields that every record of the cell has, an analysis too, finished now;
        ``error`` says why it failed.
        """
        cell, plan, settings = self.cell, self.plan, self.cell.quantization
        return {
            **dict(cell.grid_cell),
            "key_parts": cell.key_parts,
            "normalizer": cell.checkpoint.normalizer,
            "attention": f"{cell.checkpoint.normalizer}/{cell.attention}",
            "status": "failed" if error else "ok",
            "error": error,
            "bad_input": self.bad_input,
            "stages": tuple(self.stages),
            "environment": environment(plan.device, settings.requirements, plan.hardware),
            "started": self.started,
            "finished": datetime.now(UTC),
        }

    def save(self, store: Store, error: str | None = None) -> Record:
        """Write and return the cell's record, with its tables unless it failed with ``error``. A
        failed record keeps no scores, and is returned without being written if a good one is
        stored."""
        records = [task.record for task in self.tasks]
        measured = {record.task: record.damage for record in records if record.damage is not None}
        record = Record(
            **self.common_fields(error),
            training=self.cell.checkpoint.training,
            scores=() if error else tuple(score for record in records for score in record.scores),
            groups=() if error else self.groups,
            failed_tasks={} if error else self.failed_tasks,
            documents=self.documents,
            source=self.plan.source(self.cell.checkpoint_name),
            data=self.plan.data,
            limit=self.plan.recipe.evaluation.limit,
            audit=self.audit,
            scoring=merge_reports([record.scoring for record in records]),
            damage=self.no_damage or (Damage(tasks=measured) if measured else None),
        )
        if error is not None:
            before = store.get_valid(record)
            return record if before is not None and before.status == "ok" else store.put(record)
        import pandas as pd

        tables: dict[Table, list[pd.DataFrame]] = {}
        for name, table in (item for task in self.tasks for item in task.tables.items()):
            tables.setdefault(name, []).append(table)
        joined = {name: pd.concat(parts, ignore_index=True) for name, parts in tables.items()}
        return store.put(record, **joined)
