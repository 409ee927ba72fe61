"""Delta tables as one HTML page that stands alone."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader

from qbench.tables.layout import WORDS, Layout


def page(tables: Sequence[Layout], *, title: str) -> str:
    """A page with every table, readable without style sheet, script or network."""
    templates = Environment(loader=PackageLoader("qbench.tables"), autoescape=True)
    return templates.get_template("tables.html").render(tables=tables, title=title, words=WORDS)
