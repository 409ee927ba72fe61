"""Effects with an interval, a test and the size that would be seen; correction for many tests.

An effect is a signed sum of scores on the same documents, such as a quantized score minus the
unquantized one. Interval and p come from one method, so that p < 5 % exactly if the 95 % interval
leaves 0 out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
from scipy import special

from qbench.metrics import LOG_SCALE
from qbench.statistics.panel import (
    INFLUENCE,
    KL_MEAN,
    LOG_MEAN,
    MOST_DOCUMENTS,
    ROUNDING,
    Column,
    Counts,
    Floats,
    Panel,
    Studentized,
    as_scored,
    detectable_mean,
    effective_documents,
    error_of,
    estimate_contrast,
    is_logarithm,
    score_interval,
    score_p,
    studentize,
    studentize_log_mean,
)

LEVEL = 0.05
POWER = 0.80
CONFIDENCE = 0.95
# A difference within so many standard errors of drawing answers is not called one, so that at most
# 2 % of runs of one model against itself have a mark (tests/comparison/test_sham_answers.py).
DRAWN_ERRORS = 3.0
ONE_SIDED = 2 * CONFIDENCE - 1  # confidence of an interval whose ends are one-sided 95 % bounds
# If fewer documents changed than this, Student's t is too short for values without known ends.
FEW_CHANGES = 20
FEWEST_KL = 20  # documents: with ten the interval of a mean with heavy tails spans magnitudes
# Log-likelihoods are told apart to a thousandth of a nat, which is what a baseline file keeps.
RESOLUTION = 0.001

Kind = Literal["difference", "log ratio"]
Test = Literal["score test", "paired t", "bootstrap-t"]
TESTABLE = (*INFLUENCE, LOG_MEAN, KL_MEAN)  # aggregations whose scores ``effect`` compares


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Hold an estimate with its 95 % interval and its standard error by the delta method."""

    estimate: float
    low: float
    high: float
    stderr: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tested:
    """Hold a contrast of scores with its interval, on the one scale on which it is tested.

    ``kind`` says what ``interval`` is of: a ``difference`` in the units of the score, or, for
    perplexities and KL divergences, a ``log ratio``: the same contrast of their logarithms. A
    perplexity in the millions has no useful error of its own, so there is no interval of its raw
    difference.

    ``size_at`` maps a level of significance to the size that a test at that level finds with 80 %
    power. ``drawn`` is the standard error that comes from drawing answers, which the interval
    includes. ``detectable`` is that size at the level that the mark needs beside the other tests of
    its ``family`` (its number of tests); ``adjust`` sets them and ``p_holm``. ``upper_at`` maps a
    level to the one-sided upper bound that excludes larger values at that level; ``bounds`` are
    the one-sided 95 % bounds.
    """

    kind: Kind
    interval: Interval
    bounds: tuple[float, float]
    p: float
    documents: int
    drawn: float = 0.0
    p_holm: float | None = None
    family: int = 0
    detectable: float | None = None
    size_at: Callable[[float], float] = field(repr=False, compare=False)
    upper_at: Callable[[float], float] = field(repr=False, compare=False)

    @property
    def estimate(self) -> float:
        return self.interval.estimate

    @property
    def significant(self) -> bool:
        """Return whether it differs from 0 at 5 % after Holm's correction over its family, and by
        more than drawing other answers explains."""
        noise = DRAWN_ERRORS * self.drawn
        return self.p_holm is not None and self.p_holm < LEVEL and abs(self.estimate) > noise

    @property
    def mark(self) -> str:
        return "‡" if self.significant else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect(Tested):
    """Hold a contrast of scores on the same documents."""

    test: Test


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """Say why there is no interval; ``estimate`` is the effect, if that at least is known."""

    reason: str
    estimate: float | None = None
    kind: Kind = "difference"


def effect(panel: Panel, signs: Mapping[object, float], aggregation: str) -> Effect | Missing:
    """Return the effect Σ sign · score over the panel's columns named in ``signs``.

    - Values between 0 and 1 (or 0 and 100) with equal weights, such as right-or-wrong answers and
      shares of credit: the score test.
    - Perplexities and KL divergences, on their logarithm: the bootstrap-t; Student's t for more
      than a thousand documents of one weight.
    - All else: Student's t on the documents' contributions.

    The last needs ``FEW_CHANGES`` documents that changed.
    """
    if aggregation not in TESTABLE:
        return Missing(reason=f"no test is known for scores that are aggregated as {aggregation}")
    if panel.documents < 2:
        return Missing(reason="fewer than two documents are shared")
    kl, aggregation = aggregation == KL_MEAN, LOG_MEAN if aggregation == KL_MEAN else aggregation
    columns = [panel.index[name] for name in signs]
    values, weights = panel.values[:, columns], panel.weights[:, columns]
    sign = np.array(list(signs.values()), dtype=float)
    if reason := _unusable(values, weights, aggregation):
        return Missing(reason=reason)
    estimate, stderr, terms = estimate_contrast(values, weights, sign, aggregation)
    kind: Kind = "log ratio" if is_logarithm(aggregation) else "difference"
    about = {"kind": kind, "documents": panel.documents}
    if (observed := _counts(values, weights, sign, aggregation)) is not None:
        return _by_score_test(observed, estimate, stderr, about)
    if aggregation == LOG_MEAN and panel.documents < FEWEST_KL:
        return Missing(reason=too_few_for_kl(panel.documents), estimate=estimate, kind=kind)
    changed = int(np.count_nonzero(values @ sign)) if len(sign) > 1 else panel.documents
    if aggregation == LOG_MEAN and 0 < changed < FEW_CHANGES:  # of answers' lengths, not of KL
        return Missing(reason=_few(changed, panel.documents), estimate=estimate, kind=kind)
    if aggregation == LOG_MEAN:
        studentized = studentize_log_mean(values, sign, kl=kl, contrast=(estimate, stderr, terms))
    else:
        studentized = _studentized(values, weights, sign, aggregation, estimate, stderr)
    if studentized is not None:
        return _by_bootstrap(studentized, stderr, about)
    if kind == "difference" and changed < min(FEW_CHANGES, panel.documents):
        return Missing(reason=_few(changed, panel.documents), estimate=estimate, kind=kind)
    freedom = effective_documents(weights) - 1
    grain = stderr
    if aggregation in LOG_SCALE:
        grain = max(stderr, RESOLUTION * math.sqrt(panel.documents) / weights.sum(axis=0).min())
    return _by_t(estimate, stderr, freedom, about, grain)


class LogMeans:
    """Computes what ``effect`` does with ``KL_MEAN``, to the bit, for differences of many columns
    on the same documents, whose sums and shares are computed once: 99 precisions have 4,851 pairs.
    ``takes`` are the columns that it can compare."""

    def __init__(self, columns: Mapping[object, Column]) -> None:
        self._columns: dict[object, Column] = {}
        self._shares: dict[object, Floats] = {}
        self._sizes: dict[object, float] = {}  # of the shares
        for name, column in columns.items():
            first = next(iter(self._columns.values()), column)
            values, weights = column.values[:, None], column.weights[:, None]
            many = len(values) > MOST_DOCUMENTS and column.documents is first.documents
            if many and np.all(weights == 1) and not _unusable(values, weights, LOG_MEAN):
                _, size, terms = estimate_contrast(values, weights, np.ones(1), LOG_MEAN)
                self._columns[name], self._shares[name], self._sizes[name] = column, terms, size

    def takes(self, signs: Mapping[object, float]) -> bool:
        return list(signs.values()) == [1.0, -1.0] and all(name in self._columns for name in signs)

    def effect(self, signs: Mapping[object, float]) -> Effect | Missing:
        """Return the effect of ``signs``, two columns that ``takes`` accepts."""
        values = np.array([self._columns[name].values for name in signs]).T
        terms = np.subtract(*(self._shares[name] for name in signs))
        sign, documents = np.array([1.0, -1.0]), len(values)
        estimate, stderr = float(np.log(values.sum(axis=0) / documents) @ sign), error_of(terms)
        if stderr <= ROUNDING * math.hypot(*(self._sizes[name] for name in signs)):
            stderr = 0.0
        about = {"kind": "log ratio", "documents": documents}
        changed = int(np.count_nonzero(values[:, 0] != values[:, 1]))
        if 0 < changed < FEW_CHANGES:
            return Missing(reason=_few(changed, documents), estimate=estimate, kind="log ratio")
        contrast = estimate, stderr, terms
        studentized = studentize_log_mean(values, sign, kl=True, contrast=contrast)
        if studentized is None:
            return _by_t(estimate, stderr, documents - 1.0, about, stderr)
        return _by_bootstrap(studentized, stderr, about)


def score(panel: Panel, name: object, aggregation: str) -> Interval | None:
    """Return one column's own score with its interval, in its units; None if it has none.

    That of a perplexity is of its logarithm.
    """
    tested = effect(panel, {name: 1}, aggregation)
    if isinstance(tested, Missing):
        return None
    if tested.kind == "difference":
        return tested.interval
    with np.errstate(over="ignore"):  # an end beyond the largest double is infinite
        ends = [tested.estimate, tested.interval.low, tested.interval.high]
        middle, low, high = np.exp(ends).tolist()
    stderr = middle * tested.interval.stderr
    return Interval(estimate=middle, low=low, high=high, stderr=stderr)


def value(panel: Panel, name: object, aggregation: str) -> float:
    """Return one column's score, as lm-eval makes it of the outcomes."""
    index = panel.index[name]
    ratio = panel.values[:, index].sum() / panel.weights[:, index].sum()
    return float(as_scored(ratio, aggregation))


def _unusable(values: Floats, weights: Floats, aggregation: str) -> str:
    """Return why there is no effect, if so."""
    weight = weights.sum(axis=0)
    # A document that has all the weight leaves nothing to compare it with.
    if not np.all(weights < weight):
        return "one document has all the weight"
    if not np.isfinite(values).all():
        return "a score is not finite"
    ratio = values.sum(axis=0) / weight
    if aggregation == LOG_MEAN and not np.all(ratio > 0):
        return "a KL divergence is 0"
    if not np.isfinite(as_scored(ratio, aggregation)).all():
        return "a score is not finite"
    return ""


def too_few_for_kl(documents: int) -> str:
    return f"{documents} documents: fewer than {FEWEST_KL} say too little of a KL mean"


def _few(changed: int, documents: int) -> str:
    return f"{changed} of {documents} documents changed: too few for an interval"


def _counts(values: Floats, weights: Floats, sign: Floats, aggregation: str) -> Counts | None:
    """Return the documents' contributions if each score lies in a known range; else None.

    A difference of differences is taken to reach no farther than one answer, unless it was seen to.
    """
    if aggregation != "mean" or np.any(weights != 1) or values.min() < 0 or values.max() > 100:
        return None
    scale = 1.0 if values.max() <= 1 else 100.0
    steps = values @ sign
    reach = max(scale, float(np.abs(steps).max()))
    lowest = -reach if np.any(sign < 0) else 0.0
    highest = reach if np.any(sign > 0) else 0.0
    return Counts.of(np.round(steps, 12), lowest=lowest, highest=highest)


def _by_score_test(observed: Counts, estimate: float, stderr: float, about: dict) -> Effect:
    low, high = score_interval(observed, CONFIDENCE)
    reach = max(abs(observed.lowest), abs(observed.highest))
    return Effect(
        **about,
        interval=Interval(estimate=estimate, low=low, high=high, stderr=stderr),
        bounds=score_interval(observed, ONE_SIDED),
        test="score test",
        p=score_p(observed),
        size_at=lambda level: detectable_mean(
            observed.mean_square, observed.documents, reach=reach, level=level, power=POWER
        ),
        upper_at=lambda level: score_interval(observed, 1 - 2 * level)[1],
    )


def _studentized(
    values: Floats,
    weights: Floats,
    sign: Floats,
    aggregation: str,
    estimate: float,
    stderr: float,
) -> Studentized | None:
    if aggregation not in LOG_SCALE or np.any(weights != weights[:, :1]):
        return None
    total = values @ (INFLUENCE[aggregation] * sign)
    return studentize(total, weights[:, 0], estimate=estimate, stderr=stderr)


def _by_bootstrap(studentized: Studentized, stderr: float, about: dict) -> Effect:
    low, high = studentized.interval(CONFIDENCE)
    return Effect(
        **about,
        interval=Interval(estimate=studentized.estimate, low=low, high=high, stderr=stderr),
        # In simulations where damage grows with a page's length these ends cover 94 % or more, the
        # bootstrap-t's own one-sided bounds 91 to 95 %.
        bounds=(low, high),
        test="bootstrap-t",
        p=studentized.p(),
        size_at=lambda level: (
            detectable_by_t(studentized.stderr, studentized.freedom, level)
            + max(studentized.missed)
        ),
        upper_at=lambda level: studentized.interval(1 - level)[1],
    )


def _by_t(estimate: float, stderr: float, freedom: float, about: dict, grain: float) -> Effect:
    """Return an effect by Student's t; ``grain`` is the least standard error of what is found."""

    def reach(confidence: float) -> float:
        return float(special.stdtrit(freedom, (1 + confidence) / 2)) * stderr

    ends, bounds = reach(CONFIDENCE), reach(ONE_SIDED)
    p = float(estimate == 0)
    if stderr > 0:
        p = float(2 * special.stdtr(freedom, -abs(estimate / stderr)))
    interval = Interval(estimate=estimate, low=estimate - ends, high=estimate + ends, stderr=stderr)
    return Effect(
        **about,
        interval=interval,
        bounds=(estimate - bounds, estimate + bounds),
        test="paired t",
        p=p,
        size_at=lambda level: detectable_by_t(grain, freedom, level),
        upper_at=lambda level: estimate + reach(1 - 2 * level),
    )


def detectable_by_t(stderr: float, freedom: float, level: float) -> float:
    """Return the size that a two-sided Student's t test at ``level`` finds with 80 % power, by the
    noncentral t distribution (Cohen 1988, Statistical Power Analysis, section 2.2)."""
    critical = float(special.stdtrit(freedom, 1 - level / 2))
    shift = float(special.nctdtrinc(freedom, 1 - POWER, critical))
    if not math.isfinite(shift) or shift <= 0:  # beyond what scipy solves: few seeds, small level
        shift = critical * math.sqrt(2 / freedom * float(special.gammaincinv(freedom / 2, POWER)))
    return shift * stderr


AnEffect = TypeVar("AnEffect", bound=Tested)


def adjust(effects: Sequence[AnEffect]) -> list[AnEffect]:
    """Return the same effects with p adjusted by Holm over all of them, and with the size that
    the mark would show: at the level that Holm leaves to a test beside those that are marked."""
    if not effects:
        return []
    from statsmodels.stats.multitest import multipletests  # scipy.stats: 0.3 s, which no cell needs

    adjusted = multipletests([each.p for each in effects], method="holm")[1]
    marked = sum(p < LEVEL for p in adjusted)
    corrected = []
    for each, p in zip(effects, adjusted, strict=True):
        others = marked - (p < LEVEL)
        size = each.size_at(LEVEL / (len(effects) - others))
        corrected.append(
            dataclasses.replace(each, p_holm=float(p), family=len(effects), detectable=size)
        )
    return corrected


@dataclass(frozen=True, kw_only=True, slots=True)
class Regression:
    """Hold how much worse a new score is, with one-sided 95 % bounds; negative is better."""

    estimate: float
    low: float
    high: float

    @classmethod
    def of(cls, loss: Effect) -> Regression:
        """Make it of an effect whose positive values are worse; of perplexities it is a log
        ratio."""
        return cls(estimate=loss.estimate, low=loss.bounds[0], high=loss.bounds[1])


def documents_needed(gap: float, stderr: float, documents: int) -> int | None:
    """Return how many documents tell, with 80 % power, a difference ``gap`` from the margin.

    With a gap of the whole margin: what it takes to show that a quantizer that changes nothing
    stays within it. The standard error shrinks as 1/√n. None if the gap is 0: no number is enough.
    """
    if gap <= 0:
        return None
    ratio = float(special.ndtri(CONFIDENCE) + special.ndtri(POWER)) * stderr / gap
    return max(2, math.ceil(documents * ratio**2))


def drawing_error(
    scores: Iterable[Column], variances: Iterable[Column | None], aggregation: str
) -> float:
    """Return the standard error that drawing other answers to the same prompts gives a contrast of
    ``scores``. ``variances`` are those of each prompt's mean, None if its answers are not drawn."""
    total = 0.0
    for column, variance in zip(scores, variances, strict=True):
        if variance is not None:
            scale = column.values.mean() if aggregation in (LOG_MEAN, KL_MEAN) else 1.0
            total += float(variance.values.sum()) / (len(variance.documents) * scale) ** 2
    return math.sqrt(total)


def samples_needed(gap: float, stderr: float, drawn: float) -> float | None:
    """Return how many times as many samples per prompt tell a difference ``gap`` from the margin,
    as :func:`documents_needed`; None if no number would. ``drawn`` is the part of ``stderr`` that
    comes from drawing answers."""
    if gap <= 0 or not drawn:
        return None
    most = (gap / float(special.ndtri(CONFIDENCE) + special.ndtri(POWER))) ** 2
    left = most - (stderr**2 - drawn**2)
    return max(1.0, drawn**2 / left) if left > 0 else None


def documents_for_margin(loss: Tested, margin: float, expected: float = 0.0) -> int | None:
    """Return how many documents would show that a loss stays within ``margin`` (on the scale of
    the effect) if it is as ``expected``, from the half-width of its one-sided bound. None if no
    number would."""
    spread = (loss.bounds[1] - loss.estimate) / float(special.ndtri(CONFIDENCE))
    return documents_needed(margin - expected, spread, loss.documents)
