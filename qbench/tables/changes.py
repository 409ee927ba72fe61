"""What changed between two sets of results, in Markdown."""

from __future__ import annotations

from qbench.comparison.changes import Change, Changes, SeedChange
from qbench.comparison.metrics import is_percentage
from qbench.comparison.wording import (
    LEGEND,
    RATIO_NOTE,
    SEEDS_LEGEND,
    ends_text,
    interval_text,
    mean_text,
)
from qbench.text import NO_VALUE, for_markdown, metric_title, number, table

SEEDS_HEAD = (
    *("Over seeds", "Task", "Metric", "New − old, mean", "95 % interval", "p"),
    "Seeds × documents",
)
HEAD = ("Cell", "Task", "Metric", "Old", "New", "New − old", "95 % interval", "p", "Documents")


def changes_table(changes: Changes) -> str:
    """A line a score, those that are significant marked; then what cannot be compared."""
    notes = [
        "Intervals: Student's t on documents, score intervals where few answers changed.",
        RATIO_NOTE,
        "‡ significant at 5 % after Holm's correction over all lines, † after "
        "Benjamini–Hochberg's only; p is not corrected.",
        *changes.problems,
    ]
    if changes.seeds:
        notes[:0] = [LEGEND, SEEDS_LEGEND]
    parts = [
        f"### {for_markdown(changes.new)} against {for_markdown(changes.old)}",
        table(HEAD, [_texts(line) for line in changes.lines], align="lllrrrrrr"),
        *(
            [table(SEEDS_HEAD, [_seed_texts(one) for one in changes.seeds], align="lllrrrr")]
            if changes.seeds
            else []
        ),
        "\n".join(f"- {for_markdown(note)}" for note in notes),
    ]
    return "\n\n".join(parts) + "\n"


def _seed_texts(one: SeedChange) -> list[str]:
    score, percent = one.score, is_percentage(one.score.metric)
    return [
        f"{one.group}/{one.quantizer}",
        score.label,
        f"{metric_title(score.metric)} {'↑' if score.higher_is_better else '↓'}",
        mean_text(one.effect, percent=percent),
        ends_text(one.effect, percent=percent),
        f"{one.effect.p:.2g}",
        f"{one.effect.seeds} × {one.effect.documents}",
    ]


def _texts(line: Change) -> list[str]:
    effect = line.effect
    shown = {"percent": line.percent}
    return [
        line.told,
        line.label,
        f"{metric_title(line.metric)} {'↑' if line.higher_is_better else '↓'}",
        number(line.old, **shown),
        number(line.new, **shown),
        number(effect.difference if effect else line.new - line.old, signed=True, **shown)
        + (effect.mark if effect else ""),
        interval_text(effect, **shown),
        f"{effect.p:.2g}" if effect else NO_VALUE,
        str(line.documents) + (f" ({line.left_out} unpaired)" if line.left_out else ""),
    ]
