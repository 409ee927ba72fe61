"""Speeds, measured only where results are right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qbench import text


def table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]) -> str:
    """``rows`` in Markdown. ``columns``: each head's key of a row, and how its number is written
    ("" for words); a dash stands for what a row has not."""
    cells = [
        ["–" if row.get(key) is None else format(row[key], form) for key, form in columns.values()]
        for row in rows
    ]
    align = "".join("r" if form else "l" for _, form in columns.values())
    return text.table(list(columns), cells, align=align)
