"""``report.html`` and its figures: everything that a results folder says, in one file."""

from qbench.report.write import FIGURE_FORMATS, write
from qbench.viewer.summary import summary

__all__ = ["FIGURE_FORMATS", "summary", "write"]
