"""Add effects with error bars to all rows of a comparison: Δ, damage, differences of damage.

The same over seeds. Accuracies at chance level are marked. Slow to import (scipy).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from numpy.typing import NDArray

from qbench.comparison.outcomes import of_groups, read_columns
from qbench.comparison.rows import TESTED, Comparison, Row, status_of
from qbench.errors import ResultsError
from qbench.metrics import base_metric, variance_name
from qbench.records import ANSWERS
from qbench.statistics import (
    Column,
    Effect,
    Missing,
    Trainings,
    adjust,
    drawing_error,
    effects,
    over_trainings,
)
from qbench.statistics.panel import Signs
from qbench.store import Store

ACCURACIES = ("acc", "acc_norm")


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


Name = tuple[str, str]  # cell, metric
EffectKey = tuple[int, str, str]  # index of the row, contrast, checkpoint or group
Columns = Mapping[str, Mapping[Name, Column]]  # task → (cell, metric) → outcomes


def with_effects(comparison: Comparison, store: Store, columns: Columns) -> Comparison:
    """Return ``comparison`` with Δ, damages and differences-in-differences in every row, and with
    the rows over seeds in which a group of trainings has an interval of its score.

    ``columns``: what ``columns_by_task`` returns. p-values are adjusted over the folder within each
    contrast, tasks at chance left out: accuracies of an unquantized model whose interval reaches
    down to chance.
    """
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
    comparison = dataclasses.replace(comparison, chance=chance, at_chance=at_chance)
    lines, seeds = _rows(comparison, answers), ()
    if groups:
        seeds = _rows(comparison, _effects(comparison, columns, groups, seeds=True))
        seeds = tuple(row for row in seeds if row.of("scores"))
    return dataclasses.replace(comparison, lines=lines, seeds=seeds, tested=True)


def _effects(
    comparison: Comparison, columns: Columns, groups: Mapping[str, Sequence[str]], *,
    seeds: bool = False,
) -> dict[EffectKey, Effect | Missing]:  # fmt: skip
    """Return the effects of all contrasts whose outcomes there are: of single checkpoints with
    their errors from drawing answers, or with ``seeds`` over the trainings of each group."""
    by_metric: dict[tuple[str, str, str], dict[EffectKey, Trainings]] = defaultdict(dict)
    for index, row in enumerate(comparison.lines):
        by_name = columns.get(row.task, {})
        for contrast, group, trainings in _contrasts(comparison, row, groups):
            if all(name in by_name for part in trainings for signs in part for name in signs):
                name = row.task, row.metric, row.aggregation
                by_metric[name][index, contrast, group] = trainings
    answers: dict[EffectKey, Effect | Missing] = {}
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
                error = drawing_error(scores, drawn, aggregation)
                answer = dataclasses.replace(answer, drawn=error)
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
        answers |= zip(keys, adjust([answers[key] for key in keys]), strict=True)
    by_row: dict[int, dict[tuple[str, str], Effect | Missing]] = defaultdict(dict)
    for (index, contrast, group), answer in answers.items():
        by_row[index][contrast, group] = answer
    return tuple(dataclasses.replace(row, effects=by_row[index])
                 for index, row in enumerate(comparison.lines))  # fmt: skip


def columns_by_task(comparison: Comparison, store: Store) -> dict[str, dict[Name, Column]]:
    """Return the outcomes of every cell that has scores: task → (cell, metric) → column."""
    shown: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for row in comparison.lines:
        for entry in row.entries.values():
            if entry.status == "ok":
                shown[entry.cell] |= {(row.task, row.metric), (row.task, variance_name(row.metric))}
    columns: dict[str, dict[Name, Column]] = defaultdict(dict)
    arrays: dict[bytes, NDArray] = {}  # of documents, one for all cells that have the same
    for cell, record in comparison.records.items():
        if cell in shown:
            outcomes = read_columns(store, record, shown[cell])
            for (task, metric), column in (outcomes | of_groups(record, outcomes)).items():
                documents = arrays.setdefault(column.documents.tobytes(), column.documents)
                columns[task][cell, metric] = dataclasses.replace(column, documents=documents)
    return columns


def _contrasts(
    comparison: Comparison, row: Row, groups: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str, list[list[Signs]]]]:
    """Yield (contrast, group, signed scores per training); the first group is the baseline."""
    base, *others = groups
    unquantized = comparison.unquantized_of[row.quantizer]
    worse = -1 if row.higher_is_better else 1

    def signs(member: str, sign: int) -> dict[Name, int]:
        return {(f"{member}/{row.quantizer}", row.metric): sign}

    def damage(member: str, sign: int) -> dict[Name, int]:
        sign *= worse
        return signs(member, sign) | {(f"{member}/{unquantized}", row.metric): -sign}

    for group, members in groups.items():
        yield "scores", group, [[signs(member, 1) for member in members]]
    for group in others:
        yield "deltas", group, minus(groups[group], groups[base], signs)
    if not row.quantized:
        return
    comparable = {
        group: not any(comparison.no_damage(f"{member}/{row.quantizer}") for member in members)
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


def minus(
    members: Sequence[str], base: Sequence[str], signs: Callable[[str, int], Signs]
) -> Trainings:
    """Return the contrasts of ``members`` minus ``base``, as signed scores: ``[[member − base,
    …]]``, pair by pair, if both have equally many trainings, else ``[members, −base]``, each group
    by itself. ``signs`` gives the signed scores of a checkpoint, times a sign."""
    ours, theirs = [signs(name, 1) for name in members], [signs(name, -1) for name in base]
    if len(ours) != len(theirs):
        return [ours, theirs]
    return [[our | their for our, their in zip(ours, theirs, strict=True)]]
