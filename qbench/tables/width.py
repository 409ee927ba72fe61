"""How wide text is set in LaTeX's ``\\scriptsize``, so that tables can be made to fit the page.

Measured with pdfTeX from Computer Modern at 7 points (``\\wd`` of a box with each character).
"""

from __future__ import annotations

from collections.abc import Sequence

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
