"""How long cells take, from what earlier ones took. Imports no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from qbench.machine import hardware
from qbench.plan import Cell, Plan

MOST = 2_000  # records that are looked at, the youngest first
EVALUATE = "evaluate"  # the stage that grows with the documents
EARLY = 0.02  # of a cell's requests: what comes before says little

Written = Mapping[str, Any]  # a record's JSON, as it was written


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Wall seconds, and the peak of memory in GiB (on CUDA the device's, else the process's)."""

    seconds: float
    memory_gib: float

    def __str__(self) -> str:
        return f"about {duration(self.seconds)}, {self.memory_gib:.1f} GiB"


def earlier(folder: Path) -> list[Written]:
    """Good records below a results folder and those beside it, under whatever key; unverified, for
    an estimate alone."""
    paths = list(folder.resolve().parent.glob("*/records/*/*/*.json"))
    dated = []
    for path in paths:
        with suppress(OSError):
            dated.append((path.stat().st_mtime, path))
    found = []
    for _, path in sorted(dated, reverse=True)[:MOST]:
        with suppress(OSError, ValueError):
            record = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(record, dict) and record.get("status") == "ok":
                found.append(record)
    return found


def estimate(cell: Cell, plan: Plan, records: Sequence[Written]) -> Estimate | None:
    """What ``cell`` will take, from the first of ``records`` of the same weights, quantizer and
    hardware: its scoring in proportion to the number of documents, where that is known. None where
    there is no such record."""
    here = plan.hardware or hardware(plan.device)
    wanted = {part: cell.key_parts[part] for part in ("weights", "normalizer", "quantizer")}
    for record in records:
        with suppress(KeyError, TypeError, ValueError):
            parts = record["key_parts"]
            alike = all(parts[part] == value for part, value in wanted.items())
            if not alike or record["environment"]["hardware"] != here:
                continue
            share = _share(plan, record)
            stages = record["stages"]
            return Estimate(
                seconds=sum(
                    float(one["seconds"]) * (share if one["name"] == EVALUATE else 1)
                    for one in stages
                ),
                memory_gib=max(float(one["peak_memory_gib"]) for one in stages),
            )
    return None


def _share(plan: Plan, record: Written) -> float:
    """Documents that are to be scored, of those that were; 1 where either is not known."""
    limit = plan.recipe.evaluation.limit
    planned = [task.documents or limit for task in plan.tasks]
    before = {score["task"]: int(score["documents"]) for score in record["scores"]}
    if not before or None in planned:
        return 1.0
    asked = sum(min(count, limit or count) for count in planned if count is not None)
    return asked / max(sum(before.values()), 1)


def duration(seconds: float) -> str:
    """In the unit that a person would say."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5_400 else f"{seconds / 3_600:.1f} h"


class TimeLeft:
    """Seconds that are left of a run, from what earlier records of its ``cells`` took (``earlier``,
    by name) and from how far those at work have come. ``tasks`` are scored one after the other in a
    cell, ``at_once`` cells run side by side."""

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
        self._scoring: dict[str, tuple[float, int, float]] = {}  # since when; task; part of it
        self._took: list[float] = []

    def begin(self, cell: str) -> None:
        self._waiting.pop(cell, None)
        self._begun[cell] = self._clock()

    def stage(self, cell: str, name: str) -> None:
        if name.startswith(EVALUATE):
            since, task, _ = self._scoring.get(cell, (self._clock(), -1, 0.0))
            self._scoring[cell] = (since, task + 1, 0.0)

    def advance(self, cell: str, completed: float, total: float | None) -> None:
        if cell in self._scoring and total:
            since, task, _ = self._scoring[cell]
            self._scoring[cell] = (since, task, completed / total)

    def end(self, cell: str) -> None:
        begun = self._begun.pop(cell, None)
        self._waiting.pop(cell, None)
        if self._scoring.pop(cell, None) and begun is not None:  # not where it was there already
            self._took.append(self._clock() - begun)

    def left(self) -> float | None:
        """Seconds; None where nothing is known yet."""
        at_work = {cell: self._whole(cell) for cell in self._begun}
        known = [*self._took, *(one for one in at_work.values() if one is not None)]
        known += [self._earlier[cell] for cell in self._waiting if cell in self._earlier]
        if not known:
            return None
        usual, now = fmean(known), self._clock()
        rest = [
            max(0.0, (usual if whole is None else whole) - (now - self._begun[cell]))
            for cell, whole in at_work.items()
        ]
        waiting = sum(self._earlier.get(cell, usual) for cell in self._waiting)
        return max([*rest, (sum(rest) + waiting) / self._at_once])

    def _whole(self, cell: str) -> float | None:
        """Seconds of a cell at work from its beginning to its end."""
        since, task, part = self._scoring.get(cell, (0.0, 0, 0.0))
        share = (task + part) / self._tasks
        if share > EARLY:
            return since - self._begun[cell] + (self._clock() - since) / share
        return self._earlier.get(cell)
