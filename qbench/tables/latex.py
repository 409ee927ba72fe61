"""Delta tables in LaTeX: a document that compiles as it stands."""

from __future__ import annotations

import re
from collections.abc import Sequence

from qbench.tables.layout import WORDS, Layout

PREAMBLE = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\usepackage{booktabs}
\usepackage{longtable}
\usepackage[a4paper,%smargin=1.5cm]{geometry}
\setlength{\tabcolsep}{4pt}
\begin{document}
\scriptsize
"""
SYMBOLS = {
    "\\": r"\textbackslash{}",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "Δ": r"$\Delta$",
    "−": r"$-$",
    "±": r"$\pm$",
    "≈": r"$\approx$",
    "†": r"$^{\dagger}$",
    "‡": r"$^{\ddagger}$",
    "—": "---",
    "–": "--",
    "·": r"$\cdot$",
    "’": "'",
    **{sign: "\\" + sign for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}
WIDE = 10  # columns from which the page is turned


def latex(tables: Sequence[Layout]) -> str:
    """All tables as one document. Needs booktabs, longtable and geometry, all in TeX's base."""
    wide = any(len(table.head) >= WIDE for table in tables)
    body = "\n\\clearpage\n".join(_one(table) for table in tables)
    return PREAMBLE % ("landscape," if wide else "") + body + "\n\\end{document}\n"


def escape(text: str) -> str:
    """Text as LaTeX sets it. A character that pdfLaTeX does not know becomes a question mark."""
    set_text = "".join(SYMBOLS.get(character, character) for character in text)
    return re.sub(r"[^\x00-\x7f]", "?", set_text)


def _one(table: Layout) -> str:
    columns = "l" * WORDS + "r" * (len(table.head) - WORDS)
    head = " & ".join(escape(text) for text in table.head) + r" \\"
    rows = []
    for place, (cells, begins) in enumerate(zip(table.rows, table.begins_task, strict=True)):
        if begins and place:
            rows.append(r"\addlinespace")
        rows.append(" & ".join(escape(text) for text in cells) + r" \\")
    notes = [escape(note) for note in table.notes]
    keys = "".join(f"%   {key}\n" for key in table.keys)
    return "\n".join(
        [
            f"% {table.method}: cells and the keys of their records\n{keys}"
            rf"\begin{{longtable}}{{{columns}}}",
            rf"\multicolumn{{{len(table.head)}}}{{l}}{{\normalsize {escape(table.title)}}}\\",
            r"\toprule",
            head,
            r"\midrule",
            r"\endhead",
            r"\bottomrule",
            r"\endlastfoot",
            *rows,
            r"\end{longtable}",
            *(rf"\noindent {note}\par" for note in notes),
        ]
    )
