"""Render what changed between two results, cells or precisions."""

from __future__ import annotations

from qbench.comparison.changes import Change, Changes
from qbench.comparison.rows import Comparison
from qbench.comparison.wording import (
    NO_INTERVAL,
    RATIO_NOTE,
    effect_text,
    interval_text,
    metric_text,
)
from qbench.tables.notes import ratio_notes
from qbench.tables.table import Table, from_rows, markdown
from qbench.text import NO_VALUE, group_by_reason, metric_title, number


def changes_table(changes: Changes) -> str:
    """Return a row per score, significant ones marked; then what cannot be compared; Markdown."""
    notes = (
        "Loss: what the new result loses against the old one, paired by document; above 0, or "
        "above × 1, it is worse.",
        RATIO_NOTE,
        "‡ significant at 5 % after Holm's correction over all rows; p is not corrected.",
        *(
            f"{NO_INTERVAL} {line}."
            for line in group_by_reason(
                (
                    f"{each.cell_text} {each.label} {metric_title(each.metric)}",
                    each.effect.reason,
                )
                for each in changes.lines
                if not hasattr(each.effect, "interval")
            )
        ),
        *changes.problems,
    )
    rows = []
    for change in changes.lines:
        unpaired = f" ({change.left_out} unpaired)" if change.left_out else ""
        rows.append(
            {
                "Cell": change.cell_text,
                **_names(change),
                "Old": number(change.old, percent=change.percent),
                "New": number(change.new, percent=change.percent),
                **_loss(change),
                "p": _p_text(change, "p"),
                "Documents": f"{change.documents}{unpaired}",
            }
        )
    title = f"{changes.new} against {changes.old}"
    tables = from_rows(rows, title=title, notes=notes, words=3)
    return markdown(tables or [Table(title=title, head=(), rows=(), notes=notes)])


def pair_tables(comparison: Comparison) -> list[Table]:
    """Return one checkpoint's quantized precisions among themselves, if any pair differs
    significantly; nothing if there are no pairs."""
    if not any(getattr(pair.effect, "significant", False) for pair in comparison.pairs):
        return []
    rows = [
        {
            **_names(pair),
            "Pair": pair.cell_text,
            **_loss(pair),
            "p (Holm)": _p_text(pair, "p_holm"),
            "Documents": str(pair.documents),
        }
        for pair in comparison.pairs
    ]
    tested = [pair.effect for pair in comparison.pairs if hasattr(pair.effect, "interval")]
    return from_rows(
        rows,
        title="Quantization: precisions among themselves",
        notes=(
            "Loss: what the first precision loses against the second, paired by document; above "
            "0, or above × 1, the first is worse.",
            f"‡ and p: after Holm's correction over all {len(tested)} pairs.",
            *ratio_notes(tested),
        ),
        words=3,
        grouped=True,
    )


def _names(change: Change) -> dict[str, str]:
    return {"Task": change.label, "Metric": metric_text(change)}


def _loss(change: Change) -> dict[str, str]:
    return {
        "Loss": effect_text(change.effect, percent=change.percent),
        "95 % interval": interval_text(change.effect, percent=change.percent),
    }


def _p_text(change: Change, name: str) -> str:
    p = getattr(change.effect, name, None)
    return NO_VALUE if p is None else f"{p:.2g}"
