"""Format numbers, escape text of other people, and write tables of texts, for terminals, Markdown,
LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qbench.errors import some

MINUS = "−"
NO_VALUE = "—"
MOST_RECORDS = 4  # that are named below a table
Cells = list[tuple[str, str]]  # of a row whose heads repeat, each with its head


def number(value: float | None, *, percent: bool, signed: bool = False) -> str:
    """Return ``value`` as text with two decimals, as the papers print them; with ``percent`` times
    100, with ``signed`` a plus before positive values. "—" for None and NaN, "∞" for infinity,
    three significant digits from 1e9 on."""
    if value is None:
        return NO_VALUE
    value = value * 100 if percent else value
    if -1e9 < value < 1e9:
        return (f"{value:+z.2f}" if signed else f"{value:z.2f}").replace("-", MINUS)
    if math.isnan(value):  # ∞ − ∞
        return NO_VALUE
    if math.isinf(value):
        return f"{MINUS if value < 0 else ''}∞"
    return ("+" if signed and value > 0 else "") + short(value)  # a model that fell apart


def ratio(logarithm: float, *, decimals: int = 3) -> str:
    """Return exp(``logarithm``) as text with ``decimals`` decimals: 1.032; with three significant
    digits below 0.1 and from 100 on, and "∞" near the largest double."""
    if logarithm > 700:  # near the largest double
        return "∞"
    value = math.exp(logarithm)
    return f"{value:.{decimals}f}" if 0.1 <= value < 100 else short(value)


def short(value: float) -> str:
    """Return ``value`` with three significant digits: 8110, 3.07e227."""
    return f"{float(f'{value:.3g}'):g}".replace("e+0", "e").replace("e+", "e").replace("-", MINUS)


def significant(value: float) -> str:
    """Return ``value`` with four significant digits, as divergences are printed."""
    return f"{value:.4g}".replace("-", MINUS)


def duration(seconds: float) -> str:
    """Return a duration in a fitting unit: 17 s, 5 min, 3.2 h, 12 days."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 5_400:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3_600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.0f} days"


def metric_title(metric: str) -> str:
    """Return ``acc_norm`` as the paper writes it: Acc Norm; a filter in brackets stays as it is."""
    name, bracket, rest = metric.partition(" [")
    return name.replace("_", " ").title() + bracket + rest


# Characters that begin a formula in a spreadsheet, full-width forms included
# (OWASP, CSV injection).
FORMULA = tuple("=+-@＝＋－＠")
# Of a LaTeX caption, which pandas does not escape as it does cells
CAPTION = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)


# Nothing that Markdown or a terminal interprets; brackets alone are no link.
PLAIN = re.compile(r"[][\w .,%+×…°:‡±↑↓/\u2212\u2014-]*")


def one_line(text: str) -> str:
    """Return ``text`` with spaces for line breaks, controls and marks of writing direction."""
    if text.isprintable():  # none of them, and a table has a hundred thousand texts
        return text
    # Cc: controls, Cf: invisible formatting such as bidirectional overrides, Cs: lone surrogates,
    # Zl and Zp: line and paragraph separators.
    breaks = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(" " if unicodedata.category(c) in breaks else c for c in text)


def for_markdown(text: str) -> str:
    """Return ``text`` escaped for a cell or line of Markdown: no columns, tags or links."""
    if PLAIN.fullmatch(text):  # a table has a hundred thousand texts
        return text
    text = one_line(text).replace("\\", "\\\\").replace("|", "\\|").replace("`", "\\`")
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return text.replace("](", "]\\(")


def for_csv(text: str) -> str:
    """Return a text for CSV: one line, an apostrophe before what a spreadsheet would compute."""
    text = one_line(text)
    return f"'{text}" if text.lstrip().startswith(FORMULA) else text


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, align: str) -> str:
    """Return a Markdown table, aligned to be readable unrendered; every cell is escaped. ``align``:
    a letter per column, ``l`` for words, ``r`` for numbers."""
    assert len(align) == len(head), f"{len(align)} letters for {len(head)} columns"
    texts = [[for_markdown(str(cell)).strip() for cell in row] for row in rows]
    texts, columns = [[for_markdown(text) for text in head], *texts], []
    for letter, (name, *cells) in zip(align, zip(*texts, strict=True), strict=True):
        width = max(len(name) + 2, *map(len, cells), 0)
        line = "-" * (width + 1)
        place = str.ljust if letter == "l" else str.rjust
        texts_of = [f" {place(text, width)} " for text in (name, *cells)]
        columns.append([texts_of[0], f":{line}" if letter == "l" else f"{line}:", *texts_of[1:]])
    return "\n".join(f"|{'|'.join(row)}|" for row in zip(*columns, strict=True))


def group_by_reason(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line ``names: reason`` per reason in (name, reason) ``pairs``, in order of first
    appearance; from the ninth on names are only counted."""
    names: dict[str, list[str]] = {}
    for name, reason in pairs:
        names.setdefault(reason, []).append(name)
    return [f"{some(named)}: {reason}" for reason, named in names.items()]


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
            index=False,
            escape=True,
            caption=each.title.translate(CAPTION),
            column_format=each.align,
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
        [
            for_csv(value)
            if isinstance(value := row.get(name), str) and name not in numbers
            else value
            for name in columns
        ]
        for row in rows
    )
    return text.getvalue()
