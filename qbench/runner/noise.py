"""The noise floor of unquantized cells. Imports no torch before a cell is scored."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.errors import EvaluationError
from qbench.machine import attempt
from qbench.plan import Cell, Plan
from qbench.progress import Progress

if TYPE_CHECKING:
    from qbench.evaluation.noise import Noise

LOG = "noise.log"


def measure(plan: Plan, out: Path, cell: Cell, *, progress: Progress) -> Noise:
    """Score the cell's checkpoint under every variation of batches, with progress; libraries' words
    go to a log in ``out``. Raises EvaluationError."""
    found: list[Noise] = []

    def work() -> None:
        from qbench.cell import noise

        found.append(noise(cell, plan, partial(progress.stage, cell.name)))

    progress.begin(cell.name)
    error = attempt(work, out / LOG, plan.device)
    progress.end(cell.name)
    if error is not None:
        raise EvaluationError(f"{cell.name}: {error}")
    progress.log(f"{cell.name}: measured")
    return found[0]
