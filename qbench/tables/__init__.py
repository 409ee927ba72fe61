"""Comparison → the paper's delta tables, in Markdown, CSV, LaTeX and HTML."""

from qbench.tables.table import Table
from qbench.tables.write import FORMATS, render, table_files

__all__ = ["FORMATS", "Table", "render", "table_files"]
