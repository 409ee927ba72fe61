"""``report.html`` and its figures: everything that a results folder says, in one file."""

from qbench.report.summary import summary
from qbench.report.write import FIGURE_FORMATS, write

__all__ = ["FIGURE_FORMATS", "summary", "write"]
