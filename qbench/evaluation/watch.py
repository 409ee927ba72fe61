"""Who watches a cell's forwards: the unquantized cell's are recorded, the others measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from filelock import FileLock

from qbench.evaluation.damage import Outcomes, correct_requests, damage
from qbench.plan import Cell, Plan
from qbench.record import Damage, Record, Score, Unavailable
from qbench.store import KEY_DIGITS, Store

if TYPE_CHECKING:
    from qbench.evaluation.scoring import Observer
    from qbench.evaluation.scoring.distributions import Meter, Recorder


def distributions_file(folder: Path, key: str) -> Path:
    """Where the next-token distributions of the unquantized cell ``key`` are kept."""
    return folder / f"{key[:KEY_DIGITS]}.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unwatched:
    """Nothing is kept or measured; ``reason`` says why where damage was asked for."""

    reason: str = ""
    retry: bool = False
    observer: Observer | None = None

    def finish(self, *_: Any) -> Unavailable | None:
        return Unavailable(reason=self.reason, retry=self.retry) if self.reason else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """The unquantized cell: its distributions go to ``path``."""

    observer: Recorder
    key: str
    path: Path

    def finish(self, *_: Any) -> None:
        self.observer.base(self.key).save(self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measuring:
    """A quantized cell, against the unquantized cell of the same checkpoint."""

    observer: Meter
    base: Record
    store: Store
    plan: Plan
    limit: int | None

    def finish(
        self, outcomes: pd.DataFrame, responses: pd.DataFrame, scores: tuple[Score, ...]
    ) -> Damage:
        base = Outcomes(
            outcomes=self.store.outcomes(self.base),
            responses=self.store.responses(self.base),
            scores=self.base.scores,
        )
        from qbench.evaluation.tasks import load_task

        tasks = [load_task(task) for task in self.plan.tasks]
        return damage(
            base,
            Outcomes(outcomes=outcomes, responses=responses, scores=scores),
            measured=self.observer.measured,
            correct={task.name: correct_requests(task, self.limit) for task in tasks},
        )


def watcher(
    cell: Cell, plan: Plan, store: Store, folder: Path
) -> Unwatched | Recording | Measuring:
    """The watcher of ``cell``. Waits for the unquantized cell where another process is at it."""
    from qbench.evaluation.scoring.distributions import Base, Meter, Recorder

    if not plan.recipe.evaluation.damage:
        return Unwatched()
    if cell.scoring.mode == "lm-eval":
        return Unwatched(reason="scoring: lm-eval shows nobody its log-probabilities")
    if not cell.quantizer.precision.quantized:
        path = distributions_file(folder, cell.key)
        return Recording(observer=Recorder(), key=cell.key, path=path)
    if cell.base is None:
        return Unwatched(reason="the recipe has no unquantized cell to compare with")
    with FileLock(store.lock_file(cell.base)):
        record = store.whole(cell.base)
    path = distributions_file(folder, cell.base.key)
    if record is None or record.status != "ok" or not path.is_file():
        reason = f"{cell.base.cell} has no stored log-probabilities; run it, then this again"
        return Unwatched(reason=reason, retry=True)
    return Measuring(
        observer=Meter(Base.load(path, cell.base.key)),
        base=record,
        store=store,
        plan=plan,
        limit=cell.scoring.limit,
    )
