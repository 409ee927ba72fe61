"""Paired right-or-wrong answers: McNemar's exact test and Tango's score interval."""

from __future__ import annotations

import math

from scipy import optimize, special


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p of McNemar's test: of gained + lost changes, each is a fair coin."""
    return min(1.0, 2 * float(special.bdtr(min(gained, lost), gained + lost, 0.5)))


def score_interval(
    gained: int, lost: int, documents: int, *, confidence: float
) -> tuple[float, float]:
    """Interval of (gained − lost) / documents that keeps its coverage with few or no changes.

    Tango (1998), Statistics in Medicine 17: 891–908: the differences that a score test with the
    restricted maximum likelihood of the discordant cells does not reject.
    """
    z = float(special.ndtri((1 + confidence) / 2))
    high = _upper(gained, lost, documents, z)
    return -_upper(lost, gained, documents, z), high


def _upper(gained: int, lost: int, documents: int, z: float) -> float:
    def excess(difference: float) -> float:
        # Restricted maximum likelihood of P(lost) given P(gained) − P(lost) = difference.
        a = 2 * documents
        b = -gained - lost + (2 * documents - gained + lost) * difference
        c = -lost * difference * (1 - difference)
        share = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
        variance = documents * max(2 * share + difference * (1 - difference), 0.0)
        return gained - lost - documents * difference + z * math.sqrt(variance)

    estimate = (gained - lost) / documents
    if excess(1.0) >= 0:
        return 1.0
    # A hair above the estimate: with no change at all, excess is 0 there as well.
    return float(optimize.brentq(excess, estimate + 1e-9, 1.0))
