"""One effect, a signed sum of scores on the same documents: interval, test, power, multiplicity.

A right answer is 0 or 1; the change of an answer is −1, 0 or 1; the difference of two changes is
−2 … 2. All are counted as integers, so that a tie is a tie.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special
from statsmodels.stats.multitest import multipletests

from qbench.metrics import LOG_SCALE
from qbench.statistics.pairs import PAIRED, pair_scores
from qbench.statistics.panel import (
    SLOPES,
    Floats,
    Panel,
    Studentized,
    as_scored,
    bootstrap_interval,
    contrast,
    effective_documents,
    studentize,
)


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


LEVEL = 0.05
POWER = 0.80
# The fewest changes, all in one direction, that McNemar's exact test finds significant:
# 2 · 0.5⁶ = 0.031, while five give 0.0625.
FEWEST = 6


def detectable_by_t(stderr: float, documents: float) -> float:
    """For Student's t on so many documents, given the effect's standard error; by the
    noncentral t distribution (Cohen 1988, Statistical Power Analysis, section 2.2)."""
    freedom = documents - 1
    critical = special.stdtrit(freedom, 1 - LEVEL / 2)
    return float(special.nctdtrinc(freedom, 1 - POWER, critical)) * stderr


def detectable_in_steps(square: float, documents: int) -> float:
    """For Student's t on documents' steps −2 … 2, whose mean square is ``square``.

    As many documents change as were seen to, so that the spread shrinks as the mean grows.
    """
    reach = detectable_by_t(1.0, documents)
    return reach * math.sqrt(square / (documents - 1 + reach**2))


@functools.cache
def detectable_by_mcnemar(changed: int, documents: int) -> float:
    """For McNemar's exact test, as a share of the documents.

    As many answers change as were seen to. Where so few would not be significant even if all
    changed in one direction, more of them do: it is never below what ``FEWEST`` changes need.
    Infinite below ``FEWEST`` documents.
    """
    if documents < FEWEST:
        return math.inf
    least = float(special.bdtri(FEWEST - 1, documents, 1 - POWER))
    share = changed / documents
    if share <= least:
        return least
    power = mcnemar_power(share, documents)
    return float(optimize.brentq(lambda gap: power(gap) - POWER, 0.0, share, xtol=1e-9))


def mcnemar_power(changed: float, documents: int) -> Callable[[float], float]:
    """The chance that McNemar's exact test is significant at 5 %, by the difference.

    ``changed`` is the share of answers that change; the difference is how many more of all
    answers change in one direction than in the other.
    """
    spread = math.sqrt(documents * changed * (1 - changed))
    middle = documents * changed
    low = max(0, math.floor(middle - 6 * spread - 1))
    high = min(documents, math.ceil(middle + 6 * spread + 1))
    changes = np.arange(low, high + 1)
    below = special.bdtr(changes.astype(float), documents, changed)
    chances = np.diff(below, prepend=special.bdtr(low - 1, documents, changed) if low else 0.0)
    minority = _critical(changes)
    enough = minority >= 0
    changes, minority, chances = changes[enough], minority[enough], chances[enough]

    def power(difference: float) -> float:
        share = min(1.0, (changed + difference) / (2 * changed))
        found = special.bdtr(minority, changes, share) + special.bdtr(minority, changes, 1 - share)
        return float(chances @ found)

    return power


def _critical(changes: NDArray[np.int64]) -> NDArray[np.float64]:
    """The most changes in the rarer direction with p < 5 %, for each number of changes; −1
    where there are too few."""
    changes = np.maximum(changes, 1)
    guess = np.floor(special.bdtrik(LEVEL / 2, changes, 0.5))
    return guess - (special.bdtr(guess, changes, 0.5) >= LEVEL / 2)


CONFIDENCE = 0.95
# A bootstrap of a handful of changed answers is too narrow (90 % at 4 of 1,000), and of none, or of
# all alike, has no width at all. Where fewer documents than this differ from most, the score
# interval is used, whose coverage holds.
FEW_CHANGES = 20
# Log-likelihoods are told apart to a thousandth of a nat, which is what a baseline file keeps.
RESOLUTION = 0.001

Kind = Literal["difference", "log ratio"]
Test = Literal[
    "McNemar, exact", "sign flips, exact", "paired t", "paired t on log-likelihoods",
    "bootstrap-t on log-likelihoods", "draws of documents",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate with its 95 % interval and its standard error by the delta method."""

    estimate: float
    low: float
    high: float
    stderr: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tested:
    """A contrast of scores, on the one scale on which it is tested.

    ``kind`` says what ``interval`` is of: a ``difference`` in the units of the score, or, for
    perplexities, a ``log ratio``. That is the same contrast of ln(perplexity): Δ and damage are
    the logarithm of a ratio, a difference-in-differences that of a ratio of ratios. A perplexity in
    the millions has no useful error of its own, so there is no interval of its raw difference.
    """

    kind: Kind
    interval: Interval
    p: float
    p_holm: float | None = None
    p_bh: float | None = None
    documents: int

    @property
    def estimate(self) -> float:
        return self.interval.estimate

    @property
    def mark(self) -> str:
        """``‡`` significant at 5 % after Holm, ``†`` after Benjamini–Hochberg only."""
        if self.p_holm is not None and self.p_holm < 1 - CONFIDENCE:
            return "‡"
        return "†" if self.p_bh is not None and self.p_bh < 1 - CONFIDENCE else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect(Tested):
    """A contrast of scores on the same documents.

    ``detectable`` is the smallest effect that a two-sided 5 % test on as many documents finds with
    80 % power. It is on the scale of ``interval``, as ``bounds`` are.
    """

    bounds: tuple[float, float]  # one-sided, of at least 95 %
    test: Test
    detectable: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sample:
    """The columns of one contrast: ``values`` and ``weights`` are [documents, columns]."""

    values: Floats
    weights: Floats
    sign: Floats
    ratios: Floats | None  # of the bootstrap, [rounds, columns]
    aggregation: str

    @property
    def documents(self) -> int:
        return len(self.values)

    @property
    def effective(self) -> float:
        return effective_documents(self.weights)

    @property
    def binary(self) -> bool:
        """Whether every document is right or wrong."""
        answers = (self.values == 0) | (self.values == 1)
        return self.aggregation == "mean" and bool(np.all(answers & (self.weights == 1)))


TESTABLE = (*SLOPES, *PAIRED)  # aggregations whose scores ``effect`` compares


def needs_rounds(aggregation: str) -> bool:
    """Whether intervals of such scores come from the bootstrap."""
    return aggregation in SLOPES and aggregation not in LOG_SCALE


def effect(
    panel: Panel,
    signs: Mapping[object, int],
    aggregation: str,
    resampled: Floats | None = None,
) -> Effect | None:
    """The effect Σ sign · score over the panel's columns named in ``signs``.

    Right-or-wrong answers are counted: two columns are tested by McNemar's exact test; four, of
    which few documents tell anything, by flipping signs. All else has a paired t test on the
    documents' contributions. The interval is the score interval where few answers changed, or
    nearly all alike, else the bootstrap's (Student's t without ``resampled``). Of perplexities all
    is on their logarithm: Student's t where all documents weigh the same, else the bootstrap-t.
    Metrics over all documents at once (f1, mcc) are computed anew of documents drawn with
    replacement.

    ``None`` where the aggregation is not known, fewer than two documents are shared, or a score
    is not finite.
    """
    if aggregation in PAIRED:
        return _of_pairs(panel, signs, aggregation)
    sample = _sample(panel, signs, aggregation, resampled)
    if sample is None:
        return None
    log = aggregation in LOG_SCALE
    interval, studentized = _interval(sample)
    found = Effect(
        kind="log ratio" if log else "difference",
        interval=interval,
        bounds=_by_t(interval, sample.effective, 2 * CONFIDENCE - 1),
        test="paired t on log-likelihoods" if log else "paired t",
        p=_paired_t(interval, sample.effective),
        detectable=_detectable(sample, interval.stderr),
        documents=sample.documents,
    )
    if studentized is not None:
        return dataclasses.replace(
            found,
            bounds=(interval.low, interval.high),
            test="bootstrap-t on log-likelihoods",
            p=studentized.p(),
        )
    if not sample.binary:
        return found
    counts = _counts(sample)
    changed = sample.documents - counts.get(0, 0)
    if sample.documents - max(counts.values()) < FEW_CHANGES:
        found = _of_few_changes(found, counts)
    else:
        square = sum(step**2 * count for step, count in counts.items()) / sample.documents
        found = dataclasses.replace(found, detectable=detectable_in_steps(square, sample.documents))
    if len(sample.sign) == 2:
        gained, lost = counts.get(1, 0), counts.get(-1, 0)
        least = detectable_by_mcnemar(changed, sample.documents)
        test: Test = "McNemar, exact"
        found = dataclasses.replace(found, test=test, p=mcnemar(gained, lost), detectable=least)
    return found


def score(
    panel: Panel, name: object, aggregation: str, resampled: Floats | None
) -> Interval | None:
    """One column's own score with its interval, in its units; ``None`` as for ``effect``.

    Of a perplexity, that of its logarithm; of accuracies near 0 or 1 Wilson's interval, since
    the bootstrap's is too narrow there.
    """
    if aggregation in PAIRED:
        whole = _of_pairs(panel, {name: 1}, aggregation)
        return None if whole is None else whole.interval
    sample = _sample(panel, {name: 1}, aggregation, resampled)
    if sample is None:
        return None
    found, _ = _interval(sample)
    if aggregation in LOG_SCALE:
        with np.errstate(over="ignore"):  # an end beyond the largest double is infinite
            middle, low, high = np.exp([found.estimate, found.low, found.high]).tolist()
        return Interval(estimate=middle, low=low, high=high, stderr=middle * found.stderr)
    if sample.binary:
        counts = _counts(sample)
        if sample.documents - max(counts.values()) < FEW_CHANGES:
            low, high = score_interval(counts, lowest=0, highest=1, confidence=CONFIDENCE)
            return dataclasses.replace(found, low=low, high=high)
    return found


def value(panel: Panel, name: object, aggregation: str) -> float:
    """One column's score, as lm-eval makes it of the outcomes."""
    index = panel.index[name]
    if aggregation in PAIRED:
        gold, predictions = panel.values[:, index], panel.weights[:, [index]]
        return float(pair_scores(gold, predictions, aggregation, rounds=1)[0][0])
    ratio = panel.values[:, index].sum() / panel.weights[:, index].sum()
    return float(as_scored(ratio, aggregation))


def _of_pairs(panel: Panel, signs: Mapping[object, int], aggregation: str) -> Effect | None:
    """Of right answers and predictions; ``None`` where cells were not asked the same."""
    columns = [panel.index[name] for name in signs]
    gold, sign = panel.values[:, columns], np.array(list(signs.values()), dtype=float)
    if panel.documents < 2 or not (gold == gold[:, :1]).all():
        return None
    whole, drawn = pair_scores(gold[:, 0], panel.weights[:, columns], aggregation)
    estimate, draws = float(whole @ sign), drawn @ sign
    tail = (1 - CONFIDENCE) / 2
    low, bound_low, bound_high, high = np.quantile(draws, [tail, 2 * tail, 1 - 2 * tail, 1 - tail])
    stderr = float(draws.std(ddof=1))
    beyond = min(int((draws <= 0).sum()), int((draws >= 0).sum()))
    return Effect(
        kind="difference",
        interval=Interval(estimate=estimate, low=float(low), high=float(high), stderr=stderr),
        bounds=(float(bound_low), float(bound_high)),
        test="draws of documents",
        p=min(1.0, 2 * (1 + beyond) / (1 + len(draws))),
        detectable=detectable_by_t(stderr, panel.documents),
        documents=panel.documents,
    )


def _sample(
    panel: Panel, signs: Mapping[object, int], aggregation: str, resampled: Floats | None
) -> _Sample | None:
    if aggregation not in SLOPES or panel.documents < 2:
        return None
    columns = [panel.index[name] for name in signs]
    sample = _Sample(
        values=panel.values[:, columns],
        weights=panel.weights[:, columns],
        sign=np.array(list(signs.values()), dtype=float),
        ratios=None if resampled is None else resampled[:, columns],
        aggregation=aggregation,
    )
    weight = sample.weights.sum(axis=0)
    # A document that has all the weight leaves nothing to compare it with.
    if not (np.isfinite(sample.values).all() and np.all(sample.weights < weight)):
        return None
    scores = as_scored(sample.values.sum(axis=0) / weight, aggregation)
    return sample if np.isfinite(scores).all() else None


def _interval(sample: _Sample) -> tuple[Interval, Studentized | None]:
    values, weights, sign = sample.values, sample.weights, sample.sign
    estimate, stderr = contrast(values, weights, sign, sample.aggregation)
    found = Interval(estimate=estimate, low=estimate, high=estimate, stderr=stderr)
    documents = sample.effective
    if studentized := _studentized(sample, found):
        low, high = studentized.interval(CONFIDENCE)
        return dataclasses.replace(found, low=low, high=high), studentized
    if sample.ratios is None or sample.aggregation in LOG_SCALE:
        low, high = _by_t(found, documents, CONFIDENCE)
        return dataclasses.replace(found, low=low, high=high), None
    slope = SLOPES[sample.aggregation]
    left_out = (values.sum(axis=0) - values) / (weights.sum(axis=0) - weights)
    low, high = bootstrap_interval(
        estimate,
        slope * sample.ratios @ sign,
        slope * left_out @ sign,
        confidence=CONFIDENCE,
        documents=documents,
    )
    return dataclasses.replace(found, low=low, high=high), None


def _studentized(sample: _Sample, interval: Interval) -> Studentized | None:
    """Of logarithms of perplexities; None where Student's t serves (``studentize``)."""
    weights = sample.weights[:, 0]
    if sample.aggregation not in LOG_SCALE or np.any(sample.weights != weights[:, None]):
        return None
    values = sample.values @ (SLOPES[sample.aggregation] * sample.sign)
    return studentize(values, weights, estimate=interval.estimate, stderr=interval.stderr)


def _counts(sample: _Sample) -> dict[int, int]:
    """Documents by their contribution, of right-or-wrong answers: −2 … 2 at most."""
    steps, often = np.unique((sample.values @ sample.sign).round(), return_counts=True)
    return {int(step): int(count) for step, count in zip(steps, often, strict=True)}


def _of_few_changes(found: Effect, counts: Mapping[int, int]) -> Effect:
    """By counts alone: the score interval, the exact test, and what that can find."""
    reach = max(1, *map(abs, counts))
    ends, bounds = (
        score_interval(counts, lowest=-reach, highest=reach, confidence=confidence)
        for confidence in (CONFIDENCE, 2 * CONFIDENCE - 1)
    )
    changed = sum(count for step, count in counts.items() if step)
    size = sum(abs(step) * count for step, count in counts.items()) / max(1, changed)
    return dataclasses.replace(
        found,
        interval=dataclasses.replace(found.interval, low=ends[0], high=ends[1]),
        bounds=bounds,
        test="sign flips, exact",
        p=sign_flips(counts),
        detectable=max(1.0, size) * detectable_by_mcnemar(changed, found.documents),
    )


def _detectable(sample: _Sample, stderr: float) -> float:
    """By the t test; where nothing varies, by how finely outcomes are told apart."""
    if sample.aggregation == "mean":
        if stderr:
            return detectable_by_t(stderr, sample.effective)
        return detectable_by_mcnemar(0, sample.documents) * (np.ptp(sample.values) or 1.0)
    grain = RESOLUTION * math.sqrt(sample.documents) / sample.weights.sum(axis=0).min()
    return detectable_by_t(max(stderr, grain * abs(SLOPES[sample.aggregation])), sample.effective)


def _by_t(interval: Interval, documents: float, confidence: float) -> tuple[float, float]:
    reach = float(special.stdtrit(documents - 1, (1 + confidence) / 2)) * interval.stderr
    return interval.estimate - reach, interval.estimate + reach


def _paired_t(interval: Interval, documents: float) -> float:
    if interval.stderr == 0:
        return 1.0 if interval.estimate == 0 else 0.0
    return float(2 * special.stdtr(documents - 1, -abs(interval.estimate / interval.stderr)))


AnEffect = TypeVar("AnEffect", bound=Tested)


def adjust(effects: Sequence[AnEffect]) -> list[AnEffect]:
    """The same effects with p adjusted over all of them, in the same order."""
    if not effects:
        return []
    raw = [effect.p for effect in effects]
    holm = multipletests(raw, method="holm")[1]
    bh = multipletests(raw, method="fdr_bh")[1]
    return [
        dataclasses.replace(effect, p_holm=float(a), p_bh=float(b))
        for effect, a, b in zip(effects, holm, bh, strict=True)
    ]


LEVEL_NONINFERIORITY = 0.05  # one-sided


@dataclass(frozen=True, kw_only=True, slots=True)
class Regression:
    """How much worse the new score is, with one-sided 95 % bounds; negative is better."""

    estimate: float
    low: float
    high: float


def worsening(effect: Effect, *, higher_is_better: bool) -> Regression:
    """From an effect (new − old), on the scale of its test: for perplexities, of logarithms.

    Student's t on the documents' contributions; score bounds where few answers changed; for
    perplexities of pages that differ in length the ends of the two-sided 95 % interval. In
    simulations where damage grows with a page's length they covered 94 % or more, the bootstrap-t's
    own one-sided bounds 91 to 95 %.
    """
    low, high = effect.bounds
    if higher_is_better:
        return Regression(estimate=-effect.estimate, low=-high, high=-low)
    return Regression(estimate=effect.estimate, low=low, high=high)


def documents_needed(gap: float, stderr: float, documents: int) -> int | None:
    """Documents at which a bound tells, with 80 % power, a difference ``gap`` from the margin.

    With a gap of the whole margin: what it takes to pass a quantizer that changes nothing. The
    standard error shrinks as 1/√n. ``None`` where the gap is 0: no number is enough.
    """
    if gap <= 0:
        return None
    ratio = float(special.ndtri(1 - LEVEL_NONINFERIORITY) + special.ndtri(POWER)) * stderr / gap
    return max(2, math.ceil(documents * ratio**2))
