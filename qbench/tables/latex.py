r"""Delta tables in LaTeX: a document that compiles as it stands, whose tables fit the page.

How wide text is set in LaTeX's ``\scriptsize``, so that tables can be made to fit the page.

Measured with pdfTeX from Computer Modern at 7 points (``\wd`` of a box with each character).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from qbench.tables.layout import INTERVAL, WORDS, Layout
from qbench.text import for_latex

# Points → characters. What is not here is set as a question mark, and taken for the widest.
_GROUPS = {
    1.33: "\u202f", 2.27: "!',.:;[]`il’", 2.38: "|·", 2.48: "fj", 2.7: " -\u00a0", 2.88: "_",
    2.89: "I", 3.13: "()rt", 3.17: "s", 3.56: "cez", 3.78: "?", 3.84: "†‡",
    3.99: '"$*/0123456789^ago~–', 4.09: "J", 4.1: "\\{}↑↓", 4.21: "kqvxy", 4.42: "Sbdhnpu",
    4.85: "Z", 4.95: "L", 5.16: "F", 5.38: "EP", 5.6: "B", 5.71: "CTw", 5.81: "R",
    5.91: "AHNUVXY", 6.03: "D", 6.12: "K", 6.14: "&+=@OQ", 6.19: "G", 6.26: "<>−±×≈",
    6.57: "#%mΔ", 7.2: "M", 7.98: "→∞—", 8.06: "W", 10.67: "…",
}  # fmt: skip
WIDTHS = {character: width for width, group in _GROUPS.items() for character in group}
WIDEST = max(WIDTHS.values())

GAP = 8.0  # points between two columns: twice \tabcolsep
# Points of an A4 page with margins of 1.5 cm.
PORTRAIT, LANDSCAPE = 512.1, 759.6


def text_width(text: str) -> float:
    """Points that ``text`` takes on one line, kerning and ligatures aside."""
    return sum(WIDTHS.get(character, WIDEST) for character in text)


def table_width(columns: Sequence[float]) -> float:
    """Points of a table with columns of these widths, without space at its ends."""
    return sum(columns) + GAP * (len(columns) - 1)


def split(words: Sequence[float], numbers: Sequence[Sequence[float]]) -> list[list[int]]:
    """Groups of columns that fit a landscape page beside the columns of words.

    ``numbers`` holds the widths of columns that belong together; the result names its indices.
    A group that is too wide by itself stands alone.
    """
    parts: list[list[int]] = [[]]
    for index, group in enumerate(numbers):
        taken = [width for other in parts[-1] for width in numbers[other]]
        if parts[-1] and table_width([*words, *taken, *group]) > LANDSCAPE:
            parts.append([])
        parts[-1].append(index)
    return parts


PREAMBLE = r"""\documentclass{article}
\usepackage{array}
\usepackage{booktabs}
\usepackage{longtable}
\usepackage[a4paper,%smargin=1.5cm]{geometry}
\setlength{\tabcolsep}{%spt}
\setlength{\LTleft}{0pt}
\setlength{\parindent}{0pt}
\begin{document}
\raggedright
\scriptsize
"""
HEAD_CHARACTERS = 14  # after which a head goes on in its next line
WORDS_POINTS = 110.0  # wider columns of words are broken into lines
SLACK = 0.4  # points a column, for kerning and rounding
UNBROKEN = 10  # characters after which a longer word may be broken


@dataclass(frozen=True, kw_only=True, slots=True)
class _Columns:
    """A table, or a part of its columns: widths in points as they will be set."""

    layout: Layout
    heads: tuple[tuple[str, ...], ...]  # lines of each
    widths: tuple[float, ...]

    @property
    def width(self) -> float:
        return table_width(self.widths)


def latex(tables: Sequence[Layout]) -> str:
    """All tables as one document. Needs array, booktabs, longtable and geometry, all in TeX's
    base. The page is turned where a table needs it; a table that is too wide even then is
    printed in parts."""
    parts = [part for layout in tables for part in _parts(_columns(layout))]
    wide = any(part.width > PORTRAIT for part in parts)
    body = "\n\\clearpage\n".join(_one(part) for part in parts)
    preamble = PREAMBLE % ("landscape," if wide else "", f"{GAP / 2:g}")
    return preamble + body + "\n\\end{document}\n"


def _columns(layout: Layout) -> _Columns:
    heads = tuple(
        tuple(textwrap.wrap(text, HEAD_CHARACTERS, break_on_hyphens=True)) or ("",)
        for text in layout.head
    )
    widths = []
    for column, head in enumerate(heads):
        cells = [*head, *(row[column] for row in layout.rows)]
        width = max(map(text_width, cells))
        widths.append(min(width, WORDS_POINTS) if column < WORDS else width)
    return _Columns(layout=layout, heads=heads, widths=tuple(widths))


def _parts(columns: _Columns) -> Iterator[_Columns]:
    """The same, or several with the columns of words repeated; an interval stays with its
    estimate."""
    groups: list[list[int]] = []
    for column in range(WORDS, len(columns.widths)):
        if groups and columns.layout.head[column].startswith(INTERVAL):
            groups[-1].append(column)
        else:
            groups.append([column])
    found = split(
        columns.widths[:WORDS], [[columns.widths[column] for column in group] for group in groups]
    )
    for number, part in enumerate(found, 1):
        kept = [*range(WORDS), *(column for index in part for column in groups[index])]
        layout = columns.layout
        if len(found) > 1:
            layout = replace(
                layout,
                title=f"{layout.title} (part {number} of {len(found)})",
                head=tuple(layout.head[column] for column in kept),
                rows=tuple(tuple(row[column] for column in kept) for row in layout.rows),
            )
        yield _Columns(
            layout=layout,
            heads=tuple(columns.heads[column] for column in kept),
            widths=tuple(columns.widths[column] for column in kept),
        )


def _one(columns: _Columns) -> str:
    layout = columns.layout
    kinds = [_kind(width, column < WORDS) for column, width in enumerate(columns.widths)]
    head = " & ".join(
        _head(lines, "r" if column >= WORDS else "l") for column, lines in enumerate(columns.heads)
    )
    rows = []
    for cells, begins in zip(layout.rows, layout.begins_task, strict=True):
        if begins and rows:
            rows.append(r"\addlinespace")
        words = [_breakable(text) for text in cells[:WORDS]]
        rows.append(" & ".join([*words, *map(for_latex, cells[WORDS:])]) + r" \\")
    keys = "".join(f"%   {for_latex(key)}\n" for key in layout.keys)
    return "\n".join(
        [
            f"% {for_latex(layout.method)}: cells and the keys of their records\n{keys}"
            rf"{{\normalsize {_breakable(layout.title)}\par}}",
            rf"\begin{{longtable}}{{@{{}}{''.join(kinds)}@{{}}}}",
            r"\toprule",
            rf"{head} \\",
            r"\midrule",
            r"\endhead",
            r"\bottomrule",
            r"\endlastfoot",
            *rows,
            r"\end{longtable}",
            *(rf"{_breakable(note)}\par" for note in layout.notes),
        ]
    )


def _kind(width: float, words: bool) -> str:
    """A column of a fixed width: all pages of a table are alike in the first run of LaTeX."""
    points = f"{{{width + SLACK:.1f}pt}}"
    return rf">{{\raggedright\arraybackslash}}p{points}" if words else f"W{{r}}{points}"


def _head(lines: Sequence[str], side: str) -> str:
    text = r"\\".join(for_latex(line) for line in lines)
    return text if len(lines) == 1 else rf"\shortstack[{side}]{{{text}}}"


def _breakable(text: str) -> str:
    """Text in which a word that is too long for a line or column may be broken."""
    return " ".join(map(_word, text.split()))


def _word(text: str) -> str:
    if text_width(text) <= WORDS_POINTS:
        return for_latex(text)
    return r"\allowbreak{}".join(map(for_latex, re.findall(rf".{{1,{UNBROKEN}}}", text)))
