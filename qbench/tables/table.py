"""Tables of text, and their Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qbench.text import for_csv, for_markdown, one_line, table

MOST_RECORDS = 4  # that are named below a table
Cells = list[tuple[str, str]]  # of a row whose heads repeat, each with its head


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Hold a table of texts with its title and footnotes.

    The first ``words`` columns hold words, the others numbers, but for those whose heads
    ``also_words`` names. ``grouped``: rows with the same first cell belong together, and show it
    once. ``records``: the cells with their keys that the numbers come from.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    words: int = 1
    also_words: tuple[str, ...] = ()
    grouped: bool = False
    records: tuple[str, ...] = ()

    @property
    def shown(self) -> tuple[tuple[str, ...], ...]:
        """Return the rows with the first cell of a group shown once."""
        before = [None, *(row[0] for row in self.rows)]
        return tuple(
            ("", *row[1:]) if self.grouped and row[0] == last else row
            for row, last in zip(self.rows, before, strict=False)
        )

    @property
    def footnotes(self) -> tuple[str, ...]:
        """Return the notes, and a line with the records behind the numbers."""
        if not self.records:
            return self.notes
        many = len(self.records) > MOST_RECORDS
        some = f"{len(self.records)}; qbench show lists their keys"
        return (*self.notes, f"Records: {some if many else '; '.join(self.records)}.")

    @property
    def align(self) -> str:
        """Return a letter per column: ``l`` for words, ``r`` for numbers."""
        return "".join(
            "l" if index < self.words or name in self.also_words else "r"
            for index, name in enumerate(self.head)
        )


def from_rows(
    rows: Sequence[Mapping[str, str] | Cells], *, title: str, notes: Iterable[str], **layout: Any
) -> list[Table]:
    """Return a list with the table of ``rows``, whose head are the names of the first row; []
    without rows. All rows must have the same names in the same order: cells go by position.
    ``layout``: other fields of the table."""
    if not rows:
        return []
    pairs = [row.items() if isinstance(row, Mapping) else row for row in rows]
    head = tuple(name for name, _ in pairs[0])
    cells = tuple(tuple(text for _, text in row) for row in pairs)
    return [Table(title=title, head=head, rows=cells, notes=tuple(notes), **layout)]


def markdown(tables: Iterable[Table]) -> str:
    """Return the tables one below the other as Markdown, with their notes as lists."""
    blocks = []
    for each in tables:
        notes = "\n".join(f"- {for_markdown(note)}" for note in each.footnotes)
        shown = table(each.head, each.shown, align=each.align)
        blocks += [f"### {for_markdown(each.title)}", shown, *([notes] if notes else [])]
    return "\n\n".join(blocks) + "\n"


def latex(tables: Iterable[Table]) -> str:
    """Return a fragment for LaTeX's input command: the tables, and below each its notes as comments
    (``%``). It needs booktabs and a LaTeX that reads UTF-8."""
    import pandas as pd  # slow to import

    return "".join(
        pd.DataFrame(each.shown, columns=each.head).to_latex(
            index=False, escape=True, caption=each.title, column_format=each.align
        )
        + "".join(f"% {one_line(note)}\n" for note in each.footnotes)
        for each in tables
    )


def as_csv(
    rows: Sequence[Mapping[str, object]],
    columns: Sequence[str] = (),
    *,
    numbers: Sequence[str] = (),
) -> str:
    """Return CSV with ``columns``, by default all keys in the order of their first use; a cell that
    a row lacks is empty. Text that a spreadsheet would compute begins with an apostrophe, except in
    the columns ``numbers``. "" without rows and columns."""
    columns = columns or list(dict.fromkeys(column for row in rows for column in row))
    if not columns:
        return ""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(
        [row.get(name) if name in numbers else for_csv(row.get(name)) for name in columns]
        for row in rows
    )
    return text.getvalue()
