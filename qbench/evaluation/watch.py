"""Who watches a cell's forwards: the unquantized cell's are recorded, the others measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from filelock import FileLock, Timeout

from qbench.evaluation.base_file import Parts, base_rows_file, making
from qbench.evaluation.degradation import Outcomes, correct_requests, damage
from qbench.evaluation.settings import ScoringSettings
from qbench.files import write_atomically
from qbench.records import Damage, GridCell, Score, Unavailable
from qbench.store import Store

if TYPE_CHECKING:
    from qbench.evaluation.awaited import Awaited
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
    waited: float = 0.0  # seconds, for other cells

    def begin(self, task: str) -> None:
        pass

    def end(self, task: str) -> None:
        pass

    def finish(self, *_: Any) -> Unavailable | None:
        return Unavailable(reason=self.reason, retry=self.retry) if self.reason else None


@dataclass(kw_only=True, slots=True)
class Recording:
    """The unquantized cell: its rows go to ``path``, those of each task when it is scored, which
    the file ``handed_over`` says to cells that wait for them."""

    observer: Recorder
    key: str
    path: Path
    handed_over: Path
    parts: Parts = field(default_factory=Parts)
    waited: float = 0.0
    lock: FileLock | None = None

    def begin(self, task: str) -> None:
        if self.lock is not None:
            return
        self.lock = making(self.path)
        with suppress(Timeout, OSError):  # a run into another folder holds it; writing tells more
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.lock.acquire(timeout=0)

    def end(self, task: str) -> None:
        from qbench.evaluation.scoring.base_rows import save_head, save_task

        rows, digest, head = self.observer.take(task), None, self.parts.head
        if rows is not None:
            digest = save_task(self.path, self.key, task, rows)
        if head is None and (found := self.observer.head()) is not None:
            head = save_head(self.path, self.key, *found)
        self.parts = Parts(head=head, tasks=self.parts.tasks | {task: digest})
        write_atomically(self.handed_over, json.dumps(asdict(self.parts)).encode())

    def finish(self, *_: Any) -> None:
        from qbench.evaluation.scoring.base_rows import save_index

        save_index(self.path, self.key, self.parts)
        if self.lock is not None:
            self.lock.release()


@dataclass(frozen=True, kw_only=True, slots=True)
class Measuring:
    """A quantized cell, against the unquantized cell of the same checkpoint: before each task it
    waits for the rows of that task."""

    observer: Meter
    base: Awaited
    store: Store
    limit: int | None

    @property
    def waited(self) -> float:
        return self.base.waited

    def begin(self, task: str) -> None:
        self.observer.base = self.base.rows(task)

    def end(self, task: str) -> None:
        pass

    def finish(
        self,
        outcomes: pd.DataFrame,
        responses: pd.DataFrame,
        scores: tuple[Score, ...],
        tasks: Sequence[LoadedTask],
    ) -> Damage | Unavailable:
        record = self.base.record()
        if record is None:
            return Unavailable(reason=self.base.reason, retry=True)
        base = Outcomes(
            outcomes=self.store.outcomes(record),
            responses=self.store.responses(record),
            scores=record.scores,
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
    cell: GridCell,
    quantized: bool,
    base: GridCell | None,
    store: Store,
    folder: Path,
    waits: Callable[[str], None],
) -> Unwatched | Recording | Measuring:
    """The watcher of ``cell``, where damage is asked for; ``base`` is the unquantized cell that
    it is measured against. ``waits`` is told the name of a cell that is waited for."""
    from qbench.evaluation.awaited import Awaited
    from qbench.evaluation.scoring.base_rows import Recorder
    from qbench.evaluation.scoring.divergence import Meter

    if scoring.mode == "lm-eval":
        return Unwatched(reason="scoring: lm-eval shows nobody its log-probabilities")
    if not quantized:
        path, handed_over = base_rows_file(folder, cell.key), store.handed_over(cell)
        return Recording(observer=Recorder(), key=cell.key, path=path, handed_over=handed_over)
    if base is None:
        return Unwatched(reason="the recipe has no unquantized cell to compare with")
    awaited = Awaited(base, store, folder, waits)
    if awaited.look() and awaited.reason:
        return Unwatched(reason=awaited.reason, retry=True)
    return Measuring(observer=Meter(None), base=awaited, store=store, limit=scoring.limit)
