"""Render a comparison as tables in Markdown and CSV, and name their files."""

from __future__ import annotations

from collections.abc import Sequence

from qbench.comparison.rows import Comparison
from qbench.comparison.verdict import about, verdict
from qbench.errors import RecipeError
from qbench.tables.answers import answer_tables
from qbench.tables.frames import comparison_csv, seeds_csv
from qbench.tables.scores import by_method, costs, tables_of
from qbench.tables.summary import precision_table
from qbench.tables.table import Table, markdown
from qbench.text import for_markdown

FORMATS = ("md", "csv")


def render(comparison: Comparison, *, format: str = "md") -> str:
    """Return the tables of a comparison as text. Raises RecipeError for an unknown format."""
    if format not in FORMATS:
        raise RecipeError(f"--format {format}: unknown; possible: {', '.join(FORMATS)}")
    return comparison_csv(comparison) if format == "csv" else markdown(score_tables(comparison))


def score_tables(comparison: Comparison) -> list[Table]:
    """Return all tables of a comparison."""
    tables = precision_table(comparison)
    for method in by_method(comparison):
        tables += tables_of(method)
        if len(comparison.checkpoints) > 1:
            tables += costs(method)
    return [*tables, *answer_tables(comparison)]


def table_files(comparison: Comparison, formats: Sequence[str] = FORMATS) -> dict[str, str]:
    """Return file name → content: ``tables.<format>``, and ``seeds.csv`` over several trainings.

    Markdown begins with the verdict.
    """
    files = {}
    for format in formats:
        text = render(comparison, format=format)
        if format == "md":
            title, *lines = map(for_markdown, about(comparison))
            answer = "\n".join(f"- {for_markdown(line)}" for line in verdict(comparison))
            text = "\n\n".join([f"# {title}", "  \n".join(lines), answer, text])
        files[f"tables.{format}"] = text
    if comparison.seeds:
        files["seeds.csv"] = seeds_csv(comparison)
    return files
