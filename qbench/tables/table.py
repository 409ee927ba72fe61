"""The delta table as data: one a method, laid out as the paper's Tables 8–13."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from qbench.comparison.lines import Comparison, Line, redundant
from qbench.text import MINUS, together


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of a table, and whether it begins a task."""

    line: Line
    begins_task: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One method's table. ``notes`` stand below it: failures, and what was left out."""

    method: str
    name: str  # of the method
    title: str
    checkpoints: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def delta(comparison: Comparison) -> list[Table]:
    """One table a quantization method; each has the unquantized rows too. What is wrong with a
    cell stands below the first table that has it."""
    problems, tables = comparison.problems(), []
    for method in comparison.methods:
        tables.append(_table(comparison, method, problems))
        shown = {line.quantizer for line in _lines(comparison, method)}
        problems = [one for one in problems if _quantizer_of(one) not in shown]
    return tables


def _lines(comparison: Comparison, method: str) -> list[Line]:
    return [line for line in comparison.lines if line.method == method or not line.quantized]


def _table(comparison: Comparison, method: str, problems: list[str]) -> Table:
    lines = _lines(comparison, method)
    shown = [line for line in lines if not redundant(line, lines)]
    rows = []
    for _, group in groupby(shown, key=lambda line: line.task):
        for number, line in enumerate(group):
            rows.append(Row(line=line, begins_task=number == 0))
    left_out = dict.fromkeys(
        f"{line.task} {line.metric}" for line in lines if redundant(line, lines)
    )
    quantizers = {line.quantizer for line in lines}
    notes = together(note for note in problems if _quantizer_of(note) in quantizers)
    if comparison.grid.skipped:
        notes.append(f"Left out, having no data: {', '.join(comparison.grid.skipped)}.")
    if left_out:
        notes.append(f"Only in the CSV, being functions of word_perplexity: {', '.join(left_out)}.")
    name = next(line.title for line in lines if line.method == method)
    against = ", ".join(f"{other} {MINUS} {comparison.baseline}" for other in comparison.others)
    return Table(
        method=method,
        name=name,
        title=f"{name}: Δ = {against}" if against else name,
        checkpoints=comparison.checkpoints,
        rows=tuple(rows),
        notes=tuple(notes),
    )


def pairs(table: Table) -> list[Table]:
    """A table for the baseline and each other checkpoint. A note stands below the first of them
    that shows what it is about."""
    made, notes = [], list(table.notes)
    for other in table.checkpoints[1:]:
        own = [note for note in notes if _is_about(note, table.checkpoints, other)]
        made.append(replace(_pair_of(table, other), notes=tuple(own)))
        notes = [note for note in notes if note not in own]
    return made


def _is_about(note: str, checkpoints: tuple[str, ...], other: str) -> bool:
    """Whether a note is about ``other``, the first checkpoint, or none of them."""
    named = [name for name in checkpoints if note.startswith(f"{name}/")]
    return not named or named[0] in (checkpoints[0], other)


def _pair_of(table: Table, other: str) -> Table:
    base = table.checkpoints[0]
    pair = (base, other)
    rows = tuple(
        replace(row, line=replace(row.line, entries=tuple(map(row.line.entry, pair))))
        for row in table.rows
    )
    return replace(
        table,
        title=f"{table.name}: Δ = {other} {MINUS} {base}",
        checkpoints=pair,
        rows=rows,
    )


def _quantizer_of(problem: str) -> str:
    return problem.split(":", 1)[0].rsplit("/", 1)[-1]
