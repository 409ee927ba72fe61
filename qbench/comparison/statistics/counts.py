"""Means of small integers: score intervals and exact tests from counts.

A right answer is 0 or 1; the change of an answer is −1, 0 or 1; the difference of two changes is
−2 … 2. All are counted as integers, so that a tie is a tie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from scipy import optimize, special


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p of McNemar's test: of gained + lost changes, each is a fair coin."""
    return min(1.0, 2 * float(special.bdtr(min(gained, lost), gained + lost, 0.5)))


def sign_flips(counts: Mapping[int, int]) -> float:
    """Exact two-sided p that the mean is 0, where each value is as likely as its negative.

    ``counts`` maps a value to the number of documents with it. For values of −1 and 1 this is
    McNemar's exact test; Fisher (1935), The Design of Experiments, section 21.
    """
    total = sum(value * count for value, count in counts.items())
    chances = np.ones(1)  # of the sums −reach … reach
    for size in {abs(value) for value in counts if value}:
        changes = counts.get(size, 0) + counts.get(-size, 0)
        up = np.arange(changes + 1)
        one = np.zeros(2 * size * changes + 1)
        one[2 * size * up] = np.exp(
            special.gammaln(changes + 1)
            - special.gammaln(up + 1)
            - special.gammaln(changes - up + 1)
            - changes * math.log(2)
        )
        chances = np.convolve(chances, one)
    sums = np.arange(len(chances)) - len(chances) // 2
    return min(1.0, float(chances[np.abs(sums) >= abs(total)].sum()))


def score_interval(
    counts: Mapping[int, int], *, lowest: int, highest: int, confidence: float
) -> tuple[float, float]:
    """Interval of the mean of a value between ``lowest`` and ``highest``, from its counts.

    The means that a score test does not reject, where the chances of the values are those of
    largest likelihood under that mean; Lang (2008), Statistics in Medicine 27: 5874–5890. It
    keeps its coverage with few or no changes. For values 0 and 1 it is Wilson's interval (1927),
    for −1, 0 and 1 Tango's (1998, Statistics in Medicine 17: 891–908).
    """
    z = float(special.ndtri((1 + confidence) / 2))
    span = highest - lowest
    risen = {value - lowest: count for value, count in counts.items() if count}
    fallen = {highest - value: count for value, count in counts.items() if count}
    return highest - _upper(fallen, span, z), lowest + _upper(risen, span, z)


def _upper(counts: Mapping[int, int], highest: int, z: float) -> float:
    """Upper end for values 0 … ``highest``.

    Under a mean above the observed one the chances of largest likelihood are proportional to
    count / (1 − tilt · value / highest), with tilt in [0, 1); where no document has the highest
    value, it takes what is left over at a tilt of 1. So ``path`` from 0 to 2 runs through all
    means from the observed one to ``highest``.
    """
    documents = sum(counts.values())
    mean = sum(value * count for value, count in counts.items()) / documents

    def moments(path: float) -> tuple[float, float]:
        tilt, rest = min(path, 1.0), max(path - 1.0, 0.0)
        if tilt == 1.0 and highest in counts:
            return float(highest), 0.0
        shares = {value: count / (1 - tilt * value / highest) for value, count in counts.items()}
        whole = sum(shares.values()) / (1 - rest) if rest < 1 else math.inf
        first = rest * highest + sum(v * s for v, s in shares.items()) / whole
        second = rest * highest**2 + sum(v * v * s for v, s in shares.items()) / whole
        return first, max(second - first**2, 0.0)

    def excess(path: float) -> float:
        first, variance = moments(path)
        return (first - mean) * math.sqrt(documents) - z * math.sqrt(variance)

    if mean == highest:
        return float(highest)
    start = 1e-9 if len(counts) > 1 else 1 + 1e-9  # where all are alike, no tilt moves the mean
    end = 1.0 if highest in counts else 2.0
    return moments(optimize.brentq(excess, start, end, xtol=1e-14))[0]
