"""Effects with error bars over all comparisons of a grid: Δ, damage, differences of damage.

The same over seeds. Slow to import (scipy).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from qbench.comparison.changes import of_groups, read_columns
from qbench.comparison.lines import TESTED, Comparison, Line, redundant
from qbench.statistics import (
    Column,
    Effect,
    Interval,
    Panel,
    SeedEffect,
    adjust,
    effect,
    mean_score,
    needs_rounds,
    over_seeds,
    resample,
    score,
)
from qbench.statistics.panel import Floats
from qbench.statistics.seeds import Signs
from qbench.store import Store

Name = tuple[str, str]  # cell, metric
Asked = tuple[int, str, str]  # index of the line, question, checkpoint or group


def with_effects(comparison: Comparison, store: Store) -> Comparison:
    """Add Δ, damages and differences-in-differences to every line, and the lines over seeds.

    p-values are adjusted over the grid within each question. Raises ResultsError where
    a record has lost its outcomes.
    """
    columns = columns_by_task(comparison, store)
    alone = {checkpoint: (checkpoint,) for checkpoint in comparison.checkpoints}
    found: dict[Asked, Effect] = {}
    intervals: dict[int, dict[str, Interval]] = defaultdict(dict)
    for task in dict.fromkeys(line.task for line in comparison.lines):
        panels = _Panels(columns.get(task, {}))
        for index, line in enumerate(comparison.lines):
            if line.task == task:
                for question, checkpoint, [[signs]] in _questions(comparison, line, alone):
                    if (known := panels.of(signs, line.aggregation)) is None:
                        continue
                    panel, rounds = known
                    if question == "scores":
                        interval = score(panel, *signs, line.aggregation, rounds)
                        if interval is not None:
                            intervals[index][checkpoint] = interval
                    else:
                        answer = effect(panel, signs, line.aggregation, rounds)
                        if answer is not None:
                            found[index, question, checkpoint] = answer
    answers = _by_line(comparison, found)
    lines = tuple(
        dataclasses.replace(line, intervals=intervals[index], **answers[index])
        for index, line in enumerate(comparison.lines)
    )
    seeds = _seed_lines(comparison, columns)
    return dataclasses.replace(comparison, lines=lines, seeds=seeds, tested=True)


def _seed_lines(
    comparison: Comparison, columns: Mapping[str, Mapping[Name, Column]]
) -> tuple[Line, ...]:
    """A line for each of the comparison's that all groups have; ``columns`` as
    ``columns_by_task`` gives them."""
    groups = comparison.grid.replicates
    found: dict[Asked, SeedEffect] = {}
    means: dict[int, dict[str, float]] = defaultdict(dict)
    for index, line in enumerate(comparison.lines if groups else ()):
        known = columns.get(line.task, {})
        for question, group, asked in _questions(comparison, line, groups):
            names = {name: None for part in asked for signs in part for name in signs}
            if not all(name in known for name in names):
                continue
            panel = Panel.of({name: known[name] for name in names})
            answer = over_seeds(panel, asked, line.aggregation)
            if answer is not None:
                found[index, question, group] = answer
                if question == "scores":
                    means[index][group] = mean_score(panel, list(names), line.aggregation)
    answers = _by_line(comparison, found)
    return tuple(
        dataclasses.replace(line, **answers[index], means=means[index])
        for index, line in enumerate(comparison.lines)
        if index in means
    )


def _by_line(
    comparison: Comparison, found: Mapping[Asked, Effect | SeedEffect]
) -> Mapping[int, Mapping[str, dict[str, Effect | SeedEffect]]]:
    """By line and question, p-values adjusted over the grid within each question."""
    answers: dict[int, dict[str, dict]] = defaultdict(lambda: defaultdict(dict))
    for (index, question, group), answer in found.items():
        answers[index][question][group] = answer
    for tested in TESTED:
        family = [
            asked
            for asked in found
            if asked[1] == tested and not redundant(comparison.lines[asked[0]], comparison.lines)
        ]
        adjusted = adjust([found[asked] for asked in family])
        for (index, question, group), answer in zip(family, adjusted, strict=True):
            answers[index][question][group] = answer
    return answers


def columns_by_task(comparison: Comparison, store: Store) -> dict[str, dict[Name, Column]]:
    """Outcomes of every cell that has scores: task → (cell, metric) → column."""
    shown: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for line in comparison.lines:
        for entry in line.entries:
            if entry.status == "ok":
                shown[entry.cell].add((line.task, line.metric))
    columns: dict[str, dict[Name, Column]] = defaultdict(dict)
    for cell, record in comparison.records.items():
        if cell in shown:
            found = read_columns(store, record, shown[cell])
            for (task, metric), column in (found | of_groups(record, found)).items():
                columns[task][cell, metric] = column
    return columns


class _Panels:
    """Panels of one task. Cells that saw the same documents share one, and so its bootstrap."""

    def __init__(self, columns: Mapping[Name, Column]) -> None:
        self.columns = columns
        self._panels: dict[tuple[Name, ...], Panel] = {}
        self._drawn: dict[tuple[Name, ...], Floats] = {}
        first = next(iter(columns.values()), None)
        self._alike = tuple(
            name
            for name, column in columns.items()
            if np.array_equal(column.documents, first.documents)
        )

    def of(self, wanted: Collection[Name], aggregation: str) -> tuple[Panel, Floats | None] | None:
        """A panel that has these columns, with its bootstrap where one is needed; None where a
        column is not there."""
        if not all(name in self.columns for name in wanted):
            return None
        names = self._alike if set(wanted) <= set(self._alike) else tuple(wanted)
        if names not in self._panels:
            self._panels[names] = Panel.of({name: self.columns[name] for name in names})
        panel = self._panels[names]
        if not needs_rounds(aggregation) or panel.documents < 2:
            return panel, None
        if names not in self._drawn:
            self._drawn[names] = resample(panel)
        return panel, self._drawn[names]


def _questions(
    comparison: Comparison, line: Line, groups: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str, list[list[Signs]]]]:
    """Question, group, and the contrasts of its trainings; the first of ``groups`` is the
    baseline."""
    base, *others = groups
    whole = comparison.unquantized_of(line.quantizer)

    def signs(member: str, sign: int) -> dict[Name, int]:
        return {(f"{member}/{line.quantizer}", line.metric): sign}

    def damage(member: str, sign: int) -> dict[Name, int]:
        return signs(member, sign) | {(f"{member}/{whole}", line.metric): -sign}

    for group, members in groups.items():
        yield "scores", group, [[signs(member, 1) for member in members]]
    for group in others:
        yield "deltas", group, _against(groups[group], groups[base], signs)
    if not line.quantized or whole is None:
        return
    comparable = {
        group: all(
            comparison.same_weights(f"{member}/{line.quantizer}", f"{member}/{whole}")
            for member in members
        )
        for group, members in groups.items()
    }
    for group, members in groups.items():
        if comparable[group]:
            yield "damages", group, [[damage(member, 1) for member in members]]
            if group != base and comparable[base]:
                yield "differences", group, _against(members, groups[base], damage)


def _against(
    members: Sequence[str], base: Sequence[str], signs: Callable[[str, int], dict]
) -> list[list[Signs]]:
    """One group minus another: pair by pair where there are as many of both."""
    if len(members) == len(base):
        return [
            [signs(one, 1) | signs(other, -1) for one, other in zip(members, base, strict=True)]
        ]
    return [[signs(one, 1) for one in members], [signs(other, -1) for other in base]]
