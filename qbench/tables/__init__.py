"""Render a comparison as tables in Markdown, LaTeX and CSV, and name their files."""

from __future__ import annotations

from collections.abc import Sequence

from qbench.comparison.rows import Comparison
from qbench.comparison.verdict import about, verdict
from qbench.errors import RecipeError
from qbench.store import Store
from qbench.tables.analyses import load_analyses, table_4
from qbench.tables.answers import answer_tables
from qbench.tables.frames import comparison_csv, seeds_csv
from qbench.tables.scores import by_method, costs, group_tables, pair_tables, tables_of
from qbench.tables.summary import precision_table
from qbench.tables.table import Table, latex, markdown
from qbench.text import for_latex, for_markdown

FORMATS = ("md", "tex", "csv")


def render(comparison: Comparison, *, format: str = "md", published: str | None = None) -> str:
    """Return the tables of a comparison as text.

    ``published`` names a set of a paper's numbers (``tables.published.SETS``) to print beside.
    Raises RecipeError for an unknown format or set.
    """
    if format not in FORMATS:
        raise RecipeError(f"--format {format}: unknown; possible: {', '.join(FORMATS)}")
    if format == "csv":
        return comparison_csv(comparison, published=published)
    tables = score_tables(comparison, published=published)
    if format == "md":
        return markdown(tables)
    return "".join(f"% {for_latex(line)}\n" for line in about(comparison)) + latex(tables)


def score_tables(comparison: Comparison, *, published: str | None = None) -> list[Table]:
    """Return all tables of a comparison.

    ``published`` adds what a paper prints for the same cells; raises RecipeError if it is unknown.
    """
    tables = precision_table(comparison)
    for method in by_method(comparison):
        tables += tables_of(method, published)
        if len(comparison.checkpoints) > 1:
            tables += costs(method)
    return [
        *tables, *pair_tables(comparison), *group_tables(comparison), *answer_tables(comparison),
    ]  # fmt: skip


def table_files(
    store: Store,
    comparison: Comparison,
    formats: Sequence[str] = ("md", "csv"),
    *,
    published: str | None = None,
) -> dict[str, str]:
    """Return file name → content: ``tables.<format>``, and ``seeds.csv`` over several trainings.

    Markdown begins with the verdict; with ``published`` it ends with the paper's table 4 and ours.
    """
    files = {}
    for format in formats:
        text = render(comparison, format=format, published=published)
        if format == "md":
            title, *lines = map(for_markdown, about(comparison))
            answer = "\n".join(f"- {for_markdown(line)}" for line in verdict(comparison))
            text = "\n\n".join([f"# {title}", "  \n".join(lines), answer, text])
        if format == "md" and published:
            text += "\n" + markdown(table_4(load_analyses(store), published))
        files[f"tables.{format}"] = text
    if comparison.seeds:
        files["seeds.csv"] = seeds_csv(comparison)
    return files
