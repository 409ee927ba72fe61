"""Delta tables in Markdown: what the terminal and ``tables.md`` show."""

from __future__ import annotations

from collections.abc import Sequence

from qbench.tables.layout import WORDS, Layout
from qbench.text import for_markdown, table


def markdown(tables: Sequence[Layout]) -> str:
    """The tables one below the other, with their notes."""
    return "\n\n".join(_one(layout) for layout in tables) + "\n"


def _one(layout: Layout) -> str:
    align = "l" * WORDS + "r" * (len(layout.head) - WORDS)
    notes = list(layout.notes)
    if layout.keys:
        notes.append(f"Records: {'; '.join(layout.keys)}.")
    parts = [
        f"### {for_markdown(layout.title)}",
        table(layout.head, layout.rows, align=align),
        "\n".join(f"- {for_markdown(note)}" for note in notes),
    ]
    return "\n\n".join(part for part in parts if part)
