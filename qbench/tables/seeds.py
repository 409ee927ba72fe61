"""Tables over seeds: each group of trainings' mean, Δ, damage and difference of damages."""

from __future__ import annotations

from qbench.comparison.changes import training_notes
from qbench.comparison.lines import QUESTIONS, Comparison, SeedLine, redundant
from qbench.comparison.wording import (
    RATIOS_NOTE,
    SEED_NOTES,
    SEEDS_NOTE,
    SHARE,
    SHARE_NOTE,
    each_text,
    ends_text,
    mean_text,
    mostly_seeds,
    order_note,
    share_text,
    values_text,
)
from qbench.tables.scores import INTERVAL, NAMES, Part, line_names, precision_notes
from qbench.tables.table import Table, as_csv
from qbench.text import MINUS, NO_VALUE, number


def seed_tables(part: Part) -> list[Table]:
    """The delta table over seeds, and below it that of damage where there is any; nothing where
    the grid has no replicates."""
    quantizers = {line.quantizer for line in part.lines}
    lines = [
        one
        for one in part.comparison.seeds
        if one.line.quantizer in quantizers and not redundant(one.line, part.comparison.lines)
    ]
    if not lines:
        return []
    quantized = [one for one in lines if one.line.quantized and one.damages]
    return [_delta(part, lines), *([_damage(part, quantized)] if quantized else [])]


def _delta(part: Part, lines: list[SeedLine]) -> Table:
    comparison = part.comparison
    base, *others = comparison.grid.replicates
    head = [*NAMES]
    for group in (base, *others):
        head += [group, f"{group}, each"]
    for group in others:
        name = "Δ" if len(others) == 1 else f"Δ {group}"
        head += [name, INTERVAL, f"{name}, each", SHARE]
    head.append("Documents")
    rows = []
    for one in lines:
        line = one.line
        cells = [*line_names(one.line)]
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
    return Table(
        title=f"{part.name} over seeds ({counts}){': Δ = ' + against if against else ''}",
        head=tuple(head),
        rows=tuple(rows),
        notes=(
            *_notes(comparison, lines, ("deltas",)),
            *training_notes(comparison),
            *part.problems,
        ),
        words=len(NAMES),
        grouped=True,
    )


def _damage(part: Part, lines: list[SeedLine]) -> Table:
    comparison = part.comparison
    base, *others = comparison.grid.replicates
    head = [*NAMES]
    for group in (base, *others):
        head += [f"{group}’s damage", INTERVAL]
    for group in others:
        head += [f"{group}’s {MINUS} {base}’s", INTERVAL, "each", SHARE]
    head.append("Documents")
    rows = []
    for one in lines:
        cells = [*line_names(one.line)]
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
    return Table(
        title=f"{part.name} over seeds: damage{', and ' + claim if claim else ''}",
        head=tuple(head),
        rows=tuple(rows),
        notes=_notes(comparison, lines, ("damages", "differences")),
        words=len(NAMES),
        grouped=True,
    )


def _notes(
    comparison: Comparison, lines: list[SeedLine], questions: tuple[str, ...]
) -> tuple[str, ...]:
    effects = [e for one in lines for name in questions for e in getattr(one, name).values()]
    notes = [*SEED_NOTES, SHARE_NOTE]
    if any(mostly_seeds(effect) for effect in effects):
        many = sum(mostly_seeds(effect) for effect in effects)
        notes.append(f"{SEEDS_NOTE} Here {many} of {len(effects)}.")
    if any(effect.kind == "log ratio" for effect in effects):
        notes.append(RATIOS_NOTE)
    notes += precision_notes(one.line for one in lines)
    return (*notes, order_note(comparison))


def _documents(effects: list) -> str:
    return "/".join(sorted({str(effect.documents) for effect in effects})) or NO_VALUE


ANSWERS = {"scores": "score", "deltas": "delta", "damages": "damage", "differences": "did"}
COLUMNS = (
    *("task", "label", "metric", "direction", "quantizer", "method", "group", "question", "kind"),
    *("estimate", "stderr", "low", "high", "p", "p_holm", "p_bh", "of_seeds", "seeds"),
    *("documents", "each"),
)
FILE = "seeds.csv"


def seeds_csv(comparison: Comparison) -> str:
    """``kind`` says what the numbers are: a difference in the score's units, or a log ratio, of a
    score the logarithm itself. ``of_seeds``: share of the variance that comes of the seeds."""
    rows = []
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
                    "question": ANSWERS[question],
                    "each": " ".join(map(repr, effect.each)),
                }
                rows.append(row | {n: getattr(effect, n) for n in COLUMNS if n not in row})
    return as_csv(rows, COLUMNS, numbers=("each",))
