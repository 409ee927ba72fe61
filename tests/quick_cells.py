"""Cells of one step, in which their process may be killed: so that no process has to import torch
where a test is about processes, locks and records."""

import os
import signal
import sys
import time
from concurrent.futures import Executor
from types import ModuleType

import pandas as pd

from qbench.cell_result import TaskResult
from qbench.records import OUTCOME_COLUMNS, RESPONSE_COLUMNS, ScoringReport, TaskRecord


class Quick(Executor):
    """Sends quick cells on. The process of the cells ``doomed`` is killed in the middle of them,
    each time or the first ``times`` times."""

    def __init__(self, inner, marks, doomed=(), times=99):
        self.inner, self.marks, self.doomed, self.times = inner, marks, doomed, times

    def submit(self, fn, name, **settings):
        return self.inner.submit(
            quickly, fn, name, self.marks, self.times if name in self.doomed else 0, **settings
        )


def quickly(fn, name, marks, deaths, **settings):
    """In a worker process: a cell of one step, in which the process is killed while there are
    fewer marks than ``deaths``."""
    for module in ("qbench.cell", "qbench.runner.preload"):  # which import torch
        sys.modules.setdefault(module, ModuleType(module))

    def step(result, store, cache, **_):
        result.progress.stage(result.cell.name, "step")
        marks.mkdir(exist_ok=True)
        if len(list(marks.iterdir())) < deaths:
            (marks / str(time.monotonic_ns())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        report = ScoringReport(
            mode="exact", softmax_dtype="float32", batching="", peak_memory_gib=0.0
        )
        record = TaskRecord(
            checkpoint=result.cell.checkpoint_name, quantizer=result.cell.label, key="0" * 64,
            task="step", digest="", scores=(), scoring=report, seconds=0.0,
        )  # fmt: skip
        tables = {"outcomes": pd.DataFrame(columns=list(OUTCOME_COLUMNS)),
                  "responses": pd.DataFrame(columns=list(RESPONSE_COLUMNS))}  # fmt: skip
        result.tasks.append(TaskResult(record, tables))

    sys.modules["qbench.cell"].compute = step
    return fn(name, **settings)
