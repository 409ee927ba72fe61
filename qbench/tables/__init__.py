"""Comparison → the paper's delta tables, in Markdown, CSV, LaTeX and HTML."""

from qbench.tables.table import Row, Table, delta
from qbench.tables.write import FORMATS, render, write_tables

__all__ = ["FORMATS", "Row", "Table", "delta", "render", "write_tables"]
