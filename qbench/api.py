"""Use qbench from Python: the names that others may import.

``evaluate`` quantizes and scores a model, and is all that most need. ``Recipe.load`` reads a recipe
and ``plan`` finds its cells. ``run`` makes their records, ``compare`` compares them, and ``tables``
shows the result. ``load_records`` gives every score as a row of a pandas table, ``load_answers``
every token of the answers. ``attend`` sets the attention of your own model. Everything else may
change without notice. Importing this imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from qbench.comparison.answers import token_classes
from qbench.comparison.compare import compare as compare_store
from qbench.comparison.rows import Comparison
from qbench.files import require_folder
from qbench.machine import choose_device, set_library_env, terminal
from qbench.plan import Plan
from qbench.plan import plan as plan_on
from qbench.recipe import Overrides, Recipe, added_column, label_of
from qbench.records import ANSWER_COLUMNS, ANSWERS, PROMPT
from qbench.runner.grid import run_cells
from qbench.runner.progress import Display
from qbench.store import Store
from qbench.tables import render
from qbench.tables.frames import Results

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qbench.records import Record

__all__ = ["Overrides", "Recipe", "Results", "attend", "compare", "evaluate", "load_answers",
           "load_records", "plan", "run", "tables"]  # fmt: skip

set_library_env()


COLUMNS = (
    "checkpoint", "quantizer", "method", "precision", "normalizer", "task", "metric", "value",
    "stderr", "documents", "higher_is_better", "bits_per_weight", "key",
)  # fmt: skip


def evaluate(
    path_or_mapping: str | Path | Mapping[str, str | Path],
    quantizers: str | Sequence[str],
    tasks: str | Sequence[str],
    *,
    out: str | Path | None = None,
    device: str | None = None,
    **options: Any,
) -> Results:
    """Quantize a model, score it and return the results: ``.verdict``, ``.damage``, ``.documents``
    and ``.plot()``.

    ``path_or_mapping`` is a folder or hub id, or a mapping of names to these; ``quantizers`` and
    ``tasks`` are names as ``qbench list`` prints them, in a list or separated by commas; ``device``
    is cpu or cuda (None: cuda if there is a GPU). ``options`` are those of ``Overrides``, as of
    ``qbench run``: data, limit, calibration and more. An unquantized column is added if
    ``quantizers`` has none. Finished cells in the folder ``out`` (default: results/ and the names
    of the checkpoints) are reused; ``.verdict`` names cells that failed. Raises QbenchError for
    what cannot work.
    """
    checkpoints = path_or_mapping
    if isinstance(checkpoints, str | Path):
        checkpoints = {label_of(Path(checkpoints).resolve().name): checkpoints}
    given = Overrides(checkpoints=checkpoints, quantizers=quantizers, tasks=tasks, **options)
    recipe = Recipe.load(None, given)
    if line := added_column(recipe, given):
        print(line, file=sys.stderr)
    planned = plan(recipe, device=device or "auto")
    out = Path(out).expanduser() if out is not None else Path("results") / recipe.name
    run(planned, out)
    store = Store(out, manifest=planned.manifest())
    return Results(compare_store(store), store)


def plan(recipe: Recipe, device: str = "auto", only: str | None = None) -> Plan:
    """Return the plan of ``recipe``: its cells, each with the key of all that can change its
    scores.

    ``device`` is "auto", "cpu" or "cuda". ``only``: globs over names of cells, separated by commas.
    The plan has all cells; only those that match (None: all) must be able to run. Nothing is loaded
    or run. Raises QbenchError for what cannot work.
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
    """Run the cells of a plan that have no finished record in the results folder ``out``; return
    their records and those of finished cells, in order.

    ``only``: globs over cells' names such as "softpick/gptq-*", separated by commas (None: all);
    other cells are neither run nor returned. ``force`` runs cells again that have a record.
    ``executor`` is any of ``concurrent.futures``; None runs one cell after the other in this
    process. Progress goes to standard error. A cell that fails has a record with ``status``
    "failed". Raises RecipeError for a glob without a match, OutputError if ``out`` cannot be
    written.
    """
    out = Path(out).expanduser()
    require_folder(out, "run: out")
    cells = planned.select(only)
    with terminal() as screen, Display(screen, len(cells)) as display:
        return run_cells(
            planned, out=out, cells=cells, executor=executor, progress=display, force=force
        )


def compare(folder: str | Path) -> Comparison:
    """Return the comparison of all scores of the last run of a results folder: differences with
    intervals and tests. Raises ResultsError for a folder without results or with a damaged file."""
    return compare_store(Store(Path(folder)))


def tables(comparison: Comparison, format: str = "md") -> str:
    """Return the tables of a comparison as text; ``format`` is "md", "tex" or "csv". Raises
    RecipeError for an unknown format."""
    return render(comparison, format=format)


def load_records(folder: str | Path) -> pd.DataFrame:
    """Return one row per score of each record of a results folder's last run, failed cells left
    out; a group's score, such as mmlu's, has the group as its ``task``.

    Columns, also of a table without rows: checkpoint, quantizer, method, precision, normalizer,
    task, metric, value (as lm-eval gives it: accuracies are fractions), stderr, documents,
    higher_is_better, bits_per_weight (None if not audited) and key. Raises ResultsError for a
    folder without results or with a damaged file.
    """
    rows = [
        (
            record.checkpoint, record.quantizer, record.method, record.precision.name,
            record.normalizer, score.task, score.metric, score.value, score.stderr,
            score.documents, score.higher_is_better,
            record.audit.bits_per_weight if record.audit else None, record.key,
        )
        for record in Store(Path(folder)).records()
        for score in (*record.scores, *record.groups)
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS))


def load_answers(folder: str | Path) -> pd.DataFrame:
    """Return one row per token of the unquantized models' answers, of each finished record of a
    results folder's last run that has read any.

    Columns: checkpoint, quantizer, document, sample, position (−1: the prompt), text, and of
    quantized cells kl (nats), change of the token's log-probability, margin and agrees (likeliest
    token, see docs/records.md); class, one of ``qbench.comparison.answers.CLASSES`` ("prompt" for a
    prompt). Raises ResultsError for a folder without results or with a damaged file.
    """
    store = Store(Path(folder))
    tables = [pd.DataFrame(columns=["checkpoint", "quantizer", *ANSWER_COLUMNS, "class"])]
    for record in store.records():
        if ANSWERS in record.files:
            table = store.answers(record)
            table.insert(0, "checkpoint", record.checkpoint)
            table.insert(1, "quantizer", record.quantizer)
            tokens = table["position"] != PROMPT
            table["class"] = "prompt"
            table.loc[tokens, "class"] = token_classes(table[tokens])
            tables.append(table)
    return pd.concat(tables[1:] or tables, ignore_index=True)


def attend(model: PreTrainedModel, *, normalizer: str, implementation: str = "auto") -> str:
    """Set the attention function of a model of transformers; return what runs, such as
    "softpick/triton". The model's configuration, which is saved with it, names the normalizer from
    then on.

    ``normalizer`` is one of ``qbench list normalizers``. ``implementation`` is "triton" (kernels,
    on a CUDA GPU), "reference" (PyTorch), or "auto" (triton on CUDA if the function has kernels,
    else reference). Raises RecipeError for an unknown name, UnavailableError if triton cannot run
    or has no kernels for the function, or if the model's class does not take its attention from
    outside.
    """
    from qbench.attention.transformers import set_attention

    return set_attention(model, normalizer=normalizer, implementation=implementation)
