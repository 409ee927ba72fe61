"""Render a comparison as tables in Markdown, LaTeX and CSV, and name their files."""

from __future__ import annotations

from collections.abc import Sequence

from qbench.comparison.rows import Comparison
from qbench.comparison.verdict import about, verdict
from qbench.errors import RecipeError, shown
from qbench.tables.answers import answer_tables
from qbench.tables.frames import COLUMNS, PRECISION, comparison_rows, printed_table, seeds_csv
from qbench.tables.scores import against_table, by_method, tables_of
from qbench.tables.summary import legend, precision_rows
from qbench.tables.table import Table, as_csv, from_rows, latex, markdown
from qbench.text import for_markdown

FORMATS = ("md", "tex", "csv")
PAGE = (
    "This page compares each quantized precision with the same checkpoint unquantized: the scores "
    "of both, what was lost, and whether the loss is significant."
)


def render(comparison: Comparison, *, format: str = "md", published: str | None = None) -> str:
    """Return the tables of a comparison as text in ``format`` (md, tex or csv). With ``published``
    (see ``printed_table``) they include the scores that a paper prints; csv does not. Raises
    RecipeError if either is unknown."""
    if format not in FORMATS:
        raise RecipeError(f"format {shown(format)}: unknown; possible: {', '.join(FORMATS)}")
    if format == "csv":
        in_parts = any(line.precision.in_parts for line in comparison.lines)
        columns = [column for column in COLUMNS if in_parts or column not in PRECISION]
        return as_csv(comparison_rows(comparison), columns)
    tables = score_tables(comparison)
    tables += printed_table(comparison, published) if published else []
    return markdown(tables) if format == "md" else latex(tables)


def score_tables(comparison: Comparison) -> list[Table]:
    """Return all tables of a comparison in their order: precisions, scores and damage by method,
    losses against one precision, answers. Tables without rows are left out."""
    rows = precision_rows(comparison) if comparison.tested and comparison.quantizers else []
    notes = legend(comparison, rows, list(rows[0])[4:]) if rows else ()
    tables = from_rows(rows, title="Precisions", notes=notes)
    for method in by_method(comparison):
        tables += tables_of(method)
    tables += against_table(comparison) if comparison.against else []
    return [*tables, *(answer_tables(comparison) if comparison.answers else [])]


def table_files(
    comparison: Comparison, formats: Sequence[str] = ("md", "csv"), *, published: str | None = None
) -> dict[str, str]:
    """Return file name → content: ``tables.<format>`` for each of ``formats``, and ``seeds.csv`` if
    there are several trainings. Nothing is written. Markdown begins with the verdict.
    ``published``: see ``render``."""
    files = {}
    for format in formats:
        text = render(comparison, format=format, published=published)
        if format == "md":
            folder, recipe = comparison.folder, comparison.grid.name
            lines = about(comparison)
            if folder != recipe:
                lines[0] = f"{folder} (recipe {recipe}){lines[0].removeprefix(recipe)}"
            title, *lines = map(for_markdown, lines)
            answer = "\n".join(f"- {for_markdown(line)}" for line in verdict(comparison))
            text = "\n\n".join([f"# Results in {title}", PAGE, "  \n".join(lines), answer, text])
        files[f"tables.{format}"] = text
    if comparison.seeds:
        files["seeds.csv"] = seeds_csv(comparison)
    return files
