"""Foreign text in tables: checkpoint names, labels and reasons come from records of anybody.

One function a format. HTML is escaped by its templates (Jinja2's autoescape).
"""

from __future__ import annotations

import re
import unicodedata

# What a spreadsheet takes for the beginning of a formula, full-width forms included
# (OWASP, CSV injection).
FORMULA = tuple("=+-@＝＋－＠")
LATEX = {
    "\\": r"\textbackslash{}",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "→": r"$\rightarrow$",
    "Δ": r"$\Delta$",
    "−": r"$-$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≈": r"$\approx$",
    "†": r"$^{\dagger}$",
    "‡": r"$^{\ddagger}$",
    "∞": r"$\infty$",
    "—": "---",
    "–": "--",
    "…": r"\ldots{}",
    "·": r"$\cdot$",
    "’": "'",
    "\u00a0": "~",
    "\u202f": r"\,",
    **{sign: "\\" + sign for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
}


def one_line(text: str) -> str:
    """Without line breaks, control characters and marks that turn the direction of writing."""
    if text.isprintable():  # none of them, and a table has a hundred thousand texts
        return text
    kept = (" " if _breaks(character) else character for character in text)
    return "".join(kept)


def for_markdown(text: str) -> str:
    """Text as a cell or line of Markdown shows it, on one line: no columns, tags or links."""
    text = one_line(text).replace("\\", "\\\\").replace("|", "\\|").replace("`", "\\`")
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return text.replace("](", "]\\(")


def for_latex(text: str) -> str:
    """Text as LaTeX sets it, also in a comment; what pdfLaTeX does not know becomes ``?``."""
    known = "".join(LATEX.get(character, character) for character in one_line(text))
    return re.sub(r"[^\x20-\x7e]", "?", known)


def for_csv(value: object) -> object:
    """A cell of CSV: text that a spreadsheet would compute gets an apostrophe; numbers stay."""
    if not isinstance(value, str):
        return value
    text = one_line(value)
    return f"'{text}" if text.lstrip().startswith(FORMULA) else text


def _breaks(character: str) -> bool:
    # Cc: controls, Cf: invisible formatting such as bidirectional overrides, Cs: lone surrogates,
    # Zl and Zp: line and paragraph separators.
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
