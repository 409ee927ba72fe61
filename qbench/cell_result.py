"""What is known of a cell, and its record. Imports no torch: a run itself writes the record of a
cell whose process died."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from qbench.machine import environment, peak_memory_gib, reset_peak_memory, synchronize
from qbench.plan import Cell, Plan
from qbench.progress import Progress, SilentProgress
from qbench.records import (
    Audit,
    Damage,
    GroupScore,
    Record,
    Score,
    ScoringReport,
    Stage,
    Unavailable,
)

if TYPE_CHECKING:
    import pandas as pd

    from qbench.store import Table


@dataclass(kw_only=True, slots=True)
class CellResult:
    """What is known so far of a cell of ``plan``; a failure leaves the rest as it is."""

    cell: Cell
    plan: Plan
    progress: Progress = field(default_factory=SilentProgress)
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    stages: list[Stage] = field(default_factory=list)
    documents: dict[str, str] = field(default_factory=dict)
    audit: Audit | None = None
    scores: list[Score] = field(default_factory=list)
    groups: tuple[GroupScore, ...] = ()
    failed_tasks: dict[str, str] = field(default_factory=dict)
    tables: dict[Table, pd.DataFrame] = field(default_factory=dict)
    scoring: ScoringReport | None = None
    damage: Damage | Unavailable | None = None

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[list[str]]:
        """As ``measured``, and shown."""
        self.progress.stage(self.cell.name, name, total)
        with self.measured(name) as detail:
            yield detail

    @contextmanager
    def measured(self, name: str) -> Iterator[list[str]]:
        """A stage of the cell with its seconds and peak memory; what the body appends is its
        detail."""
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
        """How far the stage is."""
        self.progress.advance(self.cell.name, completed, total)

    def stated(self, error: str | None) -> dict[str, Any]:
        """What every record of the cell says, an analysis too, finished now: failed with ``error``,
        where there is one."""
        cell, plan, settings = self.cell, self.plan, self.cell.quantization
        return {
            **dict(cell.grid_cell),
            "key_parts": cell.key_parts,
            "normalizer": cell.checkpoint.normalizer,
            "attention": f"{cell.checkpoint.normalizer}/{cell.attention}",
            "status": "failed" if error else "ok",
            "error": error,
            "stages": tuple(self.stages),
            "environment": environment(plan.device, settings.requirements, plan.hardware),
            "started": self.started,
            "finished": datetime.now(UTC),
        }

    def record(self, error: str | None) -> Record:
        """The cell's record; a failed one keeps no scores."""
        return Record(
            **self.stated(error),
            training=self.cell.checkpoint.training,
            scores=() if error else tuple(self.scores),
            groups=() if error else self.groups,
            failed_tasks={} if error else self.failed_tasks,
            documents=self.documents,
            audit=self.audit,
            scoring=self.scoring,
            damage=self.damage,
        )
