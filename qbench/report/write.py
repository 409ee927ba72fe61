"""Write the report: one HTML file, and its figures as files of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from qbench import __version__
from qbench.compare import Comparison, compare
from qbench.errors import RecipeError
from qbench.report.content import data_tables
from qbench.report.figures import Drawn, draw
from qbench.report.style import inline, svg
from qbench.report.summary import summary
from qbench.store import Store, write_atomically

FIGURE_FORMATS = ("svg", "png", "pdf")
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
) -> list[Path]:
    """Write ``report.html`` and ``figures/*`` into ``out`` (default: the results folder).

    ``figures`` names the formats of the figure files; the page needs none of them. Raises
    RecipeError for an unknown format or published set, ResultsError for unreadable results.
    """
    unknown = [name for name in figures if name not in FIGURE_FORMATS]
    if unknown:
        raise RecipeError(f"--figures {unknown[0]}: unknown; possible: {', '.join(FIGURE_FORMATS)}")
    out = Path(out or store.directory)
    comparison = comparison or compare(store)
    drawn = draw(comparison)
    drawings = {one.name: svg(one.figure, name=one.name) for one in drawn}
    page = out / "report.html"
    write_atomically(page, render(comparison, drawn, drawings, published=published).encode())
    return [page, *_write_figures(drawn, drawings, out / "figures", figures)]


def render(
    comparison: Comparison,
    drawn: Sequence[Drawn],
    drawings: Mapping[str, str],
    *,
    published: str | None = None,
) -> str:
    """The page as text; it refers to nothing outside itself. ``drawings``: name → SVG."""
    templates = Environment(
        loader=PackageLoader("qbench.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    tables = data_tables(comparison, published=published)
    figures = [
        (one, Markup(inline(drawings[one.name], label=one.caption)))  # our own SVG
        for one in drawn
    ]
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
        sections=[section for section in sections if section[2] or section[3]],
        sentences=summary(comparison),
        problems=comparison.problems(),
        version=__version__,
        series=range(6),
    )


def _write_figures(
    drawn: Sequence[Drawn], drawings: Mapping[str, str], folder: Path, formats: Sequence[str]
) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for one in drawn:
        for format in formats:
            path = folder / f"{one.name}.{format}"
            if format == "svg":
                write_atomically(path, drawings[one.name].encode())
            else:
                metadata = {"CreationDate": None} if format == "pdf" else None
                one.figure.savefig(path, format=format, metadata=metadata)
            paths.append(path)
    return paths
