"""The noise floor of unquantized cells."""

from __future__ import annotations

from pathlib import Path

from qbench.cell import free, load
from qbench.errors import EvaluationError, failure_line
from qbench.evaluation.loaded import load_task
from qbench.evaluation.noise import Noise, measure_noise
from qbench.machine import redirected
from qbench.plan import Cell, Plan
from qbench.progress import Progress

LOG = "noise.log"


def measure(plan: Plan, out: Path, cell: Cell, *, progress: Progress) -> Noise:
    """Score the cell's checkpoint under every variation of batches, with progress; libraries' words
    go to a log in ``out``. Raises EvaluationError."""
    model = None
    progress.begin(cell.name)
    try:
        with redirected(out / LOG):
            model, tokenizer = load(cell, plan)
            noise = measure_noise(
                model,
                tokenizer,
                cell.scoring,
                [load_task(task) for task in plan.tasks],
                say=lambda line: progress.stage(cell.name, line),
            )
    except Exception as error:
        raise EvaluationError(f"{cell.name}: {failure_line(error, out / LOG)}") from error
    finally:
        del model
        free(plan.device)
        progress.end(cell.name)
    progress.log(f"{cell.name}: measured")
    return noise
