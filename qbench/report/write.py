"""Write the report: one HTML file, and its figures as files of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from qbench import __version__
from qbench.comparison.compare import compare
from qbench.comparison.lines import Comparison
from qbench.errors import RecipeError
from qbench.record import Grid
from qbench.report.content import DataTable, data_tables
from qbench.report.drawing import Plate, helper, plates
from qbench.report.style import inline
from qbench.report.summary import summary
from qbench.store import Store, write_atomically

FIGURE_FORMATS = ("svg", "png", "pdf")
SHARED_FROM = 100  # scores (cells × tasks) × formats
SECTIONS = {
    "scores": "Scores",
    "damage": "Damage",
    "distributions": "Divergence and flips",
    "costs": "Size, time and memory",
    "audit": "Audit",
    "provenance": "Provenance",
}


def write(
    store: Store,
    out: Path | None = None,
    *,
    figures: Sequence[str] = FIGURE_FORMATS,
    published: str | None = None,
    comparison: Comparison | None = None,
    processes: int = 1,
) -> list[Path]:
    """Write ``report.html`` and ``figures/*`` into ``out`` (default: the results folder).

    ``figures`` names the formats of the figure files; the page needs none of them. With two
    ``processes`` half of the figures of a large grid are drawn beside the others; as with any
    process that Python spawns, a script that asks for it needs ``if __name__ == "__main__"``.
    Raises RecipeError for an unknown format or published set, ResultsError for unreadable results,
    UnavailableError where the second process dies.
    """
    unknown = [name for name in figures if name not in FIGURE_FORMATS]
    if unknown:
        raise RecipeError(f"--figures {unknown[0]}: unknown; possible: {', '.join(FIGURE_FORMATS)}")
    out = Path(out or store.directory)
    shared = processes > 1 and worth_sharing(store.grid(), figures)
    with helper() if shared else nullcontext() as other:
        comparison = comparison or compare(store)
        tables = data_tables(comparison, published=published)
        drawn = (other.plates if other else plates)(comparison, out / "figures", figures)
    page = out / "report.html"
    name = store.directory.resolve().name
    write_atomically(page, render(comparison, tables, drawn, name=name).encode())
    return [page, *(path for one in drawn for path in one.paths)]


def worth_sharing(grid: Grid, figures: Sequence[str]) -> bool:
    """Whether a second process saves more time than it takes to start."""
    files = sum(name != "svg" for name in figures)  # the page has to draw these itself
    return files * len(grid.cells) * len(grid.tasks) >= SHARED_FROM


def render(
    comparison: Comparison, tables: Sequence[DataTable], drawn: Sequence[Plate], *, name: str
) -> str:
    """The page of the results ``name`` as text; it refers to nothing outside itself."""
    templates = Environment(
        loader=PackageLoader("qbench.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    figures = [(one, Markup(inline(one.svg, label=one.caption))) for one in drawn]  # our own SVG
    sections = [
        (
            name,
            title,
            [figure for figure in figures if figure[0].section == name],
            [table for table in tables if table.section == name],
        )
        for name, title in SECTIONS.items()
    ]
    return templates.get_template("report.html").render(
        comparison=comparison,
        name=name,
        sections=[section for section in sections if section[2] or section[3]],
        sentences=summary(comparison),
        problems=comparison.problems(),
        version=__version__,
        series=range(6),
    )
