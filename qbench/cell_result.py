"""What is known of a cell, and its record, whether it worked or not. Imports torch only where a
cell is computed: a run itself writes the record of a cell whose process died."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.errors import failure_line
from qbench.machine import environment, free, measured, redirected
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
from qbench.store import Store

if TYPE_CHECKING:
    import pandas as pd


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
    outcomes: pd.DataFrame | None = None
    responses: pd.DataFrame | None = None
    divergences: pd.DataFrame | None = None
    scoring: ScoringReport | None = None
    damage: Damage | Unavailable | None = None

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[list[str]]:
        """One stage of the cell, shown and measured; what the body appends is its detail."""
        self.progress.stage(self.cell.name, name, total)
        with measured(name, self.plan.device, self.stages) as detail:
            yield detail

    def advance(self, completed: float, total: float | None = None) -> None:
        """How far the stage is."""
        self.progress.advance(self.cell.name, completed, total)

    def stated(self, error: str | None) -> dict[str, Any]:
        """What every record of the cell says, an analysis too, finished now: failed with ``error``,
        where there is one."""
        cell, plan, settings = self.cell, self.plan, self.cell.quantization
        return {
            "key": cell.key,
            "key_parts": cell.key_parts,
            "checkpoint": cell.checkpoint_name,
            "quantizer": cell.label,
            "method": settings.method,
            "title": settings.title,
            "precision": settings.precision,
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


def run(cell: Cell, plan: Plan, store: Store, progress: Progress, cache: Path) -> Record:
    """Run one cell and put its record into the store, whether it worked or not."""
    result = CellResult(cell=cell, plan=plan, progress=progress)

    def work() -> None:
        from qbench.cell import compute

        compute(result, store, cache)

    error = attempt(work, store.log(cell.grid_cell), plan.device)
    record = result.record(error)
    if error is not None:
        return store.put(record)
    return store.put(record, result.outcomes, result.responses, result.divergences)


def attempt(work: Callable[[], None], log: Path, device: str) -> str | None:
    """Do ``work``, what it and the libraries that it imports print in ``log``. Why it failed, None
    where it did not."""
    with redirected(log):
        try:
            work()
        except Exception as problem:
            traceback.print_exc()
            return failure_line(problem)
        finally:
            free(device)
    return None
