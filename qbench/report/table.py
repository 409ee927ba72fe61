"""One table of the report as data: what each column shows, and what it sorts by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qbench.text import NO_VALUE

DIGITS = 12  # of a digest that are shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Text to show, and a number to sort by where the text is one."""

    text: str
    sort: float | None = None
    title: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataTable:
    """One sortable, filterable table.

    The first ``keys`` columns say what a row is of, and stay in sight while the others are
    scrolled. ``numeric`` says which columns hold numbers.
    """

    name: str
    section: str
    title: str
    caption: str
    keys: int
    head: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[Cell, ...], ...]


def build(
    name: str,
    section: str,
    title: str,
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    keys: int,
) -> DataTable:
    """Columns in which no row has anything are left out."""
    kept = [
        index
        for index in range(len(head))
        if index < keys or any(row[index].text not in ("", NO_VALUE) for row in rows)
    ]
    return DataTable(
        name=name,
        section=section,
        title=title,
        caption=caption,
        keys=keys,
        head=tuple(head[index] for index in kept),
        numeric=tuple(any(row[index].sort is not None for row in rows) for index in kept),
        rows=tuple(tuple(row[index] for index in kept) for row in rows),
    )


def plain(value: float | None, form: str) -> Cell:
    """A number in the format ``form``, with a real minus."""
    if value is None:
        return Cell(text=NO_VALUE)
    text = form.format(value).replace("-", "−").replace("%", "\u00a0%")
    return Cell(text=text, sort=float(value))


def p_value(value: float | None) -> Cell:
    if value is None:
        return Cell(text=NO_VALUE)
    return Cell(text="< 0.0001" if value < 1e-4 else f"{value:.4f}", sort=value)


def short(text: str) -> str:
    """A digest by its first digits; any other text as it is."""
    digest = len(text) == 64 and all(digit in "0123456789abcdef" for digit in text)
    return f"{text[:DIGITS]}…" if digest else text
