"""Which formats there are, and writing them into a results folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qbench.compare import Comparison, compare
from qbench.errors import RecipeError
from qbench.store import Store, write_atomically
from qbench.tables.long import comma_separated
from qbench.tables.markdown import markdown
from qbench.tables.table import delta

FORMATS = ("md", "csv")


def render(comparison: Comparison, *, format: str = "md") -> str:
    """The delta tables of a comparison as text. Raises RecipeError for an unknown format."""
    if format == "md":
        return markdown(delta(comparison))
    if format == "csv":
        return comma_separated(comparison)
    raise RecipeError(f"--format {format}: unknown; possible: {', '.join(FORMATS)}")


def write_tables(
    store: Store, directory: Path | None = None, *, formats: Sequence[str] = ("md", "csv")
) -> list[Path]:
    """Write ``tables.<format>`` into ``directory`` (default: the results folder)."""
    directory = Path(directory or store.directory)
    comparison = compare(store)
    paths = []
    for format in formats:
        path = directory / f"tables.{format}"
        write_atomically(path, render(comparison, format=format).encode())
        paths.append(path)
    return paths
