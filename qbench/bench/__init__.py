"""Measure speeds, after checking that results are right."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from qbench import machine, text

Row = dict[str, Any]  # of a table and of the JSON beside it
T = TypeVar("T")


def timed(device: str, run: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """Call ``run`` after freeing the memory of ``device``, "cpu" or "cuda"; return its result, and
    its ``seconds`` and ``peak_gib`` as parts of a row."""
    machine.free(device)  # graphs and caches of the model before lie in circles of references
    machine.synchronize(device)
    machine.reset_peak_memory(device)
    begun = time.perf_counter()
    result = run()
    machine.synchronize(device)
    seconds = time.perf_counter() - begun
    return result, {"seconds": seconds, "peak_gib": machine.peak_memory_gib(device)}


def table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]) -> str:
    """Return ``rows`` as a Markdown table. ``columns``: by heading, the key in a row and the format
    of its number ("" for words). A missing value is a dash."""
    cells = [
        ["–" if row.get(key) is None else format(row[key], form) for key, form in columns.values()]
        for row in rows
    ]
    align = "".join("r" if form else "l" for _, form in columns.values())
    return text.table(list(columns), cells, align=align)
