"""Build the rows of a comparison: every score of the manifest beside missing and failed ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from qbench.comparison.answers import AnswerDamage, answer_damage
from qbench.comparison.effects import columns_by_task, with_effects
from qbench.comparison.losses import kl_of, score_losses
from qbench.comparison.outcomes import flips_of
from qbench.comparison.rows import Comparison, Row, RowValue, status_of
from qbench.errors import ResultsError
from qbench.metrics import KL_MEAN, rank
from qbench.records import ANSWERS, GridCell, Record, RunManifest, Score
from qbench.store import Store

Scores = Mapping[tuple[str, str], Score]  # of a record, by task and metric


def compare(store: Store, *, statistics: bool = True, against: str | None = None) -> Comparison:
    """Compare the checkpoints of a results folder at every precision, and each quantized precision
    with the one that ``against`` names.

    ``statistics=False`` leaves intervals and tests out and reads no per-document outcomes.
    Raises ResultsError if the folder has no manifest or no precision ``against``, or if a record
    cannot be read.
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
        against=against,
    )
    if not statistics:
        return comparison
    columns = columns_by_task(comparison, store)
    comparison = with_effects(comparison, store, columns)
    kl = kl_of(comparison, store)
    primary = score_losses(comparison, columns, grid.primary) if grid.primary else kl
    comparison = replace(comparison, kl=kl, primary=primary, flips=flips_of(comparison, columns))
    return replace(comparison, answers=_answers(comparison, store))


def _answers(comparison: Comparison, store: Store) -> dict[str, AnswerDamage]:
    """Return cell → what quantization changed in its answers, for cells that have answers."""
    damages = {}
    for cell in comparison.grid.cells:
        record = comparison.records.get(cell.cell)
        base = f"{cell.checkpoint}/{comparison.unquantized_of(cell.quantizer)}"
        before = comparison.records.get(base)
        readable = cell.quantized and not comparison.no_damage(cell.cell)
        if readable and all(side and ANSWERS in side.files for side in (record, before)):
            damages[cell.cell] = answer_damage(store, record, before)
    return {name: damage for name, damage in damages.items() if damage is not None}


def _lines(grid: RunManifest, records: Mapping[str, Record]) -> Iterable[Row]:
    """Yield a row per task, precision and metric, unquantized precisions first in each task."""
    cells = {(cell.checkpoint, cell.quantizer): cell for cell in grid.cells}
    quantized = {cell.quantizer: cell.quantized for cell in grid.cells}
    # A precision without any record has not been run yet: ``problems`` names its cells.
    ran = {cell.quantizer for cell in grid.cells if cell.cell in records} or {*quantized}
    quantizers = sorted((q for q in grid.quantizers if q in ran), key=lambda q: quantized[q])
    scores = {name: record.by_name() for name, record in records.items()}
    groups = (group.group for record in records.values() for group in record.pooled_groups)
    for task in dict.fromkeys((*grid.tasks, *groups)):
        metrics = _metrics(task, scores.values())
        for quantizer in quantizers:
            row = [cells.get((checkpoint, quantizer)) for checkpoint in grid.checkpoints]
            first = next(cell for cell in row if cell is not None)
            for metric, like in metrics.items():
                yield Row(
                    task=task,
                    label=like.label if like else task,
                    metric=metric,
                    higher_is_better=like.higher_is_better if like else True,
                    aggregation=_aggregation(like),
                    quantizer=quantizer,
                    method=first.method,
                    title=first.title,
                    precision=first.precision,
                    entries=tuple(
                        _entry(checkpoint, quantizer, cell, records, scores, (task, metric))
                        for checkpoint, cell in zip(grid.checkpoints, row, strict=True)
                    ),
                )


def _aggregation(score: Score | None) -> str:
    """Return how documents are averaged into a score; of KL along answers the aggregation of KL."""
    if score is None:
        return ""
    return KL_MEAN if score.metric == "kl" else score.aggregation


def _metrics(task: str, scores: Iterable[Scores]) -> dict[str, Score | None]:
    """Return metric → a score that has it, for all metrics of ``task``, in the paper's order."""
    examples: dict[str, Score | None] = {}
    for of_one in scores:
        for score in of_one.values():
            if score.task == task:
                examples.setdefault(score.metric, score)
    if not examples:
        return {"—": None}
    return dict(sorted(examples.items(), key=lambda item: rank(item[0])))


def _entry(
    checkpoint: str,
    quantizer: str,
    cell: GridCell | None,
    records: Mapping[str, Record],
    scores: Mapping[str, Scores],
    name: tuple[str, str],
) -> RowValue:
    """Return the score ``name`` (task, metric) of one cell, or the reason why there is none."""
    task, metric = name
    record = records.get(cell.cell) if cell else None
    status, reason = status_of(record) if cell else ("missing", "not in the grid")
    score = None
    if record is not None and status == "ok":
        score = scores[cell.cell].get(name)
        if score is None and task in record.failed_tasks:
            status, reason = "failed", record.failed_tasks[task]
        elif score is None:
            status, reason = "missing", f"the record has no {metric} of {task}"
    return RowValue(
        checkpoint=checkpoint,
        quantizer=quantizer,
        status=status,
        key=cell.key if cell else "",
        value=score and score.value,
        stderr=score and score.stderr,
        documents=score and score.documents,
        reason=reason,
    )
