"""Who watches a cell's forwards: the unquantized cell's are recorded, the others measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from filelock import FileLock

from qbench.errors import ResultsError
from qbench.evaluation.base_file import base_rows_file
from qbench.evaluation.damage import Outcomes, correct_requests, damage
from qbench.evaluation.settings import ScoringSettings
from qbench.record import Damage, GridCell, Record, Score, Unavailable
from qbench.store import Store

if TYPE_CHECKING:
    from qbench.evaluation.scoring import Observer
    from qbench.evaluation.scoring.base_rows import Recorder
    from qbench.evaluation.scoring.divergence import Meter
    from qbench.evaluation.tasks import LoadedTask


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
    """The unquantized cell: its rows go to ``path``."""

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
    limit: int | None

    def finish(
        self,
        outcomes: pd.DataFrame,
        responses: pd.DataFrame,
        scores: tuple[Score, ...],
        tasks: Sequence[LoadedTask],
    ) -> Damage:
        base = Outcomes(
            outcomes=self.store.outcomes(self.base),
            responses=self.store.responses(self.base),
            scores=self.base.scores,
        )
        return damage(
            base,
            Outcomes(outcomes=outcomes, responses=responses, scores=scores),
            measured=self.observer.measured,
            correct={task.name: correct_requests(task, self.limit) for task in tasks},
        )


def watcher(
    scoring: ScoringSettings,
    *,
    key: str,
    quantized: bool,
    base: GridCell | None,
    store: Store,
    folder: Path,
) -> Unwatched | Recording | Measuring:
    """The watcher of the cell ``key``, where damage is asked for; ``base`` is the unquantized
    cell that it is measured against. Waits for that where another process is at it."""
    from qbench.evaluation.scoring.base_rows import BaseRows, Recorder
    from qbench.evaluation.scoring.divergence import Meter

    if scoring.mode == "lm-eval":
        return Unwatched(reason="scoring: lm-eval shows nobody its log-probabilities")
    if not quantized:
        return Recording(observer=Recorder(), key=key, path=base_rows_file(folder, key))
    if base is None:
        return Unwatched(reason="the recipe has no unquantized cell to compare with")
    with FileLock(store.lock_file(base)):
        record = store.whole(base)
    if record is None or record.status != "ok":
        reason = f"{base.cell} has no good record; run it, then this again"
        return Unwatched(reason=reason, retry=True)
    try:
        rows = BaseRows.load(base_rows_file(folder, base.key), base.key)
    except ResultsError as error:
        return Unwatched(reason=str(error), retry=True)
    return Measuring(observer=Meter(rows), base=record, store=store, limit=scoring.limit)
