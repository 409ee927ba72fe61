"""Which formats there are, and writing them into a results folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qbench.comparison.compare import compare
from qbench.comparison.lines import Comparison
from qbench.errors import RecipeError
from qbench.store import Store, write_atomically
from qbench.tables.latex import latex
from qbench.tables.layout import layouts, markdown, pair_layout
from qbench.tables.long import comma_separated
from qbench.tables.seeds import FILE, seed_layouts, seeds_csv
from qbench.tables.table import delta

FORMATS = ("md", "tex", "csv", "html")


def render(comparison: Comparison, *, format: str = "md", published: str | None = None) -> str:
    """The delta tables of a comparison as text.

    ``published`` names a set of ``qbench.published`` to print beside. Raises RecipeError for an
    unknown format or set.
    """
    if format not in FORMATS:
        raise RecipeError(f"--format {format}: unknown; possible: {', '.join(FORMATS)}")
    if format == "csv":
        return comma_separated(comparison, published=published)
    tables = []
    for table in delta(comparison):
        over_seeds = seed_layouts(comparison, table)
        # With several trainings of each kind a table of all of them says less than their means.
        tables += over_seeds or layouts(comparison, table, published=published)
    among = pair_layout(comparison)
    tables += [among] if among is not None else []
    if format == "md":
        return markdown(tables)
    if format == "tex":
        return latex(tables)
    from qbench.tables.layout import page

    return page(tables, title=comparison.name)


def paper(store: Store, published: str) -> str:
    """What a paper prints of analyses and of passkey retrieval, with ours, in Markdown."""
    from qbench.tables.analyses import as_markdown, beside_paper, gather

    parts = [part for one in beside_paper(gather(store), published) for part in as_markdown(one)]
    return "\n" + "\n\n".join(parts) + "\n"


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
        paths.append(directory / FILE)
        write_atomically(paths[-1], seeds_csv(comparison).encode())
    return paths
