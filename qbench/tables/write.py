"""Which formats there are, and writing them into a results folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qbench.comparison.compare import compare
from qbench.comparison.lines import Comparison
from qbench.errors import RecipeError
from qbench.store import Store, write_atomically
from qbench.tables.analyses import beside_paper, gather
from qbench.tables.comparison_csv import comparison_csv, seeds_csv
from qbench.tables.scores import costs, group_tables, pair_tables, parts, tables_of
from qbench.tables.table import Table, markdown
from qbench.tables.table import render as render_tables

FORMATS = ("md", "tex", "csv", "html")


def render(comparison: Comparison, *, format: str = "md", published: str | None = None) -> str:
    """The delta tables of a comparison as text.

    ``published`` names a set of ``qbench.published`` to print beside. Raises RecipeError for an
    unknown format or set.
    """
    if format not in FORMATS:
        raise RecipeError(f"--format {format}: unknown; possible: {', '.join(FORMATS)}")
    if format == "csv":
        return comparison_csv(comparison, published=published)
    found = score_tables(comparison, published=published)
    return render_tables(found, format, title=comparison.name)


def score_tables(comparison: Comparison, *, published: str | None = None) -> list[Table]:
    """All of a comparison. ``published`` adds what a paper prints for the same cells; raises
    RecipeError where that is unknown."""
    found: list[Table] = []
    for part in parts(comparison):
        found += tables_of(part, published)
        if len(comparison.checkpoints) > 1:
            found += costs(part)
    return [*found, *pair_tables(comparison), *group_tables(comparison)]


def paper(store: Store, published: str) -> str:
    """What a paper prints of analyses and of passkey retrieval, with ours, in Markdown."""
    return "\n" + markdown(beside_paper(gather(store), published))


def write_tables(
    store: Store,
    directory: Path | None = None,
    *,
    formats: Sequence[str] = ("md", "csv"),
    published: str | None = None,
    comparison: Comparison | None = None,
) -> list[Path]:
    """Write ``tables.<format>`` into ``directory`` (default: the results folder)."""
    directory = Path(directory or store.place())
    comparison = comparison or compare(store)
    paths = []
    for format in formats:
        path = directory / f"tables.{format}"
        text = render(comparison, format=format, published=published)
        if format == "md" and published:
            text += paper(store, published)
        write_atomically(path, text.encode())
        paths.append(path)
    if comparison.seeds:
        paths.append(directory / "seeds.csv")
        write_atomically(paths[-1], seeds_csv(comparison).encode())
    return paths
