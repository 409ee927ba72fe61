"""A results folder: its runs, and the cells of one of them."""

from __future__ import annotations

from datetime import datetime

from qbench.comparison.lines import judge
from qbench.records import Grid
from qbench.show.cell import took
from qbench.show.layout import table
from qbench.store import KEY_DIGITS, Store, read, run_id, runs
from qbench.text import NO_VALUE


def folder_text(store: Store) -> str:
    """Which runs a results folder holds, and the cells of the one that is shown."""
    grid = store.grid()
    shown = run_id(grid)
    rows = []
    for name, path in runs(store.directory):
        one = read(path, Grid)
        limit = "all documents" if one.limit is None else f"{one.limit} documents a task"
        made = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
        mark = "*" if name == shown else ""
        rows.append((mark, name, made, len(one.cells), ", ".join(one.tasks), limit))
    text = [f"{store.directory}: {grid.name}"]
    if rows:
        text += ["", table(("", "run", "last begun", "cells", "tasks", "asked for"), rows)]
    cells = []
    for cell in grid.cells:
        record = store.get(cell)
        status, reason = judge(record)
        spent = took(record) if record else NO_VALUE
        cells.append((cell.cell, status, cell.precision.name, cell.key[:KEY_DIGITS], spent, reason))
    text += ["", table(("cell", "status", "precision", "key", "took", ""), cells)]
    return "\n".join(text)
