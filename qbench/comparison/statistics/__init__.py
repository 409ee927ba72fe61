"""Paired statistics on per-document outcomes: intervals, tests, multiplicity, power.

Everything compares scores on the same documents. A score is g(Σ values / Σ weights) over
documents, which covers accuracies (g the identity), perplexities (exp −x) and bits per byte; an
effect is a sum of scores with signs: Δ and damage have two terms, a difference-in-differences
four. So one bootstrap of the documents serves all effects of a task.
"""

from qbench.comparison.statistics.bootstrap import ROUNDS, Resampled, resample
from qbench.comparison.statistics.effect import Effect, Interval, effect, score, value
from qbench.comparison.statistics.multiplicity import adjust
from qbench.comparison.statistics.noninferiority import Worsening, documents_needed, worsening
from qbench.comparison.statistics.panel import Column, Panel

__all__ = [
    "ROUNDS",
    "Column",
    "Effect",
    "Interval",
    "Panel",
    "Resampled",
    "Worsening",
    "adjust",
    "documents_needed",
    "effect",
    "resample",
    "score",
    "value",
    "worsening",
]
