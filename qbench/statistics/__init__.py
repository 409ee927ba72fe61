"""Paired statistics on per-document outcomes: intervals, tests, multiplicity, power.

Everything compares scores on the same documents. A score is made of Σ values / Σ weights over
documents: accuracies are that ratio, perplexities exp(−ratio), compared by their logarithm. An
effect is a sum with signs: Δ and damage have two terms, a difference-in-differences four.
"""

from qbench.statistics.effect import (
    TESTABLE,
    Effect,
    Missing,
    adjust,
    at_level,
    documents_for_margin,
    documents_needed,
    drawing_error,
    effect,
    effects,
    samples_needed,
)
from qbench.statistics.panel import KL_MEAN, LOG_MEAN, Column, Panel, joined
from qbench.statistics.seeds import Trainings, over_seeds, over_trainings
