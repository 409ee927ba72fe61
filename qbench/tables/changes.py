"""Render what changed between two sets of results, in Markdown."""

from __future__ import annotations

from qbench.comparison.changes import Change, Changes
from qbench.comparison.wording import (
    NO_INTERVAL,
    RATIO_NOTE,
    effect_text,
    interval_text,
    metric_text,
)
from qbench.tables.table import Table, from_rows, markdown
from qbench.text import NO_VALUE, group_by_reason, metric_title, number


def changes_table(changes: Changes) -> str:
    """Return a row per score, significant ones marked; then what cannot be compared."""
    notes = (
        "Loss: what the new result loses against the old one, paired by document; above 0, or "
        "above × 1, it is worse.",
        RATIO_NOTE,
        "‡ significant at 5 % after Holm's correction over all rows; p is not corrected.",
        *(
            f"{NO_INTERVAL} {line}."
            for line in group_by_reason(
                (f"{one.told} {one.label} {metric_title(one.metric)}", one.effect.reason)
                for one in changes.lines
                if not hasattr(one.effect, "interval")
            )
        ),
        *changes.problems,
    )
    title = f"{changes.new} against {changes.old}"
    tables = from_rows(list(map(_row, changes.lines)), title=title, notes=notes, words=3)
    tables = tables or [Table(title=title, head=(), rows=(), notes=notes)]
    return markdown(tables)


def _row(line: Change) -> dict[str, str]:
    effect, percent = line.effect, line.percent
    return {
        "Cell": line.told,
        "Task": line.label,
        "Metric": metric_text(line),
        "Old": number(line.old, percent=percent),
        "New": number(line.new, percent=percent),
        "Loss": effect_text(effect, percent=percent),
        "95 % interval": interval_text(effect, percent=percent),
        "p": f"{effect.p:.2g}" if hasattr(effect, "p") else NO_VALUE,
        "Documents": str(line.documents)
        + (f" ({line.left_out} unpaired)" if line.left_out else ""),
    }
