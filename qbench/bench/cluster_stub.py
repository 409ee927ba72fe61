"""What a worker of the fault bench loads: a cell of a few steps that needs no model, and what
befalls some cells. All else of a worker is real."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import qbench.cell
from qbench.records import OUTCOME_COLUMNS, RESPONSE_COLUMNS, Score

SECONDS, STEPS, DOCUMENTS = "QBENCH_STUB_SECONDS", 10, 200
KILLS, EATS, FILLS = "QBENCH_STUB_KILLS", "QBENCH_STUB_EATS", "QBENCH_STUB_FILLS"
BEGUN = "QBENCH_STUB_BEGUN"  # a folder: one file for each cell that began, with its process
MIB = 2**20


def _step(cell: Any, plan: Any, store: Any, result: Any, progress: Any, cache: Path) -> None:
    begun = Path(os.environ[BEGUN])
    (begun / f"{cell.name.replace('/', '_')}.{os.getpid()}.{time.time_ns()}").touch()
    print(f"{cell.name} begins", flush=True)  # into its log
    progress.stage(cell.name, "stub", total=STEPS)
    for step in range(STEPS):
        time.sleep(float(os.environ.get(SECONDS, "0.5")) / STEPS)
        progress.advance(cell.name, step + 1, STEPS)
        if step == STEPS // 2:
            _befall(cell.name, cache)
    result.outcomes, result.responses = [], [pd.DataFrame(columns=list(RESPONSE_COLUMNS))]
    for task in plan.tasks:
        outcomes, score = _made_up(cell.name, task)
        result.outcomes.append(outcomes)
        result.scores.append(score)


def _made_up(cell: str, task: Any) -> tuple[pd.DataFrame, Score]:
    """Right and wrong answers by chance, the same for the same cell."""
    draw = np.random.default_rng(list(f"{cell} {task.name}".encode()))
    value = (draw.random(DOCUMENTS) < 0.6).astype(float)
    columns = {"task": task.name, "document": range(DOCUMENTS), "metric": "acc", "value": value,
               "weight": 1.0}  # fmt: skip
    score = Score(
        task=task.name, label=task.label, metric="acc", value=float(value.mean()),
        stderr=float(value.std(ddof=1) / DOCUMENTS**0.5), higher_is_better=True,
        aggregation="mean", documents=DOCUMENTS,
    )  # fmt: skip
    return pd.DataFrame(columns)[list(OUTCOME_COLUMNS)], score


def _befall(cell: str, cache: Path) -> None:
    if cell == os.environ.get(KILLS):
        os.kill(os.getpid(), signal.SIGKILL)
    if cell == os.environ.get(EATS):
        held = []
        while True:
            held.append(bytearray(os.urandom(MIB)) * 32)
            time.sleep(0.02)
    if os.environ.get(FILLS):  # this worker's disk
        path = cache / "filling"
        try:
            with path.open("wb") as file:
                while True:
                    file.write(bytes(MIB))
                    file.flush()
        except OSError as error:
            path.unlink()
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None


def dask_setup(worker: Any) -> None:
    """Dask calls it where this module is preloaded."""
    qbench.cell._run = _step
