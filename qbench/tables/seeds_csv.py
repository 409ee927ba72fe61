"""Effects over seeds as CSV: one row a question and group, in full precision."""

from __future__ import annotations

import csv
import io

from qbench.comparison.lines import QUESTIONS, Comparison
from qbench.text import for_csv

NAMES = {"scores": "score", "deltas": "delta", "damages": "damage", "differences": "did"}
COLUMNS = (
    *("task", "label", "metric", "direction", "quantizer", "method", "group", "question", "kind"),
    *("estimate", "stderr", "low", "high", "p", "p_holm", "p_bh", "of_seeds", "seeds"),
    *("documents", "each"),
)
FILE = "seeds.csv"


def seeds_csv(comparison: Comparison) -> str:
    """``kind`` says what the numbers are: a difference in the score's units, or a log ratio, of a
    score the logarithm itself. ``of_seeds``: share of the variance that comes of the seeds."""
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    for one in comparison.seeds:
        line = one.line
        for question in QUESTIONS:
            for group, effect in getattr(one, question).items():
                row = {
                    "task": line.task,
                    "label": line.label,
                    "metric": line.metric,
                    "direction": "up" if line.higher_is_better else "down",
                    "quantizer": line.quantizer,
                    "method": line.method,
                    "group": group,
                    "question": NAMES[question],
                    "each": " ".join(map(repr, effect.each)),
                }
                row |= {name: getattr(effect, name) for name in COLUMNS if name not in row}
                table.writerow({name: for_csv(value) for name, value in row.items()})
    return text.getvalue()
