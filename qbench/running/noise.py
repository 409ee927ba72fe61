"""The noise floor of unquantized cells, here or as work that other hosts can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.machine.quiet import redirected
from qbench.plan import Cell, Plan
from qbench.running.units import Made, Remote, There, Unit
from qbench.running.work import opened
from qbench.store import Store

if TYPE_CHECKING:
    from qbench.evaluation.noise import Noise

LOG = "noise.log"


@dataclass(frozen=True, slots=True)
class Failed:
    """A cell whose floor could not be measured, and why."""

    cell: str
    error: str


def noise_of(cell: Cell, plan: Plan, say: Callable[[str], None]) -> Noise:
    """Score the cell's checkpoint under every variation of batches. Raises what scoring raises."""
    from qbench.cell import free, load
    from qbench.evaluation.loaded import load_task
    from qbench.evaluation.noise import measure_noise, scorer_of

    model, tokenizer = load(cell, plan)
    try:
        return measure_noise(
            scorer_of(model, tokenizer, cell.scoring),
            [load_task(task) for task in plan.tasks],
            say=say,
        )
    finally:
        del model
        free(plan.device)


@dataclass(frozen=True, kw_only=True)
class NoiseUnit(Unit):
    """Noise is kept by the caller, in one file for all cells; logs go to ``out``."""

    plan: Plan
    out: Path

    def remote(self, name: str) -> RemoteNoise:
        return RemoteNoise()

    def lock_file(self, name: str) -> Path:
        path = Store(self.out).lock_file(self.plan.cell(name).grid_cell)
        return path.with_suffix(".noise.lock")

    def kept(self, name: str) -> str:
        return _kept(self.plan.cell(name))

    def log_file(self, name: str) -> Path:
        return self.out / LOG

    def adopt(self, name: str, made: Made) -> Noise:
        with self.log_file(name).open("a") as log:
            log.write(made.log)
        return made.record

    def failed(self, name: str, error: str) -> Failed:
        return Failed(cell=name, error=error)


@dataclass(frozen=True)
class RemoteNoise(Remote):
    """Noise measured on another host."""

    def run(self, plan: Plan, name: str, there: There) -> Made:
        cell = plan.cell(name)
        log = there.out / f"{_kept(cell)}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with opened(there.progress) as told:
            told.begin(name)
            try:
                with redirected(log):
                    noise = noise_of(cell, plan, lambda line: told.stage(name, line))
                told.log(f"{name}: measured")
            finally:
                told.end(name)
        return Made(record=noise, tables={}, log=log.read_text(errors="replace"))


def _kept(cell: Cell) -> str:
    return f"noise/{cell.name}/{cell.key[:16]}"
