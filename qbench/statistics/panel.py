"""Outcomes of several cells on the same documents, and contrasts of their scores.

A score is a function of Σ values / Σ weights: that ratio itself for accuracies, exp(−ratio) for
perplexities. Perplexities are compared by their logarithm, −ratio, which is linear: differences
of it are logarithms of ratios of perplexities. So is KL divergence: its contrasts are of ln(mean).

Intervals and tests of these are by the bootstrap-t; of the mean of a bounded value, such as
right-or-wrong answers, by the score test. ``scipy.stats.bootstrap`` draws anew for each statistic
and holds rounds × documents × columns; a grid has hundreds of contrasts over the same documents.
Here a round is a vector of counts (how often each document was drawn), and one matrix product gives
the sums of every column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special

from qbench.metrics import KL_MEAN, LOG_MEAN, LOG_SCALE

Floats = NDArray[np.float64]
K = TypeVar("K")


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Hold one metric of one cell, summed by document.

    ``documents`` is sorted and unique; ``values`` and ``weights`` are sums over the document's
    rows, so that a document with several rows is one unit (cluster) of every statistic.
    """

    documents: NDArray
    values: Floats
    weights: Floats

    @classmethod
    def of(cls, document: ArrayLike, value: ArrayLike, weight: ArrayLike) -> Column:
        documents, values, weights = map(np.asarray, (document, value, weight))
        if documents.dtype.kind == "i" and (np.diff(documents) > 0).all():  # as results have them
            return cls(
                documents=documents, values=values.astype(float), weights=weights.astype(float)
            )
        documents, index = _unique(documents)
        return cls(
            documents=documents,
            values=np.bincount(index, values.astype(float), len(documents)),
            weights=np.bincount(index, weights.astype(float), len(documents)),
        )

    def only(self, documents: NDArray) -> Column:
        """Return the column on ``documents``, all of which it must have."""
        if documents is self.documents or np.array_equal(documents, self.documents):
            return self
        index = np.searchsorted(self.documents, documents)
        return Column(documents=documents, values=self.values[index], weights=self.weights[index])


def _unique(documents: NDArray) -> tuple[NDArray, NDArray]:
    """Return the sorted distinct documents, and the index of each document among them."""
    if documents.dtype.kind != "U":
        return np.unique(documents, return_inverse=True)
    return _unique_names(documents.tobytes(), documents.dtype)


@lru_cache(maxsize=4)
def _unique_names(names: bytes, dtype: np.dtype) -> tuple[NDArray, NDArray]:
    """Keep what sorting took: all cells of a results folder have the same names of documents."""
    return np.unique(np.frombuffer(names, dtype), return_inverse=True)


def with_shared_documents(columns: Mapping[K, Column]) -> dict[K, Column]:
    """Return the columns with one array for all that have the same documents: comparing two arrays
    of names takes longer than an effect, and a results folder has thousands."""
    arrays: list[NDArray] = []
    shared: dict[K, Column] = {}
    for name, column in columns.items():
        same = (each for each in arrays if np.array_equal(each, column.documents))
        if (documents := next(same, None)) is None:
            arrays.append(documents := column.documents)
        shared[name] = replace(column, documents=documents)
    return shared


def joined(columns: Mapping[str, Column]) -> Column:
    """Return the documents of several tasks (by name) as one column."""
    parts = [
        [f"{task} {document}" for document in column.documents] for task, column in columns.items()
    ]
    return Column.of(
        np.concatenate(parts),
        np.concatenate([column.values for column in columns.values()]),
        np.concatenate([column.weights for column in columns.values()]),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Panel:
    """Hold columns on the same documents: ``values`` and ``weights`` are [documents, columns]."""

    values: Floats
    weights: Floats
    index: dict[object, int] = field(default_factory=dict)  # column's name → its index

    @classmethod
    def of(cls, columns: dict[object, Column]) -> Panel:
        """Return the columns on the documents that all of them have."""
        first, *others = columns.values()
        shared = first.documents
        for column in others:
            if column.documents is not shared and not np.array_equal(shared, column.documents):
                shared = np.intersect1d(shared, column.documents, assume_unique=True)
        cut = [column.only(shared) for column in columns.values()]
        return cls(
            values=np.stack([column.values for column in cut], axis=1),
            weights=np.stack([column.weights for column in cut], axis=1),
            index={name: index for index, name in enumerate(columns)},
        )

    @property
    def documents(self) -> int:
        return len(self.values)


# Aggregation → the slope of what is compared, on Σ values / Σ weights.
INFLUENCE = {
    "mean": 1.0,
    "bits_per_byte": -1 / math.log(2),
    **dict.fromkeys(LOG_SCALE, -1.0),
}
ROUNDING = 1e-12  # of sums of doubles, relative to their terms


def is_logarithm(aggregation: str) -> bool:
    """Return whether scores are compared by their ratio, that is by the difference of
    logarithms."""
    return aggregation in (*LOG_SCALE, LOG_MEAN, KL_MEAN)


def as_scored(ratio: Floats, aggregation: str) -> Floats:
    """Return what lm-eval makes of Σ values / Σ weights."""
    if aggregation in (LOG_MEAN, KL_MEAN):
        return ratio
    with np.errstate(over="ignore"):
        return np.exp(-ratio) if aggregation in LOG_SCALE else INFLUENCE[aggregation] * ratio


def estimate_contrast(
    values: Floats, weights: Floats, sign: Floats, aggregation: str
) -> tuple[float, float, Floats]:
    """Return Σ sign · score on the scale that is compared, its standard error, and each document's
    share of the error [documents], which add up to 0 but for leverage.

    ``values`` and ``weights`` are [documents, columns]. The error is by the delta method; estimate
    and error are exactly 0 if the terms cancel up to rounding. Accuracies of equally many documents
    are subtracted as counts.
    """
    total, weight = values.sum(axis=0), weights.sum(axis=0)
    ratio = total / weight
    by_column = _shares(values, weights, sign, aggregation)
    terms = by_column.sum(axis=1)
    stderr = error_of(terms)
    stderr = 0.0 if stderr <= ROUNDING * error_of(by_column) else stderr
    if aggregation == LOG_MEAN:
        return float(np.log(ratio) @ sign), stderr, terms
    slope = INFLUENCE[aggregation]
    if np.all(weight == weight[0]):
        estimate = slope * float(total @ sign) / float(weight[0])
    else:
        estimate = slope * float(ratio @ sign)
    if abs(estimate) <= ROUNDING * abs(slope) * float(np.abs(ratio) @ np.abs(sign)):
        estimate = 0.0
    return estimate, stderr, terms


def effective_documents(weights: Floats) -> float:
    """Return how many equally long documents would tell as much: (Σw)² / Σw², by Kish; at least
    2."""
    return max(2.0, float(np.min(weights.sum(axis=0) ** 2 / np.sum(weights**2, axis=0))))


def error_of(terms: Floats) -> float:
    """Return the standard error from documents' shares of it, ``terms`` [documents]."""
    documents = len(terms)
    return math.sqrt((documents - 1) / documents * float(np.sum(terms**2)))


def _shares(values: Floats, weights: Floats, sign: Floats, aggregation: str) -> Floats:
    """Linearize a ratio of sums (delta method): [documents, columns].

    Each document's share is divided by 1 − its leverage, since a long page pulls the ratio
    towards itself.
    """
    total, weight = values.sum(axis=0), weights.sum(axis=0)
    ratio = total / weight
    slope = 1 / ratio if aggregation == LOG_MEAN else INFLUENCE[aggregation]
    terms, room = ratio * weights, weights / weight
    np.subtract(values, terms, out=terms)  # in place: fresh memory takes longer than the sums
    terms /= np.subtract(1, room, out=room)
    terms *= slope * sign / weight
    return terms


# --- compute intervals and tests by the bootstrap-t, of perplexities and KL divergences


ROUNDS = 10_000
LEAST_ROUNDS = 2_000  # of many documents
DRAWS = 2_000_000  # documents drawn in all rounds together, but for LEAST_ROUNDS
MOST_DOCUMENTS = 1_000  # of more of equal weight Student's t is as good
CHUNK = 1_000_000  # drawn documents of one matrix product; those of fewer rounds are slow
COUNTED = 50_000  # drawn documents counted at once: their counts stay in a processor's cache


def drawn_sums(rows: Floats) -> Floats:
    """Return sums over documents drawn with replacement, [rounds, columns], of ``rows``
    [documents, columns]. The rounds are the same in every call."""
    documents = len(rows)
    rounds = int(min(ROUNDS, max(LEAST_ROUNDS, DRAWS / documents)))
    if documents * rounds <= 2 * DRAWS:
        return _all_counts(documents, rounds) @ rows
    sums, rng = np.empty((rounds, rows.shape[1])), np.random.default_rng(0)
    step = max(1, CHUNK // documents)
    for start in range(0, rounds, step):
        size = min(step, rounds - start)
        sums[start : start + size] = _counts(documents, size, rng) @ rows
    return sums


@lru_cache(maxsize=2)
def _all_counts(documents: int, rounds: int) -> Floats:
    """Keep the counts: hundreds of effects over the same documents are drawn alike."""
    return _counts(documents, rounds, np.random.default_rng(0))


def _counts(documents: int, rounds: int, rng: np.random.Generator) -> Floats:
    """Return how often each document is drawn, [rounds, documents]."""
    counts = np.empty((rounds, documents))
    step = max(1, COUNTED // documents)
    for start in range(0, rounds, step):
        size = min(step, rounds - start)
        drawn = rng.integers(0, documents, size=(size, documents), dtype=np.int32)
        drawn += (np.arange(size, dtype=np.int32) * documents)[:, None]
        drawn_counts = np.bincount(drawn.ravel(), minlength=size * documents)
        counts[start : start + size] = drawn_counts.reshape(size, documents)
    return counts


ENOUGH_TO_DRAW = 10  # documents; of fewer, many rounds draw one document alone
# An end of the interval may be this many times as far as the document that is farthest from the
# mean. In simulations with 16 pages and damage in proportion to length the interval covers 79 % if
# an end may be once as far, 89 % if twice: longer pages than those drawn have more damage.
TWICE = 2
FARTHEST = 3.0  # normal quantile up to which rounds are counted; beyond, in proportion


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Studentized:
    """How (estimate − truth) / standard error is spread, by the bootstrap-t (Efron and Tibshirani
    1993, section 12.5; Hall 1992, section 3.2), for a ratio of sums over documents.

    If damage depends on a document's length, few long documents decide the sum, and Student's t
    covers too little on one side. ``quantiles`` are those of the bootstrap's rounds at the normal
    quantiles ``NORMAL``. The percentiles are moved outwards, since the bootstrap's variance is too
    small and Student's t is wider than the normal (Hesterberg 2015, section 3.3); ``freedom`` are
    the degrees of freedom of that t.

    Both ends lie at least as far as Student's t puts them, since skewness that is estimated from
    some dozens of documents is mostly noise. They lie at most twice as far as any document: if few
    documents changed, some rounds draw none of them and have a standard error of 0.

    Coverage in percent of 95 % intervals, of 2,000 simulations each; lengths are lognormal:

    ================================== ======== ======== ========
    Damage of a token                  16 pages 62 pages 200 pages
    ================================== ======== ======== ========
    not by length, lengths' spread 0.5    99.0     96.6     96.7
    not by length, spread 1.0             99.5     97.4     97.2
    not by length, t(3), spread 1.0       99.5     98.3     97.0
    by log of length, spread 0.5          97.7     97.0     96.3
    by log of length, spread 0.74         96.7     96.8     96.0
    by log of length, spread 1.0          95.0     94.8     95.6
    the same with t(3), spread 1.0        97.0     95.3     96.1
    falls by log of length, spread 1.0    95.0     94.5     95.4
    in proportion to length, spread 0.5   95.5     95.9     95.9
    HQQ-2bit on WikiText, pages drawn     98.3     94.2     95.4
    ================================== ======== ======== ========

    Where a token's damage grows in proportion to length and lengths differ more, no interval from
    so few pages holds: 91.5, 93.2 and 93.6 % at a spread of 0.74, 86 to 90 % at 1.0.
    """

    estimate: float
    stderr: float
    quantiles: Floats
    freedom: float
    farthest: float  # largest distance of an end by the bootstrap, in standard errors
    missed: tuple[float, float] = (0.0, 0.0)  # how much farther the two ends are, see MISSED_NATS

    def interval(self, confidence: float) -> tuple[float, float]:
        reach = float(special.stdtrit(self.freedom, (1 + confidence) / 2))
        low = min(-reach, self._quantile(-reach * self._stretch))
        high = max(reach, self._quantile(reach * self._stretch))
        below, above = self.missed
        return (
            self.estimate - high * self.stderr - below,
            self.estimate - low * self.stderr + above,
        )

    def p(self) -> float:
        """Return the two-sided p: one minus the confidence of the interval that just reaches 0."""
        below, above = self.missed
        seen = max(0.0, self.estimate - below, -self.estimate - above) / self.stderr
        seen = math.copysign(seen, self.estimate)
        if abs(seen) >= self.farthest:
            normal = math.inf
        elif self.quantiles[0] <= seen <= self.quantiles[-1]:
            normal = abs(float(np.interp(seen, self.quantiles, NORMAL)))
        else:
            normal = FARTHEST * abs(seen / self.quantiles[-1 if seen > 0 else 0])
        return float(2 * special.stdtr(self.freedom, -min(abs(seen), normal / self._stretch)))

    def _quantile(self, normal: float) -> float:
        quantile = float(np.interp(normal, NORMAL, self.quantiles)) * max(1, abs(normal) / FARTHEST)
        return min(max(quantile, -self.farthest), self.farthest)

    @property
    def _stretch(self) -> float:
        return math.sqrt((self.freedom + 1) / self.freedom)


def degrees_of_freedom(weights: Floats, kurtosis: float) -> float:
    """Return the degrees of freedom of the standard error of a ratio of sums over documents of
    ``weights`` [documents]; at least 1.

    1/ν = 1/(m − 1) + (k − 1)/2n: m as many equally long documents, and k the kurtosis of the n
    documents' shares, since the variance of a variance is (k − 1)/n of its square (Satterthwaite
    1946, Biometrics Bulletin 2: 110–114; Box 1953, Biometrika 40: 318–335).
    """
    of_lengths = 1 / (effective_documents(weights[:, None]) - 1)
    return max(1.0, 1 / (of_lengths + (kurtosis - 1) / (2 * len(weights))))


UNSEEN = 3.0  # documents as far as the farthest that a sample may have missed
# KL divergence of one document that a sample may have missed: nats, or times the sample's mean.
MISSED_NATS = 0.2
MISSED_TIMES = 10.0
NORMAL = np.linspace(-FARTHEST, FARTHEST, 121)


def studentize(
    values: Floats, weights: Floats, *, estimate: float, stderr: float
) -> Studentized | None:
    """Studentize ``estimate`` = Σ ``values`` / Σ ``weights``, both [documents], with its
    ``stderr``.

    None if Student's t is as good or better: a standard error of 0, fewer than ``ENOUGH_TO_DRAW``
    documents, more than ``MOST_DOCUMENTS`` of one weight.
    """
    documents = len(values)
    alike = bool(np.all(weights == weights[0]))
    if documents < ENOUGH_TO_DRAW or stderr == 0 or (alike and documents > MOST_DOCUMENTS):
        return None
    rest, length = values - values.sum() / weights.sum() * weights, weights / weights.mean()
    rest = rest / math.sqrt(float(np.mean(rest**2)))
    rows = np.stack([rest, length, rest**2, rest * length, length**2], axis=1)
    sums = drawn_sums(rows).T
    ratio = sums[0] / sums[1]
    # A round's own spread: 0 if it drew one document alone, which is as far as any round goes.
    spread = np.sqrt(np.maximum(sums[2] - 2 * ratio * sums[3] + ratio**2 * sums[4], 1e-12))
    rates = values[weights > 0] / weights[weights > 0]
    farthest = float(TWICE * np.abs(rates - estimate).max() / stderr)
    *_, terms = estimate_contrast(values[:, None], weights[:, None], np.ones(1), "mean")
    return _studentized(estimate, stderr, sums[0] / spread, weights, terms, farthest)


def studentize_log_mean(
    values: Floats, sign: Floats, *, kl: bool, contrast: tuple[float, float, Floats] | None = None
) -> Studentized | None:
    """Studentize Σ sign · ln(mean of a column) of ``values`` [documents, columns], such as the
    logarithm of a KL divergence or of a ratio of two.

    A few documents may have much of all KL: of one int8 copy one document of 200 has 14 %, of
    another one of 5,215 has 6 %. A sample without them does not show it. So with ``kl`` the ends
    move by what one more document would change whose KL is ``MISSED_NATS`` or ``MISSED_TIMES`` the
    mean, whichever is more: little for copies of 4 bits, much for few documents of a nearly
    lossless copy. In simulations from real runs' documents (20 to 1,000 drawn of them) the 95 %
    interval then covers 95 % or more (docs/simulate.py). Without ``kl`` the standard error counts
    the farthest document on either side ``UNSEEN`` times more. None if the error is 0 or there are
    too few documents. ``contrast`` is what ``estimate_contrast`` returns, if it is computed.
    """
    documents = len(values)
    weights = np.ones(documents)
    estimate, stderr, terms = contrast or estimate_contrast(
        values, np.ones_like(values), sign, LOG_MEAN
    )
    if documents < ENOUGH_TO_DRAW or stderr == 0:
        return None
    missed = 0.0, 0.0
    if kl:
        more = np.log1p(np.maximum(MISSED_TIMES, MISSED_NATS / values.mean(axis=0)) / documents)
        missed = float(more @ np.maximum(-sign, 0)), float(more @ np.maximum(sign, 0))
    else:
        stderr = math.sqrt(stderr**2 + UNSEEN * float(terms.max() ** 2 + terms.min() ** 2))
    if documents > MOST_DOCUMENTS:
        rounds = np.array([-np.inf, np.inf])  # no wider than Student's t
        return _studentized(estimate, stderr, rounds, weights, terms, 0.0, missed)
    scaled = values / values.mean(axis=0)
    pairs = [(a, b) for a in range(len(sign)) for b in range(a, len(sign))]
    squares = np.stack([scaled[:, a] * scaled[:, b] for a, b in pairs], axis=1)
    sums = drawn_sums(np.hstack([scaled, squares])) / documents
    means, squares = sums[:, : len(sign)], sums[:, len(sign) :]
    slope = sign / means
    variance = sum(
        (1 if a == b else 2) * slope[:, a] * slope[:, b] * squares[:, index]
        for index, (a, b) in enumerate(pairs)
    ) - float(sign.sum()) ** 2  # fmt: skip
    spread = np.sqrt(np.maximum(variance, 1e-12) / documents)
    rounds = (np.log(means) @ sign) / spread
    return _studentized(estimate, stderr, rounds, weights, terms, math.inf, missed)


def _studentized(
    estimate: float, stderr: float, rounds: Floats, weights: Floats, terms: Floats,
    farthest: float, missed: tuple[float, float] = (0.0, 0.0),
) -> Studentized | None:  # fmt: skip
    quantiles = np.zeros(len(NORMAL))
    if farthest:
        quantiles = np.quantile(rounds, special.ndtr(NORMAL), method="median_unbiased")
        if not quantiles[0] < 0 < quantiles[-1]:
            return None
    squares = terms * terms  # NumPy's fourth power takes thirty times as long
    freedom = degrees_of_freedom(weights, float(np.mean(squares * squares) / squares.mean() ** 2))
    return Studentized(
        estimate=estimate, stderr=stderr, quantiles=quantiles, freedom=freedom, farthest=farthest,
        missed=missed,
    )  # fmt: skip


# --- score test and score interval of the mean of a bounded value, such as right-or-wrong answers


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
