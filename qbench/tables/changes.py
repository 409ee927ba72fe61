"""What changed between two sets of results, and how far batches alone moved scores, in Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qbench.comparison.changes import Change, Changes, SeedChange
from qbench.comparison.wording import (
    RATIO_NOTE,
    SEED_NOTES,
    SEEDS_NOTE,
    effect_text,
    interval_text,
    metric_text,
)
from qbench.metrics import is_percentage
from qbench.tables.table import Table, from_rows, markdown
from qbench.text import NO_VALUE, number

if TYPE_CHECKING:
    pass


def changes_table(changes: Changes) -> str:
    """A line a score, those that are significant marked; then what cannot be compared."""
    notes = (
        "Intervals: Student's t on documents, bootstrap-t or score intervals where that fails.",
        RATIO_NOTE,
        "‡ significant at 5 % after Holm's correction over all lines, † after "
        "Benjamini–Hochberg's only; p is not corrected.",
        *changes.problems,
    )
    title = f"{changes.new} against {changes.old}"
    tables = from_rows(list(map(_row, changes.lines)), title=title, notes=notes, words=3)
    tables = tables or [Table(title=title, head=(), rows=(), notes=notes)]
    seeds = list(map(_seed_row, changes.seeds))
    tables += from_rows(
        seeds, title=f"{title}: over seeds", notes=(*SEED_NOTES, SEEDS_NOTE), words=3
    )
    return markdown(tables)


def _seed_row(one: SeedChange) -> dict[str, str]:
    score, effect, percent = one.score, one.effect, is_percentage(one.score.metric)
    return {
        "Over seeds": f"{one.group}/{one.quantizer}",
        "Task": score.label,
        "Metric": metric_text(score),
        "New − old, mean": effect_text(effect, percent=percent),
        "95 % interval": interval_text(effect, percent=percent),
        "p": f"{effect.p:.2g}",
        "Seeds × documents": f"{effect.seeds} × {effect.documents}",
    }


def _row(line: Change) -> dict[str, str]:
    effect, percent = line.effect, line.percent
    changed = number(line.new - line.old, percent=percent, signed=True)
    return {
        "Cell": line.told,
        "Task": line.label,
        "Metric": metric_text(line),
        "Old": number(line.old, percent=percent),
        "New": number(line.new, percent=percent),
        "New − old": changed + (effect.mark if effect else ""),
        "95 % interval": interval_text(effect, percent=percent),
        "p": f"{effect.p:.2g}" if effect else NO_VALUE,
        "Documents": str(line.documents)
        + (f" ({line.left_out} unpaired)" if line.left_out else ""),
    }
