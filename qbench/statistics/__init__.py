"""Paired statistics on per-document outcomes: intervals, tests, multiplicity, power.

Everything compares scores on the same documents. A score is made of Σ values / Σ weights over
documents: accuracies are that ratio, perplexities exp(−ratio), compared by their logarithm. An
effect is a sum with signs: Δ and damage have two terms, a difference-in-differences four. So one
bootstrap of the documents serves all effects of a task.
"""

from qbench.statistics.effect import (
    TESTABLE,
    Effect,
    Interval,
    Regression,
    adjust,
    documents_needed,
    effect,
    needs_rounds,
    score,
    value,
    worsening,
)
from qbench.statistics.panel import Column, Panel, joined, resample
from qbench.statistics.seeds import SeedEffect, mean_score, over_seeds

__all__ = [
    "TESTABLE",
    "Column",
    "Effect",
    "Interval",
    "Panel",
    "Regression",
    "SeedEffect",
    "adjust",
    "documents_needed",
    "effect",
    "joined",
    "mean_score",
    "needs_rounds",
    "over_seeds",
    "resample",
    "score",
    "value",
    "worsening",
]
