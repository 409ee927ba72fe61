"""Time whole commands as a user waits for them, from the command to its table: lm-eval's own for
one model, and ``qbench run`` of cells and of a recipe (``qbench bench command``)."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from qbench import bench
from qbench.bench import Row
from qbench.errors import EvaluationError
from qbench.evaluation.evaluate import SPLIT_KEYS
from qbench.evaluation.settings import BATCH_SIZE
from qbench.machine import python_module

if TYPE_CHECKING:
    from qbench.evaluation.tasks import TaskSpec
    from qbench.plan import Plan

LM_EVAL = "lm_eval, one model"


def bench_command(
    planned: Plan, recipe: Path, cells: Sequence[str], *, log: Callable[[str], None]
) -> list[Row]:
    """Return a row per command, in the order in which they ran: lm-eval's for the plan's first
    checkpoint; ``qbench run RECIPE --only PATTERN`` of each pattern in ``cells``, or of the whole
    ``recipe`` without any, with a common cache that is empty at first; lm-eval's again, since hosts
    drift. ``log`` gets a line per command. A row's ``seconds`` end when the process does; ``speed``
    is these over the mean of lm-eval's. Raises EvaluationError if a command fails."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        theirs = lm_eval_command(planned, folder / "definitions")

        def run(about: str, command: Sequence[str], **environment: str) -> None:
            start = time.perf_counter()
            done = subprocess.run(
                command, env=os.environ | environment, capture_output=True, text=True, check=False
            )
            rows.append({"command": about, "seconds": time.perf_counter() - start})
            log(f"{about}: {rows[-1]['seconds']:.1f} s")
            if done.returncode:
                lines = done.stderr.strip().splitlines()
                why = lines[-1] if lines else f"exit code {done.returncode}"
                handle, log_file = tempfile.mkstemp(".log", "qbench-bench-")
                with os.fdopen(handle, "w") as file:
                    file.write(done.stderr)
                raise EvaluationError(f"{about} failed: {why}; see what it printed: {log_file}")

        run(LM_EVAL, theirs)
        for pattern in cells or [""]:
            ours = [*python_module("qbench"), "run", str(recipe), "--device", planned.device]
            ours += ["--only", pattern] if pattern else []
            run(
                f"qbench run, {pattern or 'all cells'}",
                [*ours, "--out", str(folder / "results")],
                QBENCH_CACHE=str(folder / "cache"),
            )
        run(LM_EVAL, theirs)
    hflm = [row["seconds"] for row in rows if row["command"] == LM_EVAL]
    return [row | {"speed": row["seconds"] * len(hflm) / sum(hflm)} for row in rows]


def lm_eval_command(planned: Plan, folder: Path) -> list[str]:
    """Return lm-eval's command, a list of words, for the plan's first checkpoint, tasks and limit.
    The tasks' definitions, with the plan's data files, are written to the new ``folder``."""
    cell, evaluation = planned.cells[0], planned.recipe.evaluation
    folder.mkdir()
    for task in planned.tasks:
        path = folder / f"{task.name}.yaml"
        definition: dict[str, object] = {"include": str(task.definition), "task": _name(task)}
        if task.files:
            files = {file.split: str(file.path.resolve()) for file in task.files}
            definition |= {"dataset_path": "json", "dataset_name": None}
            definition |= dict.fromkeys(SPLIT_KEYS) | {"test_split": task.files[0].split}
            definition["dataset_kwargs"] = {"data_files": files}
        path.write_text(yaml.safe_dump(definition), encoding="utf-8")
    model = f"pretrained={cell.checkpoint.folder},dtype={cell.quantization.compute_dtype}"
    model += f",max_length={cell.scoring.max_length}"
    if cell.scoring.add_bos is not None:
        model += f",add_bos_token={cell.scoring.add_bos}"
    tasks = ",".join(_name(task) for task in planned.tasks)
    command = [*python_module("lm_eval"), "--model", "hf", "--model_args", model]
    command += ["--tasks", tasks, "--include_path", str(folder), "--device", planned.device]
    command += ["--batch_size", str(BATCH_SIZE[planned.device])]
    return [*command, *(["--limit", str(evaluation.limit)] if evaluation.limit else [])]


def _name(task: TaskSpec) -> str:
    return f"{task.name}_of_qbench"  # lm-eval has others of the task's own name


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return the rows of :func:`bench_command` as a Markdown table."""
    columns = {"from the command to its table": ("command", ""), "seconds": ("seconds", ".1f"),
               "× lm_eval": ("speed", ".2f")}  # fmt: skip
    return bench.table(rows, columns)
