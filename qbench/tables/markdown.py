"""Delta tables in Markdown: what the terminal and ``tables.md`` show."""

from __future__ import annotations

from collections.abc import Sequence

from qbench.tables.layout import WORDS, Layout


def markdown(tables: Sequence[Layout]) -> str:
    """The tables one below the other, columns aligned so that they read well unrendered."""
    return "\n\n".join(_one(table) for table in tables) + "\n"


def _one(table: Layout) -> str:
    lines = [table.head, *table.rows]
    # at least two wide: Markdown does not take a lone ":" as the rule under a column
    widths = [max(2, *(len(line[column]) for line in lines)) for column in range(len(table.head))]
    rule = [
        "-" * width if column < WORDS else "-" * (width - 1) + ":"
        for column, width in enumerate(widths)
    ]
    padded = [
        [
            text.ljust(width) if column < WORDS else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in [table.head, rule, *table.rows]
    ]
    text = [f"### {table.title}", "", *(f"| {' | '.join(line)} |" for line in padded)]
    notes = [note.replace("|", "\\|") for note in table.notes]
    if table.keys:
        notes.append(f"Records: {'; '.join(table.keys)}.")
    return "\n".join([*text, "", *(f"- {note}" for note in notes)])
