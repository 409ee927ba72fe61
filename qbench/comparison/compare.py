"""Compare the results of a folder: read every score of the manifest and the outcomes of documents,
add effects with error bars (Δ, damage, differences of damage, the same over seeds), and count the
answers that quantization changed. Slow to import (scipy)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, product

import numpy as np

from qbench.comparison.answers import answer_damage
from qbench.comparison.losses import kl_of, minus, score_losses
from qbench.comparison.rows import TESTED, Comparison, Row, RowValue, status_of
from qbench.errors import ResultsError
from qbench.metrics import (
    KL_MEAN,
    REDUNDANT,
    VARIANCE,
    base_metric,
    is_percentage,
    rank,
    variance_name,
)
from qbench.records import ANSWERS, Flips, Record, RunManifest, Score
from qbench.statistics import (
    TESTABLE,
    Column,
    Effect,
    Missing,
    Trainings,
    adjust,
    drawing_error,
    effects,
    joined,
    over_trainings,
    untestable,
)
from qbench.statistics.panel import Signs, on_shared_documents
from qbench.store import Store
from qbench.text import NO_VALUE

Name = tuple[str, str]  # task, metric
CellMetric = tuple[str, str]  # cell, metric
ACCURACIES = ("acc", "acc_norm")
EffectKey = tuple[int, str, str]  # index of the row, contrast, checkpoint or group
Columns = Mapping[str, Mapping[CellMetric, Column]]  # task → (cell, metric) → outcomes
ByTask = Mapping[str, Mapping[str, Flips]]  # task → metric → its flips


def compare(store: Store, *, statistics: bool = True, against: str | None = None) -> Comparison:
    """Compare the checkpoints of a results folder at every precision, and each quantized precision
    with the one that ``against`` names (None: with none). ``statistics=False`` leaves intervals and
    tests out and reads no per-document outcomes. Raises ResultsError without a manifest or the
    precision ``against``, and for damaged records."""
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
    with ThreadPoolExecutor(1) as thread:  # long arrays, beside the many short ones of effects
        reading = thread.submit(kl_of, comparison, store)
        columns = columns_by_task(comparison, store)
        comparison = with_effects(comparison, store, columns)
    kl = reading.result()
    primary = score_losses(comparison, columns, grid.primary) if grid.primary else kl
    comparison = replace(comparison, kl=kl, primary=primary, flips=flips_of(comparison, columns))
    answers = {}
    for cell in grid.cells:
        if not cell.quantized or comparison.no_damage(cell.cell):
            continue
        base = f"{cell.checkpoint}/{comparison.unquantized_of[cell.quantizer]}"
        pair = records[cell.cell], records[base]
        if all(ANSWERS in each.files for each in pair) and (damage := answer_damage(store, *pair)):
            answers[cell.cell] = damage
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
                record = records.get(name)
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


# --- outcomes of documents


def of_groups(record: Record, columns: Mapping[Name, Column]) -> dict[Name, Column]:
    """Return (group, metric) → outcomes of groups such as mmlu: all documents of their tasks.
    Groups are left out if ``columns`` lacks one of their tasks."""
    return {
        (group.group, group.metric): joined(
            {task: columns[task, group.metric] for task in group.tasks}
        )
        for group in record.pooled_groups
        if all((task, group.metric) in columns for task in group.tasks)
    }


def read_columns(
    store: Store, record: Record, names: Collection[Name] | None = None, decimals: int | None = None
) -> dict[Name, Column]:
    """Return (task, metric) → outcomes of a record, of the scores ``names`` only (None: all), in
    their order in the file; values rounded to ``decimals`` (None: as stored)."""
    columns = {}
    for name, (documents, values, weights) in store.outcome_arrays(record).items():
        if names is None or name in names:
            if decimals is not None:
                values = rounded(values, name[1], decimals)
            columns[name] = Column(documents=documents, values=values, weights=weights)
    return columns


def rounded(values: np.ndarray, metric: str, decimals: int) -> np.ndarray:
    """Return outcomes of ``metric`` rounded to ``decimals``; KL and variances to four more."""
    fine = metric == "kl" or metric.endswith(VARIANCE)
    return values.astype(float).round(decimals + 4 * fine)


# --- effects with error bars


def chance_of_tasks(comparison: Comparison, store: Store) -> dict[str, float]:
    """Return task → accuracy of guessing: the mean of 1 / choices over its documents, 0 without
    choices. Tasks whose responses cannot be read are left out."""
    chances: dict[str, float] = {}
    for record in comparison.records.values():
        tasks = {score.task for score in record.scores} - chances.keys()
        if not tasks or status_of(record)[0] != "ok" or "responses" not in record.files:
            continue
        try:
            responses = store.responses(record)
        except ResultsError:  # archives may leave them out; the viewer then says so
            continue
        choices = responses.groupby(["task", "document"])["request"].nunique()
        for task, counts in choices.groupby(level="task"):
            guessed = float((1 / counts).mean()) if (counts > 1).all() else 0.0
            chances.setdefault(str(task), guessed)
    return chances


def with_effects(comparison: Comparison, store: Store, columns: Columns) -> Comparison:
    """Return ``comparison`` with Δ, damages and differences-in-differences in every row, and with
    the rows over seeds in which a group of trainings has an interval of its score. ``columns``:
    what ``columns_by_task`` returns. p-values are adjusted over the folder within each contrast,
    without accuracies of an unquantized model whose interval reaches chance."""
    chance, groups = chance_of_tasks(comparison, store), comparison.grid.replicates
    single = {checkpoint: (checkpoint,) for checkpoint in comparison.grid.checkpoints}
    answers = _effects(comparison, columns, single)
    rows = [comparison.lines[index] for index, _, _ in answers]
    at_chance = frozenset(
        (checkpoint, row.task, row.metric)
        for row, ((_, contrast, checkpoint), answer) in zip(rows, answers.items(), strict=True)
        if contrast == "scores" and not row.quantized and base_metric(row.metric) in ACCURACIES
        if isinstance(answer, Effect) and answer.low <= chance.get(row.task, 0) > 0
    )
    comparison = replace(comparison, chance=chance, at_chance=at_chance)
    lines, seeds = _rows(comparison, answers), ()
    if groups:
        seeds = _rows(comparison, _effects(comparison, columns, groups, seeds=True))
        seeds = tuple(row for row in seeds if row.of("scores"))
    return replace(comparison, lines=lines, seeds=seeds, tested=True)


def _effects(
    comparison: Comparison, columns: Columns, groups: Mapping[str, Sequence[str]], *,
    seeds: bool = False,
) -> dict[EffectKey, Effect | Missing]:  # fmt: skip
    """Return the effects of all contrasts whose outcomes there are: of single checkpoints with
    their errors from drawing answers, or with ``seeds`` over the trainings of each group. Damages
    in scores of all documents at once, such as BLEU, which have no outcomes, are ``Missing``."""
    by_metric: dict[tuple[str, str, str], dict[EffectKey, Trainings]] = defaultdict(dict)
    answers: dict[EffectKey, Effect | Missing] = {}
    damaged = {cell.cell for cell in comparison.grid.cells if not comparison.no_damage(cell.cell)}
    for index, row in enumerate(comparison.lines):
        by_name = columns.get(row.task, {})
        for contrast, group, trainings in _contrasts(comparison, row, groups, damaged):
            names = [name for part in trainings for signs in part for name in signs]
            if all(name in by_name for name in names):
                name = row.task, row.metric, row.aggregation
                by_metric[name][index, contrast, group] = trainings
            elif (
                contrast == "damages" and not seeds and row.aggregation not in ("", *TESTABLE)
                and all((row.task, m) in comparison.records[cell].by_name() for cell, m in names)
            ):  # fmt: skip
                answers[index, contrast, group] = untestable(row.aggregation)
    for (task, _, aggregation), contrasts in by_metric.items():
        if seeds:
            for key, trainings in contrasts.items():
                answers[key] = over_trainings(columns[task], trainings, aggregation)
            continue
        signs = [signs for [[signs]] in contrasts.values()]
        made = effects(columns[task], signs, aggregation)
        for key, names, answer in zip(contrasts, signs, made, strict=True):
            drawn = [columns[task].get((cell, variance_name(metric))) for cell, metric in names]
            if key[1] in TESTED and isinstance(answer, Effect) and any(drawn):
                scores = [columns[task][name] for name in names]
                answer.drawn = drawing_error(scores, drawn, aggregation)
            answers[key] = answer
    return answers


def _rows(comparison: Comparison, answers: dict[EffectKey, Effect | Missing]) -> tuple[Row, ...]:
    """Return the rows with their effects, p-values adjusted over the folder within each contrast;
    those of the task ``ANSWERS`` separately."""
    families: dict[tuple[str, bool], list[EffectKey]] = defaultdict(list)
    base = next(iter(comparison.groups))
    for (index, contrast, group), answer in answers.items():
        row = comparison.lines[index]
        if not isinstance(answer, Effect) or contrast not in TESTED or row.redundant:
            continue
        # If an unquantized model may be guessing there is nothing to lose: no test in the family.
        unlike = {"damages": (group,), "differences": (group, base)}.get(contrast, ())
        members = [member for name in unlike for member in comparison.groups.get(name, (name,))]
        if not any((name, row.task, row.metric) in comparison.at_chance for name in members):
            families[contrast, row.task == ANSWERS].append((index, contrast, group))
    for keys in families.values():
        adjust([answers[key] for key in keys])
    by_row: dict[int, dict[tuple[str, str], Effect | Missing]] = defaultdict(dict)
    for (index, contrast, group), answer in answers.items():
        by_row[index][contrast, group] = answer
    return tuple(replace(row, effects=by_row[index])
                 for index, row in enumerate(comparison.lines))  # fmt: skip


def columns_by_task(comparison: Comparison, store: Store) -> dict[str, dict[CellMetric, Column]]:
    """Return the outcomes of every cell that has scores: task → (cell, metric) → column."""
    shown: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for row in comparison.lines:
        for entry in row.entries.values():
            if entry.status == "ok":
                shown[entry.cell] |= {(row.task, row.metric), (row.task, variance_name(row.metric))}
    columns: dict[str, dict[CellMetric, Column]] = defaultdict(dict)
    for cell, record in comparison.records.items():
        if cell in shown:
            outcomes = read_columns(store, record, shown[cell])
            for (task, metric), column in (outcomes | of_groups(record, outcomes)).items():
                columns[task][cell, metric] = column
    return columns


def _contrasts(
    comparison: Comparison, row: Row, groups: Mapping[str, Sequence[str]], damaged: Collection[str]
) -> Iterator[tuple[str, str, list[list[Signs]]]]:
    """Yield (contrast, group, signed scores per training); the first group is the baseline.
    ``damaged``: the cells that may have damage."""
    base, *others = groups
    unquantized = comparison.unquantized_of[row.quantizer]
    worse = -1 if row.higher_is_better else 1

    def signs(member: str, sign: int) -> dict[CellMetric, int]:
        return {(f"{member}/{row.quantizer}", row.metric): sign}

    def damage(member: str, sign: int) -> dict[CellMetric, int]:
        sign *= worse
        return signs(member, sign) | {(f"{member}/{unquantized}", row.metric): -sign}

    for group, members in groups.items():
        yield "scores", group, [[signs(member, 1) for member in members]]
    for group in others:
        yield "deltas", group, minus(groups[group], groups[base], signs)
    if not row.quantized:
        return
    comparable = {
        group: all(f"{member}/{row.quantizer}" in damaged for member in members)
        for group, members in groups.items()
    }
    for group, members in groups.items():
        if comparable[group]:
            yield "damages", group, [[damage(member, 1) for member in members]]
            if group != base and comparable[base]:
                yield "differences", group, minus(members, groups[base], damage)
    if comparison.against not in (None, row.quantizer):
        for group, members in groups.items():
            yield "against", group, [[
                signs(member, worse) | {(f"{member}/{comparison.against}", row.metric): -worse}
                for member in members
            ]]  # fmt: skip


# --- answers that quantization changed


def flips_of(
    comparison: Comparison, columns: Mapping[str, Mapping[tuple[str, str], Column]]
) -> dict[str, ByTask]:
    """Return cell → task → metric → flips, of every quantized cell against the unquantized cell of
    its checkpoint; cells without scores, or without such a cell, are left out. ``columns``: the
    outcomes by task, then by cell and metric."""
    by_cell: dict[str, dict[Name, Column]] = defaultdict(dict)
    for task in comparison.grid.tasks:  # groups have sums of theirs
        for (cell, metric), column in columns.get(task, {}).items():
            by_cell[cell][task, metric] = column
    names = {cell.key: cell.cell for cell in comparison.grid.cells}
    flips: dict[str, ByTask] = {}
    for cell in comparison.grid.cells:
        record = comparison.records.get(cell.cell)
        if not cell.quantized or status_of(record)[0] != "ok":
            continue
        base = names.get(record.key_parts.get("damage against"))  # what the run measured against
        if base is None and not comparison.no_damage(cell.cell):
            base = f"{cell.checkpoint}/{comparison.unquantized_of[cell.quantizer]}"
        if base is None or status_of(comparison.records.get(base))[0] != "ok":
            continue
        by_task = count_flips(by_cell[base], by_cell[cell.cell])
        flips[cell.cell] = by_task
        for group in record.groups:  # sums over the tasks, if all of them have flips
            every = [by_task.get(task, {}).get(group.metric) for task in group.tasks]
            if None not in every:
                sums = {n: sum(getattr(each, n) for each in every) for n in Flips.model_fields}
                by_task.setdefault(group.group, {})[group.metric] = Flips(**sums)
    return flips


def cell_flips(store: Store, record: Record) -> ByTask:
    """Return task → metric → flips of one record against the unquantized cell that its key names;
    an empty mapping without such a cell or its outcomes."""
    base = record.key_parts.get("damage against")
    cells = store.manifest().cells if base and store.has_manifest() else ()
    try:
        before = next((store.get(cell) for cell in cells if cell.key == base), None)
        if before is None:
            return {}
        columns = read_columns(store, record)
        listed = [(score.task, score.metric) for score in record.scores]  # in this order
        columns = {name: columns[name] for name in listed if name in columns}
        return count_flips(read_columns(store, before), columns)
    except ResultsError:
        return {}


def count_flips(
    base: Mapping[Name, Column], quantized: Mapping[Name, Column]
) -> dict[str, dict[str, Flips]]:
    """Return, by task and metric, how many of the documents that both have quantization made wrong
    and how many right. Metrics that are in one only are left out, and those whose documents are
    neither right nor wrong: only values 0 and 1, of weight 1, are."""
    flips: dict[str, dict[str, Flips]] = {}
    for (task, metric), after in quantized.items():
        if (before := base.get((task, metric))) is None:
            continue
        both = on_shared_documents((before, after))
        right = [column.values.astype(bool) for column in both]
        binary = (
            (column.weights == 1).all() and (column.values == each).all()
            for column, each in zip(both, right, strict=True)
        )
        if not (len(right[0]) and all(binary)):
            continue
        flips.setdefault(task, {})[metric] = Flips(
            documents=len(right[0]),
            right_to_wrong=np.count_nonzero(right[0] > right[1]),
            wrong_to_right=np.count_nonzero(right[0] < right[1]),
        )
    return flips
