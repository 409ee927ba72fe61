"""How far batches alone moved scores, as ``qbench noise`` prints it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from qbench import text
from qbench.comparison.metrics import is_percentage
from qbench.text import MINUS, NO_VALUE, metric_title, number

if TYPE_CHECKING:
    from qbench.evaluation.noise import Moved

HEAD = ("Task", "Metric", "Batches", "Score", "Moved by", "Changed documents",
        "Largest change of a log-likelihood, nats", "Mean")  # fmt: skip


def table(moved: Iterable[Moved]) -> str:
    """Markdown: one line a metric and variation; accuracies in per cent and points."""
    rows = []
    for entry in moved:
        percent = is_percentage(entry.metric)
        changed = entry.changed_documents
        rows.append(
            [
                entry.task,
                metric_title(entry.metric),
                entry.variation,
                number(entry.score, percent=percent),
                _signed((entry.score - entry.base_score) * (100 if percent else 1)),
                NO_VALUE if changed is None else f"{changed} of {entry.documents}",
                f"{entry.largest_log_likelihood:.2g}".replace("-", MINUS),
                f"{entry.mean_log_likelihood:.2g}".replace("-", MINUS),
            ]
        )
    return text.table(HEAD, rows, align="lllrrrrr")


def _signed(value: float) -> str:
    """Two significant digits: a floor of 3e−8 is not 0."""
    return "0" if value == 0 else f"{value:+.2g}".replace("-", MINUS)
