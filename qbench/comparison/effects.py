"""Add effects with error bars to all rows of a comparison: Δ, damage, differences of damage.

The same over seeds. Accuracies at chance level are marked. Slow to import (scipy).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from qbench.comparison.outcomes import of_groups, read_columns
from qbench.comparison.rows import TESTED, Comparison, Row, status_of
from qbench.errors import ResultsError
from qbench.metrics import base_metric, variance_name
from qbench.records import ANSWERS
from qbench.statistics import (
    Column,
    Effect,
    Interval,
    Missing,
    Panel,
    adjust,
    effects,
    mean_score,
    over_seeds,
    score_interval,
    with_drawing_error,
)
from qbench.statistics.panel import Signs, with_shared_documents
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


def find_at_chance(
    comparison: Comparison, intervals: Mapping[int, Mapping[str, Interval]]
) -> frozenset[tuple[str, str, str]]:
    """Return (checkpoint, task, metric) of each accuracy of an unquantized model whose interval
    reaches down to chance; ``intervals``: by the row's index and checkpoint."""
    return frozenset(
        (checkpoint, row.task, row.metric)
        for index, row in enumerate(comparison.lines)
        if not row.quantized and base_metric(row.metric) in ACCURACIES
        for checkpoint, interval in intervals.get(index, {}).items()
        if interval.low <= comparison.chance.get(row.task, 0) > 0
    )


Name = tuple[str, str]  # cell, metric
EffectKey = tuple[int, str, str]  # index of the row, contrast, checkpoint or group
Columns = Mapping[str, Mapping[Name, Column]]  # task → (cell, metric) → outcomes
Trainings = Sequence[Sequence[Signs]]  # groups of trainings: the signed scores of each


def with_effects(comparison: Comparison, store: Store, columns: Columns) -> Comparison:
    """Add Δ, damages and differences-in-differences to every row, and the rows over seeds.

    ``columns``: what ``columns_by_task`` returns. p-values are adjusted over the folder within each
    contrast, tasks at chance left out.
    """
    comparison = dataclasses.replace(comparison, chance=chance_of_tasks(comparison, store))
    single = {checkpoint: (checkpoint,) for checkpoint in comparison.checkpoints}
    answers: dict[EffectKey, Effect | Missing] = {}
    intervals: dict[int, dict[str, Interval]] = defaultdict(dict)
    for (task, _, aggregation), contrasts in _by_metric(comparison, columns, single).items():
        signs = [signs for [[signs]] in contrasts.values()]
        computed = effects(columns[task], signs, aggregation)
        for key, names, answer in zip(contrasts, signs, computed, strict=True):
            index, contrast, checkpoint = key
            if contrast != "scores":
                scores = [columns[task][name] for name in names]
                drawn = [columns[task].get((cell, variance_name(m))) for cell, m in names]
                answers[key] = with_drawing_error(answer, scores, drawn, aggregation)
            elif (interval := score_interval(answer)) is not None:
                intervals[index][checkpoint] = interval
    comparison = dataclasses.replace(comparison, at_chance=find_at_chance(comparison, intervals))
    by_row = _by_row(comparison, answers)
    lines = tuple(
        dataclasses.replace(row, intervals=intervals[index], **by_row[index])
        for index, row in enumerate(comparison.lines)
    )
    seeds = _seed_rows(comparison, columns)
    return dataclasses.replace(comparison, lines=lines, seeds=seeds, tested=True)


def _seed_rows(comparison: Comparison, columns: Columns) -> tuple[Row, ...]:
    """Return the rows over seeds: one per row of the comparison that all groups of trainings have.
    ``columns``: see ``columns_by_task``."""
    groups = comparison.grid.replicates
    answers: dict[EffectKey, Effect | Missing] = {}
    means: dict[int, dict[str, float]] = defaultdict(dict)
    by_metric = _by_metric(comparison, columns, groups) if groups else {}
    for (task, _, aggregation), contrasts in by_metric.items():
        for (index, contrast, group), trainings in contrasts.items():
            names = dict.fromkeys(name for part in trainings for signs in part for name in signs)
            panel = Panel.of({name: columns[task][name] for name in names})
            answer = over_seeds(panel, trainings, aggregation)
            answers[index, contrast, group] = answer
            if contrast == "scores" and isinstance(answer, Effect):
                means[index][group] = mean_score(panel, list(names), aggregation)
    by_row = _by_row(comparison, answers)
    return tuple(
        dataclasses.replace(row, **by_row[index], means=means[index])
        for index, row in enumerate(comparison.lines)
        if index in means
    )


def _by_metric(
    comparison: Comparison, columns: Columns, groups: Mapping[str, Sequence[str]]
) -> dict[tuple[str, str, str], dict[EffectKey, Trainings]]:
    """Return (task, metric, aggregation) → the contrasts of the rows whose outcomes are known, as
    signed scores per training."""
    by_metric: dict[tuple[str, str, str], dict[EffectKey, Trainings]] = defaultdict(dict)
    for index, row in enumerate(comparison.lines):
        by_name = columns.get(row.task, {})
        for contrast, group, trainings in _contrasts(comparison, row, groups):
            if all(name in by_name for part in trainings for signs in part for name in signs):
                name = row.task, row.metric, row.aggregation
                by_metric[name][index, contrast, group] = trainings
    return by_metric


def _by_row(
    comparison: Comparison, effects: Mapping[EffectKey, Effect | Missing]
) -> Mapping[int, Mapping[str, dict]]:
    """Return row index → contrast → checkpoint → effect. p-values are adjusted over the folder
    within each contrast; those of the task ``ANSWERS`` separately."""
    answers: dict[int, dict[str, dict]] = defaultdict(lambda: defaultdict(dict))
    families: dict[tuple[str, bool], list[EffectKey]] = defaultdict(list)
    for (index, contrast, group), answer in effects.items():
        row = comparison.lines[index]
        if isinstance(answer, Missing):
            answers[index]["missing"][contrast, group] = answer
            continue
        answers[index][contrast][group] = answer
        guessed = _guessed(comparison, index, contrast, group)
        if contrast in TESTED and not comparison.redundant(row) and not guessed:
            families[contrast, row.task == ANSWERS].append((index, contrast, group))
    for family in families.values():
        adjusted = adjust([effects[name] for name in family])
        for (index, contrast, group), answer in zip(family, adjusted, strict=True):
            answers[index][contrast][group] = answer
    return answers


def _guessed(comparison: Comparison, index: int, contrast: str, group: str) -> bool:
    """Return whether an unquantized model of this damage contrast may be guessing. Then there is
    nothing to lose, and the row is left out of the family of tests."""
    row, base = comparison.lines[index], next(iter(comparison.groups))
    if contrast in ("deltas", "against"):
        return False
    groups = (group, base) if contrast == "differences" else (group,)
    members = [member for name in groups for member in comparison.groups.get(name, (name,))]
    return any((member, row.task, row.metric) in comparison.at_chance for member in members)


def columns_by_task(comparison: Comparison, store: Store) -> dict[str, dict[Name, Column]]:
    """Return the outcomes of every cell that has scores: task → (cell, metric) → column."""
    shown: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for row in comparison.lines:
        for entry in row.entries:
            if entry.status == "ok":
                shown[entry.cell] |= {(row.task, row.metric), (row.task, variance_name(row.metric))}
    columns: dict[str, dict[Name, Column]] = defaultdict(dict)
    for cell, record in comparison.records.items():
        if cell in shown:
            outcomes = read_columns(store, record, shown[cell])
            for (task, metric), column in (outcomes | of_groups(record, outcomes)).items():
                columns[task][cell, metric] = column
    return {task: with_shared_documents(of_task) for task, of_task in columns.items()}


def _contrasts(
    comparison: Comparison, row: Row, groups: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str, list[list[Signs]]]]:
    """Yield (contrast, group, signed scores per training); the first group is the baseline."""
    base, *others = groups
    unquantized = comparison.unquantized_of(row.quantizer)
    worse = -1 if row.higher_is_better else 1

    def signs(member: str, sign: int) -> dict[Name, int]:
        return {(f"{member}/{row.quantizer}", row.metric): sign}

    def damage(member: str, sign: int) -> dict[Name, int]:
        sign *= worse
        return signs(member, sign) | {(f"{member}/{unquantized}", row.metric): -sign}

    for group, members in groups.items():
        yield "scores", group, [[signs(member, 1) for member in members]]
    for group in others:
        yield "deltas", group, _against(groups[group], groups[base], signs)
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
                yield "differences", group, _against(members, groups[base], damage)
    if comparison.against not in (None, row.quantizer):
        for group, members in groups.items():
            yield "against", group, [[
                signs(member, worse) | {(f"{member}/{comparison.against}", row.metric): -worse}
                for member in members
            ]]  # fmt: skip


def _against(
    members: Sequence[str], base: Sequence[str], signs: Callable[[str, int], dict]
) -> list[list[Signs]]:
    """Return the contrasts of ``members`` minus ``base``, as signed scores: pair by pair if both
    have equally many trainings, else each group by itself."""
    if len(members) == len(base):
        return [
            [
                signs(member, 1) | signs(other, -1)
                for member, other in zip(members, base, strict=True)
            ]
        ]
    return [[signs(member, 1) for member in members], [signs(other, -1) for other in base]]
