"""Write the report: one HTML file, and its figures as files of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from qbench import __version__
from qbench.comparison.changes import training_notes
from qbench.comparison.compare import compare
from qbench.comparison.lines import Comparison
from qbench.errors import RecipeError
from qbench.files import write_atomically
from qbench.report import why
from qbench.report.figures import Plate, groups, plates
from qbench.report.style import inline
from qbench.report.tables import DataTable, data_tables, headline, notes, seed_summary
from qbench.store import Store
from qbench.viewer.summary import summary

FIGURE_FORMATS = ("svg", "png", "pdf")
SECTIONS = {
    "seeds": "Over seeds",
    "damage": "Damage",
    "scores": "Scores",
    "distributions": "Divergence and flips",
    "why": "Why",
    "costs": "Size, time and memory",
    "audit": "Audit",
    "settings": "Settings",
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
    """Write ``report.html``, ``figures/*`` and the numbers behind them that no other file has into
    ``out`` (default: the results folder).

    ``figures`` names the formats of the figure files; the page needs none of them. Raises
    RecipeError for an unknown format or published set, ResultsError for unreadable results.
    """
    unknown = [name for name in figures if name not in FIGURE_FORMATS]
    if unknown:
        raise RecipeError(f"--figures {unknown[0]}: unknown; possible: {', '.join(FIGURE_FORMATS)}")
    out = Path(out or store.place())
    comparison = comparison or compare(store)
    tables = data_tables(comparison, published=published)
    drawn = plates(groups(comparison), out / "figures", figures)
    found, broken = why.read(store)
    numbers: list[Path] = []
    if found is not None:
        tables += why.why_tables(found)
        drawn += why.why_plates(store, found, out / "figures", figures)
        numbers = why.write_numbers(store, found, out)
    page = out / "report.html"
    name = store.directory.resolve().name + (f", run {store.run}" if store.run else "")
    text = render(comparison, tables, drawn, name=name, told={why.SECTION: broken})
    write_atomically(page, text.encode())
    return [page, *numbers, *(path for one in drawn for path in one.paths)]


CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # of foreign names; no browser wants them


def render(
    comparison: Comparison,
    tables: Sequence[DataTable],
    drawn: Sequence[Plate],
    *,
    name: str,
    told: Mapping[str, list[str]] | None = None,
) -> str:
    """The page of the results ``name`` as text; it refers to nothing outside itself. ``told``:
    further lines of sections."""
    templates = Environment(
        loader=PackageLoader("qbench.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters["breakable"] = _breakable
    figures = [(one, Markup(inline(one.svg, label=one.caption))) for one in drawn]  # our own SVG
    told = notes(comparison) | dict(told or {})
    sections = [
        {
            "name": name,
            "title": title,
            "notes": told.get(name, []),
            "tables": [table for table in tables if table.section == name],
            "figures": [figure for figure in figures if figure[0].section == name],
        }
        for name, title in SECTIONS.items()
    ]
    text = templates.get_template("report.html").render(
        comparison=comparison,
        compared=_compared(comparison),
        name=name,
        headline=headline(comparison),
        sections=[one for one in sections if one["tables"] or one["figures"] or one["notes"]],
        sentences=[
            *(seed_summary(comparison) if comparison.seeds else summary(comparison)),
            *training_notes(comparison),
        ],
        problems=comparison.problems(),
        version=__version__,
    )
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def _compared(comparison: Comparison) -> str:
    """Checkpoints by name, several trainings of one kind as one."""
    several = comparison.grid.replicates
    told = (f"{name} ({len(several[name])} trainings)" if several else name
            for name in comparison.groups)  # fmt: skip
    return " and ".join(told)


def _breakable(text: str) -> Markup:
    """Long names and paths may break after an underscore or a slash."""
    found = escape(text)
    for sign in "_/":
        found = found.replace(sign, Markup(f"{sign}<wbr>"))
    return found
