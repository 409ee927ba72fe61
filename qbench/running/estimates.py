"""What a cell will take, from what earlier ones took. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbench.machine.environment import hardware
from qbench.plan import Cell, Plan

MOST = 2_000  # records that are looked at, the youngest first
EVALUATE = "evaluate"  # the stage that grows with the documents

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


def duration(seconds: float) -> str:
    """In the unit that a person would say."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5_400 else f"{seconds / 3_600:.1f} h"


def _share(plan: Plan, record: Written) -> float:
    """Documents that are to be scored, of those that were; 1 where either is not known."""
    limit = plan.recipe.evaluation.limit
    planned = [task.documents or limit for task in plan.tasks]
    before = {score["task"]: int(score["documents"]) for score in record["scores"]}
    if not before or None in planned:
        return 1.0
    asked = sum(min(count, limit or count) for count in planned if count is not None)
    return asked / max(sum(before.values()), 1)
