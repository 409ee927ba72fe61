"""A table as text, and its Markdown, HTML, LaTeX and CSV. All tables are of this kind."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader

from qbench.text import for_csv, for_latex, for_markdown, table

ROWS_A_PAGE = 50  # of LaTeX's
PORTRAIT_COLUMNS = 8  # a table with more turns the page
LONG_WORD = 24  # characters after which LaTeX may break a word
MOST_RECORDS = 4  # that are named below a table
Cells = list[tuple[str, str]]  # of a row whose heads repeat, each with its head


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Texts in rows. The first ``words`` columns hold words, the others numbers, but for those
    whose heads ``also_words`` names. ``notes`` are footnotes, a line each.

    ``grouped``: rows with the same first cell belong together, and show it once. ``records``: the
    cells with their keys that the numbers come from.
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
    def begins(self) -> tuple[bool, ...]:
        """Whether a row begins a group."""
        first = [row[0] for row in self.rows]
        return tuple(self.grouped and a != b for a, b in zip(first, [None, *first], strict=False))

    @property
    def shown(self) -> tuple[tuple[str, ...], ...]:
        """The rows with the first cell of a group shown once."""
        if not self.grouped:
            return self.rows
        return tuple(
            row if begins else ("", *row[1:])
            for row, begins in zip(self.rows, self.begins, strict=True)
        )

    @property
    def footnotes(self) -> tuple[str, ...]:
        """The notes, and where the numbers come from: a line."""
        if not self.records:
            return self.notes
        many = len(self.records) > MOST_RECORDS
        some = f"{len(self.records)}; qbench show lists their keys"
        return (*self.notes, f"Records: {some if many else '; '.join(self.records)}.")

    @property
    def align(self) -> str:
        """A letter a column: ``l`` for words, ``r`` for numbers."""
        return "".join(
            "l" if index < self.words or name in self.also_words else "r"
            for index, name in enumerate(self.head)
        )


def from_rows(
    rows: Sequence[Mapping[str, str] | Cells], *, title: str, notes: Iterable[str], **layout: Any
) -> list[Table]:
    """A table of rows by their heads; none without a row. ``layout``: other fields of a table."""
    if not rows:
        return []
    pairs = [row.items() if isinstance(row, Mapping) else row for row in rows]
    head = tuple(name for name, _ in pairs[0])
    cells = tuple(tuple(text for _, text in row) for row in pairs)
    return [Table(title=title, head=head, rows=cells, notes=tuple(notes), **layout)]


def render(tables: Sequence[Table], format: str, *, title: str = "") -> str:
    """All tables as ``md``, ``html``, ``tex`` or ``csv``."""
    if format == "csv":
        return "\n".join(
            as_csv([dict(zip(t.head, r, strict=True)) for r in t.rows]) for t in tables
        )
    if format == "tex":
        return latex(tables)
    return page(tables, title=title) if format == "html" else markdown(tables)


def markdown(tables: Iterable[Table]) -> str:
    """The tables one below the other, with their notes."""
    return "\n\n".join("\n\n".join(_blocks(one)) for one in tables) + "\n"


def _blocks(one: Table) -> list[str]:
    notes = "\n".join(f"- {for_markdown(note)}" for note in one.footnotes)
    made = [table(one.head, one.shown, align=one.align), notes]
    return [f"### {for_markdown(one.title)}", *(block for block in made if block)]


def page(tables: Sequence[Table], *, title: str) -> str:
    """A page with every table, readable without style sheet, script or network."""
    templates = Environment(loader=PackageLoader("qbench.tables"), autoescape=True)
    return templates.get_template("tables.html").render(tables=tables, title=title)


PREAMBLE = r"""\documentclass{article}
\usepackage{booktabs}
\usepackage{graphicx}
\usepackage[a4paper,%smargin=1.5cm]{geometry}
\setlength{\parindent}{0pt}
\begin{document}
\raggedright
\scriptsize
"""


def latex(tables: Sequence[Table]) -> str:
    """All tables as one document, which needs booktabs, geometry and graphicx, all in TeX's base.

    A table that is too wide is drawn smaller; the page is turned where one has many columns.
    """
    wide = any(len(one.head) > PORTRAIT_COLUMNS for one in tables)
    body = "\n\\clearpage\n".join(_latex(one) for one in tables)
    return PREAMBLE % ("landscape," if wide else "") + body + "\n\\end{document}\n"


def _latex(one: Table) -> str:
    lines = []
    for cells, begins in zip(one.shown, one.begins, strict=True):
        space = r"\addlinespace " if begins and lines else ""
        row = " & ".join(map(for_latex, cells))
        row = re.sub(r"^[\[*]", r"{\g<0>}", row)  # else it is an argument of the command before
        lines.append(rf"{space}{row} \\")
    records = "".join(f"%   {for_latex(record)}\n" for record in one.records)
    parts = [f"% {for_latex(one.title)}: cells and the keys of their records\n{records}"]
    for first in range(0, max(1, len(lines)), ROWS_A_PAGE):
        if first:
            parts.append(r"\clearpage")
        parts += [
            rf"{{\normalsize {_breakable(one.title)}\par}}\medskip",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{@{{}}{one.align}@{{}}}}",
            r"\toprule",
            " & ".join(map(for_latex, one.head)) + r" \\",
            r"\midrule",
            *lines[first : first + ROWS_A_PAGE],
            r"\bottomrule",
            r"\end{tabular}}\par\medskip",
        ]
    return "\n".join([*parts, *(rf"{_breakable(note)}\par" for note in one.notes)])


def _breakable(text: str) -> str:
    """Text whose words may be broken where they are too long for a line."""
    pieces = (re.findall(rf".{{1,{LONG_WORD}}}", word) for word in text.split())
    return " ".join(r"\allowbreak{}".join(map(for_latex, piece)) for piece in pieces)


def as_csv(
    rows: Sequence[Mapping[str, object]],
    columns: Sequence[str] = (),
    *,
    numbers: Sequence[str] = (),
) -> str:
    """CSV with ``columns``, or those of the rows in the order in which they first come.

    Text that a spreadsheet would compute begins with an apostrophe, but in columns of ``numbers``.
    Empty text without rows and columns."""
    columns = columns or list(dict.fromkeys(column for row in rows for column in row))
    if not columns:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(
        {name: cell if name in numbers else for_csv(cell) for name, cell in row.items()}
        for row in rows
    )
    return text.getvalue()
