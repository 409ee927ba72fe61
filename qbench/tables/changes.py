"""What changed between two sets of results, and how far batches alone moved scores, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable
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
from qbench.tables.table import Table, markdown
from qbench.text import MINUS, NO_VALUE, metric_title, number
from qbench.text import table as text_table

if TYPE_CHECKING:
    from qbench.evaluation.noise import Moved


SEEDS_HEAD = (
    *("Over seeds", "Task", "Metric", "New − old, mean", "95 % interval", "p"),
    "Seeds × documents",
)
HEAD = ("Cell", "Task", "Metric", "Old", "New", "New − old", "95 % interval", "p", "Documents")


def changes_table(changes: Changes) -> str:
    """A line a score, those that are significant marked; then what cannot be compared."""
    notes = (
        "Intervals: Student's t on documents, bootstrap-t or score intervals where that fails.",
        RATIO_NOTE,
        "‡ significant at 5 % after Holm's correction over all lines, † after "
        "Benjamini–Hochberg's only; p is not corrected.",
        *changes.problems,
    )
    title, rows = f"{changes.new} against {changes.old}", tuple(map(_texts, changes.lines))
    tables = [Table(title=title, head=HEAD, rows=rows, words=3, notes=notes)]
    if changes.seeds:
        tables.append(
            Table(
                title=f"{title}: over seeds",
                head=SEEDS_HEAD,
                rows=tuple(map(_seed_texts, changes.seeds)),
                words=3,
                notes=(*SEED_NOTES, SEEDS_NOTE),
            )
        )
    return markdown(tables)


def _seed_texts(one: SeedChange) -> tuple[str, ...]:
    score, percent = one.score, is_percentage(one.score.metric)
    return (
        f"{one.group}/{one.quantizer}",
        score.label,
        metric_text(score),
        effect_text(one.effect, percent=percent),
        interval_text(one.effect, percent=percent),
        f"{one.effect.p:.2g}",
        f"{one.effect.seeds} × {one.effect.documents}",
    )


def _texts(line: Change) -> tuple[str, ...]:
    effect = line.effect
    shown = {"percent": line.percent}
    return (
        line.told,
        line.label,
        metric_text(line),
        number(line.old, **shown),
        number(line.new, **shown),
        number(line.new - line.old, signed=True, **shown) + (effect.mark if effect else ""),
        interval_text(effect, **shown),
        f"{effect.p:.2g}" if effect else NO_VALUE,
        str(line.documents) + (f" ({line.left_out} unpaired)" if line.left_out else ""),
    )


NOISE_HEAD = ("Task", "Metric", "Batches", "Score", "Moved by", "Changed documents",
        "Largest change of a log-likelihood, nats", "Mean")  # fmt: skip


def noise_table(moved: Iterable[Moved]) -> str:
    """Markdown: one line a metric and variation; accuracies in per cent and points."""
    rows = []
    for entry in moved:
        percent = is_percentage(entry.metric)
        changed = entry.changed_documents
        rows.append(
            [
                entry.task,
                metric_title(entry.metric),
                entry.variation,
                number(entry.score, percent=percent),
                _signed((entry.score - entry.base_score) * (100 if percent else 1)),
                NO_VALUE if changed is None else f"{changed} of {entry.documents}",
                f"{entry.largest_log_likelihood:.2g}".replace("-", MINUS),
                f"{entry.mean_log_likelihood:.2g}".replace("-", MINUS),
            ]
        )
    return text_table(NOISE_HEAD, rows, align="lllrrrrr")


def _signed(value: float) -> str:
    """Two significant digits: a floor of 3e−8 is not 0."""
    return "0" if value == 0 else f"{value:+.2g}".replace("-", MINUS)
