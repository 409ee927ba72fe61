"""Score test and score interval of the mean of a bounded value, such as right-or-wrong answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import optimize, special

from qbench.statistics.panel import Floats

FEW = 8  # values, for which Python's sums take a tenth of NumPy's time


@dataclass(frozen=True, kw_only=True, eq=False)
class Counts:
    """Hold ``counts[i]`` documents with the value ``values[i]``, sorted, within [``lowest``,
    ``highest``]."""

    values: Floats
    counts: Floats
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Floats, *, lowest: float, highest: float) -> Counts:
        unique, counts = np.unique(values, return_counts=True)
        return cls(values=unique, counts=counts.astype(float), lowest=lowest, highest=highest)

    @cached_property
    def pairs(self) -> list[tuple[float, float]]:
        """Return each value with its count."""
        return list(zip(self.values.tolist(), self.counts.tolist(), strict=True))

    @cached_property
    def documents(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def mean(self) -> float:
        # Sums of fractions that cancel are 0.
        mean = float(self.values @ self.counts) / self.documents
        scale = float(np.abs(self.values) @ self.counts) / self.documents
        return 0.0 if abs(mean) <= 1e-12 * scale else mean

    @property
    def mean_square(self) -> float:
        return float(self.values**2 @ self.counts) / self.documents


def score_interval(data: Counts, confidence: float) -> tuple[float, float]:
    """Return the lowest and the highest mean that a two-sided score test does not reject.

    The values' probabilities maximize the likelihood under the tested mean; Lang (2008),
    Statistics in Medicine 27: 5874–5890. It keeps its coverage with few or no changes. For values
    0 and 1 it is Wilson's interval (1927), for −1, 0 and 1 Tango's (1998, Statistics in Medicine
    17: 891–908).
    """
    z = float(special.ndtri((1 + confidence) / 2))
    rise, fall = _from_lowest(data), _from_highest(data)
    return data.highest - _upper(fall, z), data.lowest + _upper(rise, z)


def score_p(data: Counts) -> float:
    """Return the two-sided p of a mean of 0, by the test that ``score_interval`` inverts.

    For values −1, 0 and 1 it is McNemar's test without correction for continuity.
    """
    mean = data.mean
    if mean == 0:
        return 1.0
    if mean < 0:
        path_to, shifted = -data.lowest, _from_lowest(data)
    else:
        path_to, shifted = data.highest, _from_highest(data)
    if path_to >= shifted.highest:  # 0 is the end of the range
        return 0.0
    path = optimize.brentq(
        lambda path: _moments(shifted, path)[0] - path_to, 0.0, _last(shifted), xtol=1e-14
    )
    variance = _moments(shifted, path)[1]
    if variance <= 0:
        return 0.0
    return float(2 * special.ndtr(-abs(mean) * math.sqrt(data.documents / variance)))


def _from_lowest(data: Counts) -> Counts:
    span = data.highest - data.lowest
    return Counts(values=data.values - data.lowest, counts=data.counts, lowest=0.0, highest=span)


def _from_highest(data: Counts) -> Counts:
    span = data.highest - data.lowest
    values, counts = (data.highest - data.values)[::-1], data.counts[::-1]
    return Counts(values=values, counts=counts, lowest=0.0, highest=span)


def _last(data: Counts) -> float:
    return 1.0 if data.values[-1] == data.highest else 2.0


def _moments(data: Counts, path: float) -> tuple[float, float]:
    """Return mean and variance of the values 0 … ``highest`` at a point of the ``path``.

    Under a mean above the observed one the chances of largest likelihood are proportional to
    count / (1 − tilt · value / highest), with tilt in [0, 1). If no document has the highest
    value, that value takes what is left over at a tilt of 1. So the path from 0 to 2 runs through
    all means from the observed one to ``highest``.
    """
    highest, values = data.highest, data.values
    tilt, rest = (path, 0.0) if path < 1.0 else (1.0, path - 1.0)
    if rest >= 1.0 or (tilt == 1.0 and values[-1] == highest):
        return highest, 0.0
    if len(values) > FEW:
        shares = data.counts / (1 - tilt * values / highest)
        sums = float(shares.sum()), float(values @ shares), float(values**2 @ shares)
    else:
        sums = [0.0, 0.0, 0.0]
        slope = tilt / highest
        for value, count in data.pairs:
            share = count / (1 - slope * value)
            sums[0] += share
            sums[1] += value * share
            sums[2] += value * value * share
    total = sums[0] / (1 - rest)
    first = rest * highest + sums[1] / total
    second = rest * highest**2 + sums[2] / total
    return first, max(second - first**2, 0.0)


def _upper(data: Counts, z: float) -> float:
    """Return the upper end of the interval of values 0 … ``highest``."""
    mean, root = data.mean, math.sqrt(data.documents)
    if mean >= data.highest:
        return data.highest

    def excess(path: float) -> float:
        first, variance = _moments(data, path)
        return (first - mean) * root - z * math.sqrt(variance)

    start = 1e-9 if len(data.values) > 1 else 1 + 1e-13  # if all are alike, no tilt moves the mean
    return _moments(data, optimize.brentq(excess, start, _last(data), xtol=1e-14))[0]


def detectable_mean(mean_square: float, documents: int, *, reach: float, level: float,
                    power: float) -> float:  # fmt: skip
    """Return the smallest mean that the score test at ``level`` finds with ``power``.

    Documents' values have the ``mean_square`` that was seen, and at most ``reach`` in size
    (Connor 1987, Biometrics 43: 207–211). If so few changed that none would be found even if all
    changed in one direction, as many more change as are needed.
    """
    critical, beyond = float(special.ndtri(1 - level / 2)), float(special.ndtri(power))
    # The fewest changes, all in one direction and as large as can be, that are significant.
    fewest = math.floor(critical**2) + 1
    if fewest > documents:
        return math.inf
    least = reach * float(special.bdtri(fewest - 1, documents, 1 - power))
    if mean_square <= least * reach:
        return least

    def excess(mean: float) -> float:
        rest = max(mean_square - mean**2, 0.0)
        needed = critical * math.sqrt(mean_square) + beyond * math.sqrt(rest)
        return mean * math.sqrt(documents) - needed

    most = math.sqrt(mean_square)
    return most if excess(most) < 0 else float(optimize.brentq(excess, 0.0, most))
