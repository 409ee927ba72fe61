"""The one writer of Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from qbench.text.escape import for_markdown


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, align: str) -> str:
    """A table, aligned so that it reads well unrendered; every cell is escaped.

    ``align`` has a letter for each column: ``l`` for words, ``r`` for numbers.
    """
    assert len(align) == len(head), f"{len(align)} letters for {len(head)} columns"
    return tabulate(
        [[for_markdown(str(cell)) for cell in row] for row in rows],
        headers=[for_markdown(text) for text in head],
        tablefmt="pipe",
        colalign=[{"l": "left", "r": "right"}[letter] for letter in align],
        disable_numparse=True,
    )
