"""Tables over seeds: each group of trainings' mean, Δ, damage and difference of damages."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from qbench.comparison.changes import training_notes
from qbench.comparison.lines import QUESTIONS, Comparison, SeedLine, redundant
from qbench.comparison.wording import (
    RATIOS_NOTE,
    SEED_NOTES,
    SEEDS_NOTE,
    SHARE,
    SHARE_NOTE,
    each_text,
    effect_text,
    interval_text,
    mostly_seeds,
    order_note,
    values_text,
)
from qbench.tables.scores import INTERVAL, NAMES, Part, line_names, precision_notes
from qbench.tables.table import Table, as_csv
from qbench.text import MINUS, NO_VALUE, number

if TYPE_CHECKING:
    from qbench.statistics import SeedEffect


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
        shown = {"percent": one.line.percent}
        cells = [*line_names(one.line)]
        for group in (base, *others):
            cells += [
                number(one.means.get(group), **shown),
                values_text(one.values[group], **shown),
            ]
        for group in others:
            cells += _texts(one.deltas.get(group), **shown)
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
        shown = {"percent": one.line.percent}
        cells = [*line_names(one.line)]
        for group in (base, *others):
            cells += _texts(one.damages.get(group), **shown)[:2]
        for group in others:
            cells += _texts(one.differences.get(group), **shown)
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


def _texts(effect: SeedEffect | None, *, percent: bool) -> list[str]:
    """An effect, its interval, that of each training, and the seeds' share of its variance."""
    share = NO_VALUE if effect is None else f"{100 * effect.of_seeds:.0f} %"
    texts = (text(effect, percent=percent) for text in (effect_text, interval_text, each_text))
    return [*texts, share]


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
OF_EFFECTS = ("kind", "p", "p_holm", "p_bh", "of_seeds", "seeds", "documents")
COLUMNS = (
    *("task", "label", "metric", "direction", "quantizer", "method", "group", "question", "kind"),
    *("estimate", "stderr", "low", "high", "p", "p_holm", "p_bh", "of_seeds", "seeds"),
    *("documents", "each"),
)
FILE = "seeds.csv"


def seeds_csv(comparison: Comparison) -> str:
    """``kind`` says what the numbers are: a difference in the score's units, or a log ratio, of a
    score the logarithm itself. ``of_seeds``: share of the variance that comes from the seeds."""
    rows = []
    for one in comparison.seeds:
        line = one.line
        for question in QUESTIONS:
            for group, effect in getattr(one, question).items():
                rows.append(
                    {
                        "task": line.task,
                        "label": line.label,
                        "metric": line.metric,
                        "direction": "up" if line.higher_is_better else "down",
                        "quantizer": line.quantizer,
                        "method": line.method,
                        "group": group,
                        "question": ANSWERS[question],
                        **asdict(effect.interval),
                        **{name: getattr(effect, name) for name in OF_EFFECTS},
                        "each": " ".join(map(repr, effect.each)),
                    }
                )
    return as_csv(rows, COLUMNS, numbers=("each",))
