"""How far estimates may be from the truth, by three methods: intervals, p and detectable sizes.

Each method holds many estimates on the same documents; its functions return a number per estimate.
``scipy.stats.bootstrap`` draws anew for each statistic. Here a round is a vector of counts (how
often each document was drawn), and one matrix product gives the sums of every estimate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy import special

from qbench.statistics.panel import Contrasts, Floats, Scores, effective_documents, squared_norms

CONFIDENCE = 0.95
ONE_SIDED = 2 * CONFIDENCE - 1  # confidence of an interval whose ends are one-sided 95 % bounds
POWER = 0.80
Ends = tuple[Floats, Floats]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Method:
    """Base of the methods: many estimates on the same documents. The last axis of each array is the
    axis of the estimates. One-sided bounds at a level are the ends of the interval that leaves out
    ``sides`` times that level."""

    sides: ClassVar[int] = 2
    estimate: Floats
    stderr: Floats

    def __getitem__(self, places: NDArray) -> Self:
        """Return the method reduced to the estimates with the indices ``places``."""
        return type(self)(**{f.name: getattr(self, f.name)[..., places] for f in fields(self)})

    def interval(self, confidence: float | Floats) -> Ends:
        """Return the lower and upper ends of two-sided intervals, for one ``confidence`` (0.95) or
        one per estimate."""

    def upper_at(self, level: float | Floats) -> Floats:
        """Return the upper bound that excludes larger values at significance ``level``."""
        return self.interval(1 - self.sides * level)[1]

    def p(self) -> Floats:
        """Return the two-sided p-value of 0: 1 − confidence of the interval that ends at 0."""

    def size_at(self, level: float | Floats) -> Floats:
        """Return the size that a two-sided test at ``level`` detects with 80 % power."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StudentT(Method):
    """Hold estimates whose errors follow Student's t, over the documents' contributions. ``grain``:
    the smallest standard error that a detectable size is computed with."""

    freedom: Floats
    grain: Floats

    def interval(self, confidence: float | Floats) -> Ends:
        """Return the ends: estimate ± quantile of Student's t · standard error."""
        reach = special.stdtrit(self.freedom, (1 + confidence) / 2) * self.stderr
        return self.estimate - reach, self.estimate + reach

    def p(self) -> Floats:
        """Return the p-value of the t test; without an error 1 for an estimate of 0, else 0."""
        stderr = np.where(self.stderr > 0, self.stderr, 1.0)
        p = 2 * special.stdtr(self.freedom, -np.abs(self.estimate / stderr))
        return np.where(self.stderr > 0, p, self.estimate == 0)

    def size_at(self, level: float | Floats) -> Floats:
        """Return the size that the t test at ``level`` detects with 80 % power, by ``grain``."""
        return detectable_by_t(self.grain, self.freedom, level)


def detectable_by_t(stderr: Floats, freedom: Floats, level: float | Floats) -> Floats:
    """Return the size that a two-sided Student's t test at ``level`` detects with 80 % power, by
    the noncentral t distribution (Cohen 1988, Statistical Power Analysis, section 2.2)."""
    critical = special.stdtrit(freedom, 1 - level / 2)
    shift = special.nctdtrinc(freedom, 1 - POWER, critical)
    # beyond what scipy solves: few seeds, small level
    rough = critical * np.sqrt(2 / freedom * special.gammaincinv(freedom / 2, POWER))
    return np.where(np.isfinite(shift) & (shift > 0), shift, rough) * stderr


# --- the bootstrap-t, of perplexities and KL divergences


ROUNDS = 10_000
LEAST_ROUNDS = 2_000  # of many documents
DRAWS = 2_000_000  # documents drawn in all rounds together, but for LEAST_ROUNDS
MOST_DOCUMENTS = 1_000  # of more of equal weight Student's t is as good
CHUNK = 1_000_000  # drawn documents of one matrix product; those of fewer rounds are slow
COUNTED = 50_000  # drawn documents counted at once: their counts stay in a processor's cache


def drawn_sums(rows: Floats) -> Floats:
    """Return sums over documents drawn with replacement, [rounds, columns], of ``rows`` [documents,
    columns]. There are ``ROUNDS`` rounds, of many documents fewer. They are the same in every call.
    """
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
    """Return ``_counts`` with a fixed seed, cached: hundreds of effects over the same documents use
    the same rounds."""
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


ENOUGH_TO_DRAW = 10  # documents; with fewer, many rounds draw a single document
# An end of the interval may be this many times as far as the document that is farthest from the
# mean. In simulations with 16 pages and damage in proportion to length the interval covers 79 % if
# an end may be once as far, 89 % if twice: longer pages than those drawn have more damage.
TWICE = 2
FARTHEST = 3.0  # normal quantile up to which rounds are counted; beyond, in proportion
UNSEEN = 3.0  # documents as far as the farthest that a sample may have missed
# KL divergence of one document that a sample may have missed: nats, or times the sample's mean.
MISSED_NATS = 0.2
MISSED_TIMES = 10.0
NORMAL = np.linspace(-FARTHEST, FARTHEST, 121)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BootstrapT(Method):
    """Hold how (estimate − truth) / standard error is spread, by the bootstrap-t (Efron and
    Tibshirani 1993, section 12.5; Hall 1992, section 3.2), for ratios of sums over documents.
    docs/methods.md has the share of simulations in which the interval covers the truth.

    If damage depends on a document's length, few long documents decide the sum, and Student's t
    covers too little on one side. ``quantiles`` [121, estimates] are those of the bootstrap's
    rounds at the normal quantiles ``NORMAL``. The percentiles are moved outwards, since the
    bootstrap's variance is too small and Student's t is wider than the normal (Hesterberg 2015,
    section 3.3); ``freedom`` are the degrees of freedom of that t.

    Both ends lie at least as far as Student's t puts them, since skewness that is estimated from
    some dozens of documents is mostly noise. They lie at most twice as far as any document: if few
    documents changed, some rounds draw none of them and have a standard error of 0."""

    # As bounds the ends of the two-sided interval cover 94 % or more in simulations where damage
    # grows with a page's length, the bootstrap-t's one-sided bounds 91 to 95 %.
    sides: ClassVar[int] = 1
    counted: Floats  # the standard error that the interval is made of; ``stderr`` is shown
    quantiles: Floats
    freedom: Floats
    farthest: Floats  # largest distance of an end by the bootstrap, in standard errors
    missed: Floats  # [2, estimates]: how much farther the two ends are, see MISSED_NATS

    def interval(self, confidence: float | Floats) -> Ends:
        """Return the ends by bootstrap quantiles, no nearer than Student's t, plus ``missed``."""
        reach = special.stdtrit(self.freedom, (1 + confidence) / 2)
        low = np.minimum(-reach, self._quantile(-reach * self._stretch))
        high = np.maximum(reach, self._quantile(reach * self._stretch))
        below, above = self.missed
        first, last = self.estimate - high * self.counted, self.estimate - low * self.counted
        return first - below, last + above

    def p(self) -> Floats:
        """Return the p-value of 0 that belongs to ``interval``."""
        below, above = self.missed
        seen = np.maximum(np.maximum(0.0, self.estimate - below), -self.estimate - above)
        seen = np.copysign(seen / self.counted, self.estimate)
        first, last = self.quantiles[0], self.quantiles[-1]
        within = [np.interp(x, q, NORMAL) for x, q in zip(seen, self.quantiles.T, strict=True)]
        beyond = FARTHEST * np.abs(
            seen / np.where(self.farthest > 0, np.where(seen > 0, last, first), 1)
        )
        normal = np.where((first <= seen) & (seen <= last), np.abs(within), beyond)
        normal[np.abs(seen) >= self.farthest] = math.inf
        return 2 * special.stdtr(self.freedom, -np.minimum(np.abs(seen), normal / self._stretch))

    def size_at(self, level: float | Floats) -> Floats:
        """Return the size that a t test at ``level`` detects with 80 % power, plus ``missed``."""
        return detectable_by_t(self.counted, self.freedom, level) + self.missed.max(axis=0)

    def _quantile(self, normal: Floats) -> Floats:
        """Return the bootstrap's quantile at each ``normal`` quantile, extrapolated beyond the last
        and bounded by ``farthest``."""
        pairs = zip(normal, self.quantiles.T, strict=True)
        quantile = np.array([np.interp(x, NORMAL, quantiles) for x, quantiles in pairs])
        quantile *= np.maximum(1, np.abs(normal) / FARTHEST)
        return np.clip(quantile, -self.farthest, self.farthest)

    @property
    def _stretch(self) -> Floats:
        return np.sqrt((self.freedom + 1) / self.freedom)


def degrees_of_freedom(weights: Floats, kurtosis: Floats) -> Floats:
    """Return the degrees of freedom of the standard error of a ratio of sums over documents of
    ``weights`` [documents]; at least 1. 1/ν = 1/(m − 1) + (k − 1)/2n: m as many equally long
    documents, and k the kurtosis of the n documents' shares, since the variance of a variance is (k
    − 1)/n of its square (Satterthwaite 1946, Biometrics Bulletin 2: 110–114; Box 1953, Biometrika
    40: 318–335)."""
    of_lengths = 1 / (effective_documents(weights[None]) - 1)
    return np.maximum(1.0, 1 / (of_lengths + (kurtosis - 1) / (2 * len(weights))))


def bootstrap_ratios(made: Contrasts, weights: Floats) -> tuple[NDArray, BootstrapT]:
    """Studentize contrasts of ratios of sums, −Σ steps / Σ ``weights`` [documents]. Return the
    indices of those whose rounds lie on both sides of the estimate, and their intervals. The caller
    leaves out contrasts whose standard error is 0."""
    values = -made.steps
    rest = values - (values.sum(axis=1) / weights.sum())[:, None] * weights
    rest /= np.sqrt(np.mean(rest**2, axis=1))[:, None]
    length = weights / weights.mean()
    lengths = drawn_sums(np.stack([length, length**2], axis=1)).T
    sums = drawn_sums(np.concatenate([rest, rest**2, rest * length]).T).T
    sums, squares, products = sums.reshape(3, len(rest), -1)
    ratio = sums / lengths[0]
    # A round's spread: 0 if it drew a single document, which is as far as any round goes.
    spread = np.sqrt(np.maximum(squares - 2 * ratio * products + ratio**2 * lengths[1], 1e-12))
    rates = values[:, weights > 0] / weights[weights > 0]
    farthest = TWICE * np.abs(rates - made.estimate[:, None]).max(axis=1) / made.stderr
    return _bootstrap(made, weights, sums / spread, farthest)


def bootstrap_log_means(made: Contrasts, scores: Scores, *, kl: bool) -> tuple[NDArray, BootstrapT]:
    """Studentize contrasts of ``scores``, Σ sign · ln(mean of a column), such as the logarithm of a
    KL divergence or of a ratio of two; return the places of those for which it can be done, and
    their intervals. No standard error is 0.

    A few documents may have much of all KL, and a sample may lack them. So with ``kl`` the ends
    move by what one more document would change whose KL is ``MISSED_NATS`` or ``MISSED_TIMES`` the
    mean, whichever is more (docs/methods.md). Without ``kl`` the standard error counts the farthest
    document on either side ``UNSEEN`` times more."""
    documents, many, counted, missed = scores.documents, len(made.signs), made.stderr, 0.0
    if kl:
        more = np.log1p(np.maximum(MISSED_TIMES, MISSED_NATS / scores.ratio) / documents)
        missed = np.stack([np.maximum(side * made.signs, 0) @ more for side in (-1, 1)])
    else:
        unseen = made.terms.max(axis=1) ** 2 + made.terms.min(axis=1) ** 2
        counted = np.sqrt(counted**2 + UNSEEN * unseen)
    if documents > MOST_DOCUMENTS:  # no wider than Student's t
        rounds, farthest = np.zeros((many, 1)), np.zeros(many)
    else:
        rounds, farthest = _rounds_of_log_means(scores, made.signs), np.full(many, math.inf)
    return _bootstrap(made, np.ones(documents), rounds, farthest, counted, missed)


def _rounds_of_log_means(scores: Scores, signs: Floats) -> Floats:
    """Return (estimate − truth) / standard error of Σ sign · ln(mean), [contrasts, rounds]."""
    documents, columns = scores.documents, []
    for sign in signs:
        used = np.flatnonzero(sign)
        scaled = (scores.values[used] / scores.ratio[used, None]).T
        first, second = np.triu_indices(len(used))
        columns.append(np.hstack([scaled, scaled[:, first] * scaled[:, second]]))
    sums = drawn_sums(np.hstack(columns)) / documents
    ends = np.cumsum([each.shape[1] for each in columns])[:-1]
    rounds = []
    for sign, part in zip(signs, np.split(sums, ends, axis=1), strict=True):
        sign = sign[sign != 0]
        means, squares = part[:, : len(sign)], part[:, len(sign) :]
        (first, second), slope = np.triu_indices(len(sign)), sign / means
        products = np.where(first == second, 1, 2) * slope[:, first] * slope[:, second]
        variance = (products * squares).sum(axis=1) - float(sign.sum()) ** 2
        spread = np.sqrt(np.maximum(variance, 1e-12) / documents)
        rounds.append((np.log(means) @ sign) / spread)
    return np.array(rounds)


def _bootstrap(
    made: Contrasts, weights: Floats, rounds: Floats, farthest: Floats,
    counted: Floats | None = None, missed: float | Floats = 0.0,
) -> tuple[NDArray, BootstrapT]:  # fmt: skip
    """Return the indices of the contrasts whose ``rounds`` lie on both sides of the estimate, and
    their intervals. ``rounds`` [contrasts, rounds]: (estimate − truth) / standard error."""
    levels = special.ndtr(NORMAL)
    quantiles = np.quantile(rounds, levels, axis=1, method="median_unbiased")
    documents, squares = len(weights), made.terms**2
    kurtosis = squared_norms(squares) / documents / (made.stderr**2 / (documents - 1)) ** 2
    method = BootstrapT(
        estimate=made.estimate,
        stderr=made.stderr,
        counted=made.stderr if counted is None else counted,
        quantiles=quantiles,
        farthest=farthest,
        freedom=degrees_of_freedom(weights, kurtosis),
        missed=np.broadcast_to(missed, (2, len(farthest))),
    )
    valid = np.flatnonzero((farthest == 0) | ((quantiles[0] < 0) & (quantiles[-1] > 0)))
    return valid, method[valid]


# --- score test of the mean of a bounded value, such as right-or-wrong answers

FEW = 16  # whole values, which are counted one by one
HALVINGS, CLOSE = 60, 1e-15  # of a path of length 2: to the last bit


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreTest(Method):
    """Hold means of values within [``lowest``, ``highest``]: ``counts[i]`` documents have the value
    ``values[i]``, both [values, estimates].

    An interval holds the means that a two-sided score test does not reject; the values'
    probabilities maximize the likelihood under the tested mean: Lang (2008), Statistics in Medicine
    27: 5874–5890. It keeps its coverage with few or no changes. For values 0 and 1 it is Wilson's
    interval (1927), for −1, 0 and 1 Tango's (1998, Statistics in Medicine 17: 891–908). p is that
    of the same test; for −1, 0 and 1 it is McNemar's without correction for continuity."""

    values: Floats
    counts: Floats
    documents: Floats
    mean: Floats
    lowest: Floats
    highest: Floats

    @classmethod
    def of(cls, steps: Floats, **fields: Floats) -> Self:
        """Return the test of ``steps`` [estimates, documents], counted by value; ``fields``:
        ``estimate``, ``stderr``, ``lowest`` and ``highest``, [estimates] each."""
        first, last = steps.min(), steps.max()
        values = np.arange(first, last + 1) if last - first < FEW else np.zeros(0)
        counts = np.array([np.count_nonzero(steps == value, axis=1) for value in values])
        values = np.repeat(values[:, None], len(steps), axis=1)
        if counts.sum() < steps.size:  # not whole numbers, or too many
            unique = [np.unique(row, return_counts=True) for row in np.round(steps, 12)]
            shape = (max(len(row) for row, _ in unique), len(unique))
            values, counts = np.zeros(shape), np.zeros(shape)
            for column, (row, often) in enumerate(unique):
                values[: len(row), column], counts[: len(row), column] = row, often
        counts = counts.astype(float)
        documents, sums = counts.sum(axis=0), (values * counts).sum(axis=0)
        cancels = np.abs(sums) <= 1e-12 * (np.abs(values) * counts).sum(axis=0)  # of fractions
        mean = np.where(cancels, 0.0, sums / documents)
        return cls(values=values, counts=counts, documents=documents, mean=mean, **fields)

    def interval(self, confidence: float | Floats) -> Ends:
        """Return the smallest and largest mean that the score test does not reject."""
        many = len(self.highest)
        z = np.broadcast_to(special.ndtri((1 + confidence) / 2), many)
        both = self[np.tile(np.arange(many), 2)]._range(rising=np.repeat([False, True], many))
        low, high = np.split(both.upper(np.tile(z, 2)), 2)
        return self.highest - low, self.lowest + high

    def p(self) -> Floats:
        """Return the p-value of the score test of a mean of 0; 1 if the mean is 0."""
        rising, mean = self.mean < 0, self.mean
        tested, values = np.where(rising, -self.lowest, self.highest), self._range(rising=rising)
        path = values.root(lambda path: values.moments(path)[0] - tested, 0.0)
        variance = values.moments(path)[1]
        possible = (tested < values.highest) & (variance > 0)
        spread = np.sqrt(self.documents / np.where(possible, variance, 1.0))
        p = np.where(possible, 2 * special.ndtr(-np.abs(mean) * spread), 0.0)
        return np.where(mean == 0, 1.0, p)

    def size_at(self, level: float | Floats) -> Floats:
        """Return the mean detected at ``level`` with 80 % power, see ``detectable_mean``."""
        square = (self.values**2 * self.counts).sum(axis=0) / self.documents
        reach = np.maximum(np.abs(self.lowest), np.abs(self.highest))
        return detectable_mean(square, self.documents, reach=reach, level=level)

    def _range(self, *, rising: bool | NDArray) -> _Range:
        """Return the values as distances from the lowest (``rising``) or from the highest value."""
        values = np.where(rising, self.values - self.lowest, self.highest - self.values)
        values[self.counts == 0] = 0.0  # it does not matter what no document has
        return _Range(values, self.counts, self.highest - self.lowest)


@dataclass(frozen=True, eq=False)
class _Range:
    """Hold values 0 … ``highest`` with their counts, [values, estimates]. Under a mean above the
    observed one the chances of largest likelihood are proportional to count / (1 − tilt · value /
    highest), with tilt in [0, 1). If no document has the highest value, that value takes what is
    left over at a tilt of 1. So the path from 0 to 2 runs through all means from the observed one
    to ``highest``."""

    values: Floats
    counts: Floats
    highest: Floats

    def moments(self, path: Floats) -> Ends:
        """Return mean and variance of the values at a point of the ``path``, [estimates]."""
        tilt, rest = np.minimum(path, 1.0), np.maximum(path - 1.0, 0.0)
        end = (rest >= 1.0) | ((tilt == 1.0) & self._reached)
        tilt[end] = rest[end] = 0.0
        shares = 1 - tilt / self.highest * self.values
        np.divide(self.counts, shares, out=shares)
        total = np.add.reduce(shares) / (1 - rest)
        shares *= self.values
        first = rest * self.highest + np.add.reduce(shares) / total
        shares *= self.values
        second = rest * self.highest**2 + np.add.reduce(shares) / total
        variance = np.maximum(second - first**2, 0.0)
        first[end], variance[end] = self.highest[end], 0.0
        return first, variance

    @np.errstate(divide="ignore", invalid="ignore")
    def root(self, function: Callable[[Floats], Floats], first: float | Floats) -> Floats:
        """Return the point of the path, at or after ``first``, at which the increasing ``function``
        reaches 0 (Chandrupatla 1997, Advances in Engineering Software 28: 145–149)."""
        new, old = np.broadcast_to(first, self.highest.shape), np.where(self._reached, 1.0, 2.0)
        f_new, f_old = function(new), function(old)
        share = np.full(new.shape, 0.5)
        for _ in range(HALVINGS):
            point = new + share * (old - new)
            value = function(point)
            same = (value > 0) == (f_new > 0)
            last, f_last = np.where(same, new, old), np.where(same, f_new, f_old)
            old, f_old = np.where(same, old, new), np.where(same, f_old, f_new)
            new, f_new = point, value
            width = np.abs(old - new)
            if ((width <= CLOSE) | (f_new == 0)).all():
                break
            xi, phi = (new - old) / (last - old), (f_new - f_old) / (f_last - f_old)
            bent = f_new / (f_old - f_new) * f_last / (f_old - f_last)
            bent += (last - new) / (old - new) * f_new / (f_last - f_new) * f_old / (f_last - f_old)
            smooth = (phi**2 < xi) & ((1 - phi) ** 2 < 1 - xi)
            least = np.minimum(CLOSE / 2 / width, 0.5)
            share = np.where(smooth, np.minimum(np.maximum(bent, least), 1 - least), 0.5)
        return new

    def upper(self, z: float | Floats) -> Floats:
        """Return the largest mean within ``z`` standard errors of the observed one."""
        documents = self.counts.sum(axis=0)
        mean, errors = (self.values * self.counts).sum(axis=0) / documents, np.sqrt(documents)

        def excess(path: Floats) -> Floats:
            """Return mean − observed mean in units of its error, less ``z``; 0 at the bound."""
            first, variance = self.moments(path)
            return (first - mean) * errors - z * np.sqrt(variance)

        # if all values are alike, no tilt moves the mean
        alike = np.count_nonzero(self.counts, axis=0) == 1
        path = self.root(excess, np.where(alike, 1 + 1e-13, 1e-9))
        return np.where(mean >= self.highest, self.highest, self.moments(path)[0])

    @cached_property
    def _reached(self) -> NDArray:
        """Return whether any document has the highest value."""
        return np.any(self.values == self.highest, axis=0)


def detectable_mean(
    mean_square: Floats, documents: Floats, *, reach: Floats, level: float | Floats
) -> Floats:
    """Return the smallest mean that the score test at ``level`` detects with 80 % power; infinite
    if there are too few documents for any. Values have the observed ``mean_square``, and magnitudes
    of at most ``reach`` (Connor 1987, Biometrics 43: 207–211). If so few changed that none would be
    detected even if all changed in one direction, as many more changes are assumed as are
    needed."""
    critical, beyond = special.ndtri(1 - level / 2), special.ndtri(POWER)
    # The fewest changes, all in one direction and as large as can be, that are significant.
    fewest = np.floor(critical**2) + 1
    enough = fewest <= documents
    least = reach * special.bdtri(
        np.where(enough, fewest - 1, 0.0), np.asarray(documents, int), 1 - POWER
    )
    # The root of √n · mean = critical · √square + beyond · √(square − mean²)
    spread = np.maximum((documents + beyond**2 - critical**2) * mean_square, 0.0)
    mean = critical * np.sqrt(documents * mean_square) + beyond * np.sqrt(spread)
    mean /= documents + beyond**2
    return np.where(enough, np.where(mean_square <= least * reach, least, mean), np.inf)
