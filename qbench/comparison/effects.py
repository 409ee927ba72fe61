"""Comparison → the same with intervals and tests on every line, from per-document outcomes."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from qbench.comparison.lines import Comparison, Line, redundant
from qbench.comparison.replicates import seed_lines
from qbench.comparison.statistics import (
    Column,
    Effect,
    Interval,
    Panel,
    Resampled,
    adjust,
    effect,
    needs_rounds,
    resample,
    score,
)
from qbench.store import Store

Name = tuple[str, str]  # cell, metric
QUESTIONS = ("deltas", "damages", "differences")


def with_effects(comparison: Comparison, store: Store, *, seed: int) -> Comparison:
    """Add Δ, damages and differences-in-differences to every line.

    p-values are adjusted over the grid within each question. Raises ResultsError where
    a record has lost its outcomes.
    """
    columns = read_columns(comparison, store)
    found: dict[tuple[int, str, str], Effect] = {}  # index of the line, question, checkpoint
    intervals: dict[int, dict[str, Interval]] = defaultdict(dict)
    for task in comparison.grid.tasks:
        panels = _Panels(columns.get(task, {}), seed=seed)
        for index, line in enumerate(comparison.lines):
            if line.task == task:
                for question, checkpoint, signs in _questions(comparison, line):
                    answer = panels.answer(signs, line.aggregation)
                    if answer is not None:
                        found[index, question, checkpoint] = answer
                for entry in line.entries:
                    interval = panels.score((entry.cell, line.metric), line.aggregation)
                    if interval is not None:
                        intervals[index][entry.checkpoint] = interval
    found |= _adjusted(comparison, found)
    answers: dict[tuple[int, str], dict[str, Effect]] = defaultdict(dict)
    for (index, question, checkpoint), answer in found.items():
        answers[index, question][checkpoint] = answer
    lines = tuple(
        dataclasses.replace(
            line, intervals=intervals[index], **{name: answers[index, name] for name in QUESTIONS}
        )
        for index, line in enumerate(comparison.lines)
    )
    found_lines = dataclasses.replace(comparison, lines=lines)
    return dataclasses.replace(found_lines, seeds=seed_lines(found_lines, columns))


def read_columns(comparison: Comparison, store: Store) -> dict[str, dict[Name, Column]]:
    """Outcomes of every cell that has scores: task → (cell, metric) → column."""
    columns: dict[str, dict[Name, Column]] = defaultdict(dict)
    shown = {(entry.cell, line.task, line.metric)
             for line in comparison.lines for entry in line.entries if entry.status == "ok"}  # fmt: skip  # noqa: E501
    cells = {cell for cell, _, _ in shown}
    for cell, record in comparison.records.items():
        if cell not in cells:
            continue
        rows = store.outcomes(record)
        found = rows.groupby(["task", "metric"], sort=False).indices
        parts = [rows[name].to_numpy() for name in ("document", "value", "weight")]
        for (task, metric), index in sorted(found.items(), key=lambda one: one[1][0]):
            if (cell, task, metric) in shown:
                columns[task][cell, metric] = Column.of(*(part[index] for part in parts))
    return columns


class _Panels:
    """Panels of one task. Cells that saw the same documents share one, and so its bootstrap."""

    def __init__(self, columns: Mapping[Name, Column], *, seed: int) -> None:
        self.columns = columns
        self.seed = seed
        self._panels: dict[tuple[Name, ...], Panel] = {}
        self._drawn: dict[tuple[Name, ...], Resampled] = {}
        first = next(iter(columns.values()), None)
        self._alike = tuple(
            name
            for name, column in columns.items()
            if np.array_equal(column.documents, first.documents)
        )

    def answer(self, signs: Mapping[Name, int], aggregation: str) -> Effect | None:
        if not all(name in self.columns for name in signs):
            return None
        names = self._alike if set(signs) <= set(self._alike) else tuple(signs)
        panel = self._panel(names)
        return effect(panel, signs, aggregation, self._rounds(names, aggregation))

    def score(self, name: Name, aggregation: str) -> Interval | None:
        if name not in self.columns:
            return None
        names = self._alike if name in self._alike else (name,)
        return score(self._panel(names), name, aggregation, self._rounds(names, aggregation))

    def _panel(self, names: tuple[Name, ...]) -> Panel:
        if names not in self._panels:
            self._panels[names] = Panel.of({name: self.columns[name] for name in names})
        return self._panels[names]

    def _rounds(self, names: tuple[Name, ...], aggregation: str) -> Resampled | None:
        panel = self._panel(names)
        if not needs_rounds(aggregation) or panel.documents < 2:
            return None
        if names not in self._drawn:
            self._drawn[names] = resample(panel, seed=self.seed)
        return self._drawn[names]


def _questions(comparison: Comparison, line: Line) -> Iterator[tuple[str, str, dict[Name, int]]]:
    """Question, checkpoint, and the signed columns whose sum answers it."""

    def column(checkpoint: str, quantizer: str) -> Name:
        return f"{checkpoint}/{quantizer}", line.metric

    base = comparison.baseline
    for other in comparison.others:
        yield (
            "deltas",
            other,
            {column(other, line.quantizer): 1, column(base, line.quantizer): -1},
        )
    unquantized = comparison.unquantized
    if not line.quantized or unquantized is None:
        return

    def comparable(checkpoint: str) -> bool:
        return comparison.same_weights(
            f"{checkpoint}/{line.quantizer}", f"{checkpoint}/{unquantized}"
        )

    for checkpoint in comparison.checkpoints:
        if not comparable(checkpoint):
            continue
        damage = {column(checkpoint, line.quantizer): 1, column(checkpoint, unquantized): -1}
        yield "damages", checkpoint, damage
        if checkpoint != base and comparable(base):
            against = {column(base, line.quantizer): -1, column(base, unquantized): 1}
            yield "differences", checkpoint, damage | against


def _adjusted(
    comparison: Comparison, found: Mapping[tuple[int, str, str], Effect]
) -> dict[tuple[int, str, str], Effect]:
    result = {}
    for question in QUESTIONS:
        family = [
            where
            for where in found
            if where[1] == question and not redundant(comparison.lines[where[0]], comparison.lines)
        ]
        answers = adjust([found[where] for where in family])
        result |= dict(zip(family, answers, strict=True))
    return result
