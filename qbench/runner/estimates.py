"""Estimate how long cells take and how much memory they need. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from qbench.checkpoints.find import elements
from qbench.evaluation.settings import hidden_size
from qbench.machine import GIB, fast_bf16, memory_gib, visible_gpus
from qbench.plan import Cell, Plan, streams
from qbench.text import duration

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
BYTES_PER_TOKEN = 3.7  # of task files, each context once
REPEATED = 1.6  # contexts that are scored anew with each answer, and padding
BASE_GIB = {"cuda": 1.5, "cpu": 0.8}  # libraries, batches
SLOW_BF16 = 10.0
# If weights come block by block: how often they are read, in all and for each task; GiB per second
# if the host keeps the files in memory; the most hidden states that wait.
PASSES, TASK_PASSES = 10, 3
HOST_RATE = 8.0
WAITING_GIB = 16.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Speeds of one GPU, or of one core of a CPU in float32, as in docs/speed.md."""

    score: Mapping[str, float]  # operations per second, by scoring mode
    rounding: float  # seconds for 10⁹ weights, with their audit
    calibrating: float  # seconds for 10⁹ weights of a method that sees text
    disk: float  # GiB per second
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Wall seconds and peak memory in GiB, of the device on CUDA, else of the process."""

    seconds: float
    memory_gib: float
    host_gib: float | None = None  # of the host, if weights come block by block
    disk_gib: float = 0.0  # beside it, of quantized weights that are kept

    def __str__(self) -> str:
        line = f"about {duration(self.seconds)}, {self.memory_gib:.1f} GiB"
        if self.host_gib is None:
            return line
        rest = f"{self.host_gib:.1f} GiB of host memory, {self.disk_gib:.1f} GiB of disk"
        return f"{line}; block by block, {rest}"


def estimate(cell: Cell, plan: Plan) -> Estimate | None:
    """Estimate the time and memory of ``cell`` from its shapes and rates that were measured
    elsewhere (docs/speed.md): right within a factor of about three. None if the amount of text is
    not known, as of data on the hub."""
    tokens = _tokens(cell, plan)
    if tokens is None:
        return None
    rates = RATES[plan.device]
    cores = 1 if plan.device == "cuda" else os.cpu_count() or 1
    dtype = cell.quantization.compute_dtype
    slow = SLOW_BF16 if plan.device == "cpu" and dtype != "float32" and not fast_bf16() else 1.0
    parameters = elements(cell.checkpoint.headers)
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
        return Estimate(seconds=seconds, memory_gib=memory + calibration)
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
        host_gib=min(tokens * token, WAITING_GIB) + packed + calibration,
        disk_gib=packed,
    )


def _tokens(cell: Cell, plan: Plan) -> float | None:
    """Return about how many tokens are computed, padding and repeated contexts included; None if a
    task's data are not known."""
    total, limit = 0.0, plan.recipe.evaluation.limit
    for task in plan.tasks:
        if task.documents is None or not task.files:
            return None
        size = task.files[0].path.stat().st_size / BYTES_PER_TOKEN
        repeated = 1.0 if cell.scoring.mode == "fast" else REPEATED
        total += size * repeated * min(1.0, (limit or task.documents) / task.documents)
    return total
