"""Scores as ratios of sums over documents, and the standard error of a signed sum of them.

A score is a function of Σ values / Σ weights: that ratio itself for accuracies, exp(−ratio) for
perplexities. Perplexities are compared by their logarithm, −ratio, which is linear: differences
of it are logarithms of ratios of perplexities.
"""

from __future__ import annotations

import math

import numpy as np

from qbench.comparison.metrics import LOG_SCALE
from qbench.comparison.statistics.panel import Floats

# Aggregation → what is compared, as a multiple of Σ values / Σ weights.
SLOPES = {"mean": 1.0, "bits_per_byte": -1 / math.log(2), **dict.fromkeys(LOG_SCALE, -1.0)}
ROUNDING = 1e-12  # of sums of doubles, relative to their terms


def as_scored(ratio: Floats, aggregation: str) -> Floats:
    """What lm-eval makes of Σ values / Σ weights."""
    with np.errstate(over="ignore"):
        return np.exp(-ratio) if aggregation in LOG_SCALE else SLOPES[aggregation] * ratio


def contrast(
    values: Floats, weights: Floats, sign: Floats, aggregation: str
) -> tuple[float, float]:
    """Σ sign · score on the scale that is compared, and its standard error by the delta method.

    ``values`` and ``weights`` are [documents, columns]. Both are exactly 0 where the terms
    cancel up to rounding. Accuracies of as many documents are subtracted as counts.
    """
    total, weight = values.sum(axis=0), weights.sum(axis=0)
    ratio, slope = total / weight, SLOPES[aggregation]
    if np.all(weight == weight[0]):
        estimate = slope * float(total @ sign) / float(weight[0])
    else:
        estimate = slope * float(ratio @ sign)
    terms = _shares(values, weights, sign, slope)
    stderr = _length(terms.sum(axis=1))
    if abs(estimate) <= ROUNDING * abs(slope) * float(np.abs(ratio) @ np.abs(sign)):
        estimate = 0.0
    return estimate, 0.0 if stderr <= ROUNDING * _length(terms) else stderr


def shares(values: Floats, weights: Floats, sign: Floats, aggregation: str) -> Floats:
    """Each document's share of the error of :func:`contrast`: [documents], 0 in sum but for
    leverage."""
    return _shares(values, weights, sign, SLOPES[aggregation]).sum(axis=1)


def effective_documents(weights: Floats) -> float:
    """Equally long documents that would tell as much: (Σw)² / Σw², by Kish; at least 2."""
    return max(2.0, float(np.min(weights.sum(axis=0) ** 2 / np.sum(weights**2, axis=0))))


def _length(terms: Floats) -> float:
    documents = len(terms)
    return math.sqrt((documents - 1) / documents * float(np.sum(terms**2)))


def _shares(values: Floats, weights: Floats, sign: Floats, slope: float) -> Floats:
    """Linearization of a ratio of sums (delta method), over 1 − a document's leverage, since a
    long page pulls the ratio towards itself: [documents, columns]."""
    total, weight = values.sum(axis=0), weights.sum(axis=0)
    terms = (values - total / weight * weights) / (1 - weights / weight)
    return terms * (slope * sign / weight)
