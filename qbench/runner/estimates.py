"""How long cells take, from what earlier ones took. Imports no torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from qbench.checkpoints.find import elements, read_headers
from qbench.evaluation.settings import hidden_size
from qbench.files import read_regular
from qbench.machine import GIB, fast_bf16, hardware, memory_gib, visible_gpus
from qbench.plan import Cell, Plan, streams
from qbench.text import duration

MOST = 2_000  # records that are looked at, the youngest first
EVALUATE = "evaluate"  # the stage that grows with the documents
LATE = 0.1  # of the time that a cell took so far: the least that is left of one that is late

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
BYTES_A_TOKEN = 3.7  # of task files, each context once
REPEATED = 1.6  # contexts that are scored anew with each answer, and padding
BASE_GIB = {"cuda": 1.5, "cpu": 0.8}  # libraries, batches
SLOW_BF16 = 10.0
# Weights that come block by block: how often they are read, in all and for each task; GiB a second
# where the host keeps the files in memory; hidden states that wait at most.
PASSES, TASK_PASSES = 10, 3
HOST_RATE = 8.0
WAITING_GIB = 16.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Of one GPU, or of one core of a CPU in float32; as docs/speed.md has them."""

    score: Mapping[str, float]  # operations a second, by the mode of scoring
    rounding: float  # seconds for 10⁹ weights, with their audit
    calibrating: float  # seconds for 10⁹ weights of a method that sees text
    disk: float  # GiB a second
    fixed: float  # seconds of a cell before it computes anything


RATES = {
    "cuda": Rates(
        score={"fast": 2e14, "exact": 9e13, "lm-eval": 2e13},
        rounding=3.0,
        calibrating=15.0,
        disk=1.0,
        fixed=6.0,
    ),
    "cpu": Rates(
        score={"fast": 3e10, "exact": 2.5e10, "lm-eval": 2e10},
        rounding=200.0,
        calibrating=250.0,
        disk=1.0,
        fixed=2.0,
    ),
}

Written = Mapping[str, Any]  # a record's JSON, as it was written


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Wall seconds, and the peak of memory in GiB (on CUDA the device's, else the process's)."""

    seconds: float
    memory_gib: float
    measured: bool = True  # by an earlier record; else from shapes and usual rates
    host_gib: float | None = None  # where weights come block by block: what waits on the host
    disk_gib: float = 0.0  # beside it, of quantized weights that are kept

    def __str__(self) -> str:
        line = f"about {duration(self.seconds)}, {self.memory_gib:.1f} GiB"
        if self.host_gib is None:
            return line
        rest = f"{self.host_gib:.1f} GiB of host memory, {self.disk_gib:.1f} GiB of disk"
        return f"{line}; block by block, {rest}"


def earlier(folder: Path) -> list[Written]:
    """Good records below a results folder and those beside it, under whatever key; unverified, for
    an estimate alone."""
    parent = folder.resolve().parent
    dated = []
    for path in parent.glob("*/records/*/*/*.json"):
        with suppress(OSError):
            dated.append((path.stat().st_mtime, path))
    found = []
    for _, path in sorted(dated, reverse=True)[:MOST]:
        with suppress(OSError, ValueError):
            record = json.loads(read_regular(path))
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


def expected(cell: Cell, plan: Plan, records: Sequence[Written]) -> Estimate | None:
    """``estimate``, and where no record is alike, from shapes and rates that were measured
    elsewhere (docs/speed.md): right within a factor of about three. None where nobody knows how
    much text is scored, as of data that are on the hub."""
    found = estimate(cell, plan, records)
    if found is not None:
        return found
    tokens = _tokens(cell, plan)
    if tokens is None:
        return None
    rates = RATES[plan.device]
    cores = 1 if plan.device == "cuda" else os.cpu_count() or 1
    dtype = cell.quantization.compute_dtype
    slow = SLOW_BF16 if plan.device == "cpu" and dtype != "float32" and not fast_bf16() else 1.0
    parameters = elements(read_headers(cell.checkpoint.folder, quantized=True))
    weights = parameters * BYTES[dtype] / GIB
    operations = 2 * parameters * slow / cores
    seconds = rates.fixed + 3 * weights / rates.disk  # read for loading and for the audit
    seconds += operations * tokens / rates.score[cell.scoring.mode]
    memory = BASE_GIB[plan.device] + weights
    text = plan.calibration
    token = hidden_size(cell.checkpoint.config) * BYTES[dtype] / GIB
    calibration = 0.0
    if cell.quantization.precision.quantized:
        memory += weights  # the audit holds the original beside
        rate = rates.calibrating if cell.quantization.needs_calibration else rates.rounding
        seconds += rate * parameters / 1e9
    if cell.quantization.needs_calibration and text is not None:
        read = text.samples * text.length
        seconds += 2 * operations * cores * read / rates.score["exact"]  # on a CPU by one core
        calibration = read * token
    if plan.recipe.evaluation.device_map and plan.device == "cuda":
        memory /= len(visible_gpus())
    if not streams(cell, plan, weights * GIB, lambda: memory_gib("cuda") * GIB):
        return Estimate(seconds=seconds, memory_gib=memory + calibration, measured=False)
    config = cell.checkpoint.config
    ends = 2 * config.get("vocab_size", 0) * token  # embeddings and LM head
    blocks = 4 * weights / max(1, config.get("num_hidden_layers", 1))  # two, of two models
    bits = cell.quantization.precision.weights.bits if cell.quantization.weights else 0.0
    packed = parameters * bits / 8 / GIB
    cached = weights < memory_gib("cpu")
    passes = PASSES + TASK_PASSES * len(plan.tasks)
    return Estimate(
        seconds=seconds + passes * weights / (HOST_RATE if cached else rates.disk),
        memory_gib=BASE_GIB[plan.device] + ends + blocks,
        measured=False,
        host_gib=min(tokens * token, WAITING_GIB) + packed + calibration,
        disk_gib=packed,
    )


def _tokens(cell: Cell, plan: Plan) -> float | None:
    """About how many tokens are computed, paddings and repeated questions included."""
    total, limit = 0.0, plan.recipe.evaluation.limit
    for task in plan.tasks:
        if task.documents is None or not task.files:
            return None
        size = task.files[0].path.stat().st_size / BYTES_A_TOKEN
        repeated = 1.0 if cell.scoring.mode == "fast" else REPEATED
        total += size * repeated * min(1.0, (limit or task.documents) / task.documents)
    return total


def _share(plan: Plan, record: Written) -> float:
    """Documents that are to be scored, of those that were; 1 where either is not known."""
    limit = plan.recipe.evaluation.limit
    planned = [task.documents or limit for task in plan.tasks]
    before = {score["task"]: int(score["documents"]) for score in record["scores"]}
    if not before or None in planned:
        return 1.0
    asked = sum(min(count, limit or count) for count in planned if count is not None)
    return asked / max(sum(before.values()), 1)


class TimeLeft:
    """Seconds that are left of a run of ``cells``, ``at_once`` side by side: what they are
    ``expected`` to take, by name, corrected by what finished ones took."""

    def __init__(
        self,
        cells: Sequence[str],
        *,
        expected: Mapping[str, float] | None = None,
        at_once: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._waiting = dict.fromkeys(cells)
        self._expected, self._at_once, self._clock = expected or {}, max(1, at_once), clock
        self._begun: dict[str, float] = {}
        self._at_work: set[str] = set()
        self._scored: set[str] = set()
        self._took: dict[str, float] = {}

    def begin(self, cell: str) -> None:
        self._waiting.pop(cell, None)
        self._begun[cell] = self._clock()
        self._at_work.discard(cell)

    def stage(self, cell: str, name: str) -> None:
        if cell not in self._at_work:  # until now its process imported libraries, once for all
            self._at_work.add(cell)
            self._begun[cell] = self._clock()
        if name.startswith(EVALUATE):
            self._scored.add(cell)

    def end(self, cell: str) -> None:
        self._waiting.pop(cell, None)
        begun = self._begun.pop(cell, None)
        if begun is not None and cell in self._scored:  # not where it was there already
            self._took[cell] = self._clock() - begun

    def left(self) -> float | None:
        """Seconds; None where nothing is known yet."""
        took, expected = self._took, self._expected
        known = list((took or expected).values())
        if not known:
            return None
        both = took.keys() & expected.keys()
        slower = 1.0
        if both:
            slower = sum(took[cell] for cell in both) / sum(expected[cell] for cell in both)
        usual = fmean(known)

        def whole(cell: str) -> float:
            return expected[cell] * slower if cell in expected else usual

        spent = {cell: self._clock() - begun for cell, begun in list(self._begun.items())}
        rests = [max(whole(cell) - seconds, LATE * seconds) for cell, seconds in spent.items()]
        waiting = sum(map(whole, self._waiting))
        return max([*rests, (sum(rests) + waiting) / self._at_once])
