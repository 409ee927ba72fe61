"""Build the rows of a comparison: every score of the manifest beside missing and failed ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, product

from qbench.comparison.answers import answer_damage
from qbench.comparison.effects import columns_by_task, with_effects
from qbench.comparison.losses import kl_column, kl_from, score_losses
from qbench.comparison.outcomes import flips_of
from qbench.comparison.rows import Comparison, Row, RowValue, status_of
from qbench.errors import ResultsError
from qbench.metrics import KL_MEAN, REDUNDANT, is_percentage, rank
from qbench.records import ANSWERS, Record, RunManifest, Score
from qbench.store import Store
from qbench.text import NO_VALUE


def compare(store: Store, *, statistics: bool = True, against: str | None = None) -> Comparison:
    """Compare the checkpoints of a results folder at every precision, and each quantized precision
    with the one that ``against`` names (None: with none).

    ``statistics=False`` leaves intervals and tests out and reads no per-document outcomes. Raises
    ResultsError if the folder has no manifest or no precision ``against``, or if a record cannot be
    read.
    """
    grid = store.manifest()
    names = {cell.quantizer: None for cell in grid.cells if cell.quantized}
    if against not in (None, *names):
        raise ResultsError(
            f"--against {against}: not a quantized column; possible: {', '.join(names)}"
        )
    stored = {cell.cell: store.get(cell) for cell in grid.cells}
    records = {name: record for name, record in stored.items() if record is not None}
    comparison = Comparison(
        grid=grid,
        records=records,
        lines=tuple(_lines(grid, records)),
        folder=store.directory.resolve().name,
        against=against,
    )
    if not statistics:
        return comparison
    columns = columns_by_task(comparison, store)
    comparison = with_effects(comparison, store, columns)
    by_document = {
        name: kl_column(store, record)
        for name, record in records.items()
        if status_of(record)[0] == "ok" and record.quantized
    }
    kl = kl_from(comparison, by_document)
    primary = score_losses(comparison, columns, grid.primary) if grid.primary else kl
    comparison = replace(comparison, kl=kl, primary=primary, flips=flips_of(comparison, columns))
    answers = {}
    for cell in grid.cells:
        base = f"{cell.checkpoint}/{comparison.unquantized_of[cell.quantizer]}"
        pair = [records.get(name) for name in (cell.cell, base)]
        readable = cell.quantized and not comparison.no_damage(cell.cell)
        if readable and all(record and ANSWERS in record.files for record in pair):
            answers[cell.cell] = answer_damage(store, *pair)
    answers = {name: damage for name, damage in answers.items() if damage is not None}
    return replace(comparison, answers=answers)


def _lines(grid: RunManifest, records: Mapping[str, Record]) -> Iterator[Row]:
    """Yield a row per task, precision and metric, unquantized precisions first in each task and
    metrics in the paper's order."""
    cells = {cell.cell: cell for cell in grid.cells}
    first = {cell.quantizer: cell for cell in reversed(grid.cells)}
    # A precision without any record has not been run yet: ``problems`` names its cells.
    ran = {cell.quantizer for cell in grid.cells if cell.cell in records} or {*first}
    quantizers = sorted((q for q in grid.quantizers if q in ran), key=lambda q: first[q].quantized)
    scores = {name: record.by_name() for name, record in records.items()}
    examples: dict[str, dict[str, Score]] = defaultdict(dict)  # a score per task and metric
    for score in chain.from_iterable(of_cell.values() for of_cell in scores.values()):
        examples[score.task].setdefault(score.metric, score)
    groups = (group.group for record in records.values() for group in record.pooled_groups)
    for task in dict.fromkeys((*grid.tasks, *groups)):
        metrics = sorted(examples[task], key=rank) or [NO_VALUE]
        for quantizer, metric in product(quantizers, metrics):
            like = examples[task].get(metric)
            aggregation = like.aggregation if like else ""
            entries = {}
            for checkpoint in grid.checkpoints:
                name, score = f"{checkpoint}/{quantizer}", None
                record = records.get(name) if name in cells else None
                status, reason = "missing", "not in the grid"
                if name in cells:
                    status, reason = status_of(record)
                if record is not None and status == "ok":
                    score = scores[name].get((task, metric))
                    if score is None and task in record.failed_tasks:
                        status, reason = "failed", record.failed_tasks[task]
                    elif score is None:
                        status, reason = "missing", f"the record has no {metric} of {task}"
                entries[checkpoint] = RowValue(
                    checkpoint=checkpoint,
                    cell=name,
                    status=status,
                    key=cells[name].key if name in cells else "",
                    value=score and score.value,
                    stderr=score and score.stderr,
                    documents=score and score.documents,
                    reason=reason,
                )
            yield Row(
                task=task,
                label=like.label if like else task,
                metric=metric,
                higher_is_better=like.higher_is_better if like else True,
                # of KL along answers as of all KL divergences
                aggregation=KL_MEAN if like and metric == "kl" else aggregation,
                quantizer=quantizer,
                method=first[quantizer].method,
                title=first[quantizer].title,
                precision=first[quantizer].precision,
                percent=is_percentage(metric),
                redundant=REDUNDANT.get(metric) in metrics,
                entries=entries,
            )
