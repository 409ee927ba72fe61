"""The noise floor of unquantized cells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qbench.cell import free, load
from qbench.errors import EvaluationError, one_line
from qbench.evaluation.loaded import load_task
from qbench.evaluation.noise import Noise, measure_noise
from qbench.machine import redirected
from qbench.plan import Cell, Plan
from qbench.progress import Progress

LOG = "noise.log"


def noise_of(cell: Cell, plan: Plan, say: Callable[[str], None]) -> Noise:
    """Score the cell's checkpoint under every variation of batches. Raises what scoring raises."""
    model, tokenizer = load(cell, plan)
    try:
        return measure_noise(
            model,
            tokenizer,
            cell.scoring,
            [load_task(task) for task in plan.tasks],
            say=say,
        )
    finally:
        del model
        free(plan.device)


def measure(plan: Plan, out: Path, cell: Cell, *, progress: Progress) -> Noise:
    """``noise_of`` a cell, with its progress; libraries' words go to a log in ``out``. Raises
    EvaluationError."""
    progress.begin(cell.name)
    try:
        with redirected(out / LOG):
            noise = noise_of(cell, plan, lambda line: progress.stage(cell.name, line))
    except Exception as error:
        raise EvaluationError(f"{cell.name}: {one_line(error, out / LOG)}") from error
    finally:
        progress.end(cell.name)
    progress.log(f"{cell.name}: measured")
    return noise
