"""Tables over seeds: each group of trainings' mean, Δ, damage and difference of damages."""

from __future__ import annotations

import csv
import io

from qbench.comparison.changes import training_notes
from qbench.comparison.lines import QUESTIONS, Comparison, SeedLine, redundant
from qbench.comparison.wording import (
    LEGEND,
    RATIOS_LEGEND,
    SEEDS_LEGEND,
    SHARE,
    SHARE_LEGEND,
    each_text,
    ends_text,
    mean_text,
    mostly_seeds,
    order_note,
    share_text,
    values_text,
)
from qbench.tables.layout import INTERVAL, Layout, line_names, precision_notes
from qbench.tables.table import Table
from qbench.text import MINUS, NO_VALUE, for_csv, number


def seed_layouts(comparison: Comparison, table: Table) -> list[Layout]:
    """The delta table over seeds, and below it that of damage where there is any; nothing where
    the grid has no replicates."""
    lines = [
        one
        for one in comparison.seeds
        if (one.line.method == table.method or not one.line.quantized)
        and not redundant(one.line, comparison.lines)
    ]
    if not lines:
        return []
    made = [_delta(comparison, table, lines)]
    quantized = [one for one in lines if one.line.quantized and one.damages]
    if quantized:
        made.append(_damage(comparison, table, quantized))
    return made


def _delta(comparison: Comparison, table: Table, lines: list[SeedLine]) -> Layout:
    base, *others = comparison.grid.replicates
    head = ["Task", "Metric", "Quantization"]
    for group in (base, *others):
        head += [group, f"{group}, each"]
    for group in others:
        name = "Δ" if len(others) == 1 else f"Δ {group}"
        head += [name, INTERVAL, f"{name}, each", SHARE]
    head.append("Documents")
    rows = []
    for one, names in zip(lines, _names(lines), strict=True):
        line = one.line
        cells = list(names)
        for group in (base, *others):
            mean = one.means.get(group)
            cells.append(number(mean, percent=line.percent))
            cells.append(values_text(one.values[group], percent=line.percent))
        for group in others:
            effect = one.deltas.get(group)
            cells += [
                mean_text(effect, percent=line.percent),
                ends_text(effect, percent=line.percent),
                each_text(effect, percent=line.percent),
                share_text(effect),
            ]
        rows.append((*cells, _documents([*one.deltas.values(), *one.scores.values()])))
    against = ", ".join(f"{group} {MINUS} {base}" for group in others)
    counts = ", ".join(f"{len(m)} of {g}" for g, m in comparison.grid.replicates.items())
    return Layout(
        title=f"{table.name} over seeds ({counts}){': Δ = ' + against if against else ''}",
        method=table.method,
        head=tuple(head),
        rows=tuple(rows),
        begins_task=_begins(lines),
        notes=(*_notes(comparison, lines, ("deltas",)), *training_notes(comparison), *table.notes),
        keys=(),
    )


def _damage(comparison: Comparison, table: Table, lines: list[SeedLine]) -> Layout:
    base, *others = comparison.grid.replicates
    head = ["Task", "Metric", "Quantization"]
    for group in (base, *others):
        head += [f"{group}’s damage", INTERVAL]
    for group in others:
        head += [f"{group}’s {MINUS} {base}’s", INTERVAL, "each", SHARE]
    head.append("Documents")
    rows = []
    for one, names in zip(lines, _names(lines), strict=True):
        cells = list(names)
        for group in (base, *others):
            effect = one.damages.get(group)
            cells += [
                mean_text(effect, percent=one.line.percent),
                ends_text(effect, percent=one.line.percent),
            ]
        for group in others:
            effect = one.differences.get(group)
            cells += [
                mean_text(effect, percent=one.line.percent),
                ends_text(effect, percent=one.line.percent),
            ]
            cells += [each_text(effect, percent=one.line.percent), share_text(effect)]
        rows.append((*cells, _documents([*one.damages.values(), *one.differences.values()])))
    claim = ", ".join(f"{group}’s {MINUS} {base}’s" for group in others)
    return Layout(
        title=f"{table.name} over seeds: damage{', and ' + claim if claim else ''}",
        method=table.method,
        head=tuple(head),
        rows=tuple(rows),
        begins_task=_begins(lines),
        notes=_notes(comparison, lines, ("damages", "differences")),
        keys=(),
    )


def _names(lines: list[SeedLine]) -> list[list[str]]:
    return [
        line_names(one.line, begins_task=begins)
        for one, begins in zip(lines, _begins(lines), strict=True)
    ]


def _begins(lines: list[SeedLine]) -> tuple[bool, ...]:
    tasks = [one.line.task for one in lines]
    return tuple(task != before for task, before in zip(tasks, [None, *tasks], strict=False))


def _notes(
    comparison: Comparison, lines: list[SeedLine], questions: tuple[str, ...]
) -> tuple[str, ...]:
    effects = [e for one in lines for name in questions for e in getattr(one, name).values()]
    notes = [LEGEND, SHARE_LEGEND]
    if any(mostly_seeds(effect) for effect in effects):
        many = sum(mostly_seeds(effect) for effect in effects)
        notes.append(f"{SEEDS_LEGEND} So it is in {many} of {len(effects)}.")
    if any(effect.kind == "log ratio" for effect in effects):
        notes.append(RATIOS_LEGEND)
    notes += precision_notes(one.line for one in lines)
    return (*notes, order_note(comparison))


def _documents(effects: list) -> str:
    return "/".join(sorted({str(effect.documents) for effect in effects})) or NO_VALUE


NAMES = {"scores": "score", "deltas": "delta", "damages": "damage", "differences": "did"}
COLUMNS = (
    *("task", "label", "metric", "direction", "quantizer", "method", "group", "question", "kind"),
    *("estimate", "stderr", "low", "high", "p", "p_holm", "p_bh", "of_seeds", "seeds"),
    *("documents", "each"),
)
FILE = "seeds.csv"


def seeds_csv(comparison: Comparison) -> str:
    """``kind`` says what the numbers are: a difference in the score's units, or a log ratio, of a
    score the logarithm itself. ``of_seeds``: share of the variance that comes of the seeds."""
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    for one in comparison.seeds:
        line = one.line
        for question in QUESTIONS:
            for group, effect in getattr(one, question).items():
                row = {
                    "task": line.task,
                    "label": line.label,
                    "metric": line.metric,
                    "direction": "up" if line.higher_is_better else "down",
                    "quantizer": line.quantizer,
                    "method": line.method,
                    "group": group,
                    "question": NAMES[question],
                    "each": " ".join(map(repr, effect.each)),
                }
                row |= {name: getattr(effect, name) for name in COLUMNS if name not in row}
                numbers = {"each": row.pop("each")}  # not escaped: none is foreign
                table.writerow({name: for_csv(value) for name, value in row.items()} | numbers)
    return text.getvalue()
