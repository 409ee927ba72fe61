"""qbench from Python: the names that others may import.

``Recipe.load`` reads a recipe and ``plan`` finds its cells. ``run`` makes their records,
``compare`` compares them, and ``tables`` shows the result. ``load_records`` gives every score as a
row of a pandas table. ``attend`` sets the attention of your own model. Everything else may change
without notice. Importing this imports no torch.
"""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from qbench.comparison.compare import compare as compare_store
from qbench.machine import choose_device, set_library_env, terminal
from qbench.plan import Plan
from qbench.plan import plan as plan_on
from qbench.recipe import Overrides, Recipe
from qbench.runner.grid import run_cells
from qbench.runner.progress import Display
from qbench.store import Store
from qbench.tables import render

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qbench.comparison.lines import Comparison
    from qbench.records import Record

__all__ = ["Overrides", "Recipe", "attend", "compare", "load_records", "plan", "run", "tables"]

set_library_env()


def plan(recipe: Recipe, device: str = "auto", only: str | None = None) -> Plan:
    """What ``recipe`` asks for: its cells, each with the key of all that can change its scores.

    ``device`` is "auto", "cpu" or "cuda". ``only`` is a glob: the cells that should run. Nothing is
    loaded or run. Raises QbenchError for what cannot work.
    """
    return plan_on(recipe, device=choose_device(device), only=only)


def run(
    planned: Plan,
    out: str | Path,
    *,
    only: str | None = None,
    force: bool = False,
    executor: Executor | None = None,
) -> list[Record]:
    """Run the cells of a plan that have no finished record in the results folder ``out``.

    ``only`` is a glob over cells' names such as "softpick/gptq-*"; ``force`` runs cells again that
    have one. ``executor`` is any of ``concurrent.futures``; None runs one cell after the other in
    this process. Progress goes to standard error. A cell that fails has a record with ``status``
    "failed".
    """
    cells = planned.select(only)
    with terminal() as screen, Display(screen, len(cells)) as display:
        return run_cells(
            planned, out=Path(out), cells=cells, executor=executor, progress=display, force=force
        )


def compare(folder: str | Path) -> Comparison:
    """Every score of a results folder's grid, with intervals and tests of the differences."""
    return compare_store(Store(Path(folder)))


def tables(comparison: Comparison, format: str = "md", published: str | None = None) -> str:
    """The delta tables as text. ``format``: "md", "tex" or "csv". ``published``: a set of a
    paper's numbers to print beside, such as "softpick-340m"."""
    return render(comparison, format=format, published=published)


def load_records(folder: str | Path) -> pd.DataFrame:
    """One row for each score of each finished record of a results folder's last run; ``task`` of a
    group's score, such as mmlu's, is the group.

    Columns: checkpoint, quantizer, method, precision, normalizer, task, metric, value, stderr,
    documents, higher_is_better, bits_per_weight and key. Raises ResultsError for a folder without
    results or with a damaged file.
    """
    rows = [
        {
            "checkpoint": record.checkpoint,
            "quantizer": record.quantizer,
            "method": record.method,
            "precision": record.precision.name,
            "normalizer": record.normalizer,
            "task": score.task,
            "metric": score.metric,
            "value": score.value,
            "stderr": score.stderr,
            "documents": score.documents,
            "higher_is_better": score.higher_is_better,
            "bits_per_weight": record.audit.bits_per_weight if record.audit else None,
            "key": record.key,
        }
        for record in Store(Path(folder)).records()
        for score in (*record.scores, *record.groups)
    ]
    return pd.DataFrame(rows)


def attend(model: PreTrainedModel, *, normalizer: str, implementation: str = "auto") -> str:
    """Let a model of transformers attend with ``normalizer``, one of ``qbench list normalizers``.
    Returns what runs, e.g. "softpick/triton".

    ``implementation``: "triton" (kernels, on a CUDA GPU), "reference" (PyTorch), or "auto" (triton
    on CUDA, else reference). Raises RecipeError for an unknown name, UnavailableError where triton
    cannot run or the model's class does not take its attention from outside.
    """
    from qbench.attention.transformers import attend as set_attention

    return set_attention(model, normalizer=normalizer, implementation=implementation)
