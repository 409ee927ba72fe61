"""Paired statistics on per-document outcomes: intervals, tests, multiplicity, power."""

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
    untestable,
)
from qbench.statistics.panel import KL_MEAN, LOG_MEAN, Column, Panel, joined
from qbench.statistics.seeds import Trainings, over_seeds, over_trainings
