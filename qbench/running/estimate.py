"""How long the rest of a run will take: from what earlier records of its cells took, and from how
far the cells at work have come."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from qbench.errors import ResultsError
from qbench.store import Store, read_record

if TYPE_CHECKING:
    from qbench.plan import Cell

EARLY = 0.02  # of a cell's requests: what comes before says little
ALIKE = ("device", "gpu", "few-shot")  # parts of a key that a cell's time hangs on
SETTINGS = ("limit", "mode")  # of scoring


class Estimate:
    """Seconds that are left of a run.

    ``earlier`` maps cells to the seconds that they took in earlier runs; ``tasks`` is how many are
    scored one after the other in a cell, ``at_once`` how many cells run side by side. While a cell
    waits for another its own clock stands still: how long it works is what others are judged by.
    """

    def __init__(
        self,
        cells: Sequence[str],
        *,
        earlier: Mapping[str, float] | None = None,
        tasks: int = 1,
        at_once: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._waiting = dict.fromkeys(cells)
        self._earlier, self._tasks, self._at_once = dict(earlier or {}), tasks, max(1, at_once)
        self._clock = clock
        self._begun: dict[str, float] = {}
        self._scoring: dict[str, tuple[list[float], float]] = {}  # when tasks began; of this one
        self._waits: dict[str, float] = {}  # for another, since when
        self._took: dict[str, float] = {}
        self._shares: list[list[float]] = []  # of a cell's scoring, that its tasks took

    def begin(self, cell: str) -> None:
        self._waiting.pop(cell, None)
        self._begun[cell] = self._clock()

    def stage(self, cell: str, name: str) -> None:
        self._go_on(cell)
        if name.startswith("waits for "):
            self._waits[cell] = self._clock()
        if not name.startswith("evaluate"):
            return
        began, _ = self._scoring.get(cell, ([], 0.0))
        self._scoring[cell] = ([*began, self._clock()], 0.0)

    def advance(self, cell: str, completed: float, total: float | None) -> None:
        if cell in self._scoring and total:
            self._scoring[cell] = (self._scoring[cell][0], completed / total)

    def end(self, cell: str) -> None:
        self._go_on(cell)
        begun = self._begun.pop(cell, None)
        self._waiting.pop(cell, None)
        if begun is not None and cell in self._scoring:  # not where it was there already
            self._took[cell] = self._clock() - begun
            self._learn([*self._scoring[cell][0], self._clock()])
        self._scoring.pop(cell, None)

    def _go_on(self, cell: str) -> None:
        """Where it has waited, as if all that it did before had been so much later."""
        now = self._clock()
        waited = now - self._waits.pop(cell, now)
        if cell in self._begun:
            self._begun[cell] += waited
        if cell in self._scoring:
            began, part = self._scoring[cell]
            self._scoring[cell] = ([one + waited for one in began], part)

    def _now(self, cell: str) -> float:
        return self._waits.get(cell, self._clock())

    def _learn(self, times: Sequence[float]) -> None:
        """How the scoring of a whole cell is divided: WikiText may take as long as all others."""
        whole = times[-1] - times[0]
        if len(times) == self._tasks + 1 and whole > 0:
            self._shares.append([(end - begin) / whole for begin, end in pairwise(times)])

    def left(self) -> float | None:
        """Seconds; None where nothing is known yet."""
        at_work = {cell: self._whole(cell) for cell in self._begun}
        known = [*self._took.values(), *(one for one in at_work.values() if one is not None)]
        known += [self._earlier[cell] for cell in self._waiting if cell in self._earlier]
        if not known:
            return None
        usual = fmean(known)
        rest = [
            max(0.0, (usual if whole is None else whole) - (self._now(cell) - self._begun[cell]))
            for cell, whole in at_work.items()
        ]
        waiting = sum(self._earlier.get(cell, usual) for cell in self._waiting)
        return max([*rest, (sum(rest) + waiting) / self._at_once])

    def _whole(self, cell: str) -> float | None:
        """Seconds of a cell at work from its beginning to its end."""
        if cell in self._scoring:
            began, part = self._scoring[cell]
            of_task = [fmean(one) for one in zip(*self._shares, strict=True)] or (
                [1 / self._tasks] * self._tasks
            )
            done = len(began) - 1
            share = sum(of_task[:done]) + sum(of_task[done : done + 1]) * part
            if share > EARLY:
                return began[0] - self._begun[cell] + (self._now(cell) - began[0]) / share
        return self._earlier.get(cell)


def earlier_seconds(store: Store, cells: Sequence[Cell]) -> dict[str, float]:
    """What cells took in their newest good record in a results folder, whatever else changed, with
    as many documents and on the same device."""
    found = {}
    for cell in cells:
        files = (store.directory / "records" / cell.name).glob("*.json")
        for path in sorted(files, key=lambda one: -one.stat().st_mtime):
            try:
                record = read_record(path)
            except ResultsError:
                continue
            if record.status == "ok" and _alike(record.key_parts, cell.key_parts):
                found[cell.name] = sum(stage.seconds for stage in record.stages)
                break
    return found


def _alike(parts: Mapping[str, object], others: Mapping[str, object]) -> bool:
    scoring, other = (dict(of.get("scoring") or {}) for of in (parts, others))
    return all(parts.get(name) == others.get(name) for name in ALIKE) and all(
        scoring.get(name) == other.get(name) for name in SETTINGS
    )


def in_words(seconds: float) -> str:
    """About 40 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s left"
    if seconds < 5400:
        return f"about {round(seconds / 60)} min left"
    return f"about {seconds / 3600:.1f} h left"
