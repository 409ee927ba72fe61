"""One effect: a signed sum of scores on the same documents, with its interval and its test."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special

from qbench.comparison.metrics import LOG_SCALE
from qbench.comparison.statistics.bootstrap import ENOUGH_TO_CORRECT, Resampled, bootstrap_interval
from qbench.comparison.statistics.counts import mcnemar, score_interval, sign_flips
from qbench.comparison.statistics.panel import Floats, Panel
from qbench.comparison.statistics.power import (
    detectable_by_mcnemar,
    detectable_by_t,
    detectable_in_steps,
)
from qbench.comparison.statistics.ratio import (
    SLOPES,
    as_scored,
    contrast,
    effective_documents,
)

CONFIDENCE = 0.95
# A bootstrap of a handful of changed answers is too narrow (90 % at 4 of 1,000), and of none has
# no width at all; below this many the score interval is used, whose coverage holds.
FEW_CHANGES = 20
# Log-likelihoods are told apart to a thousandth of a nat, which is what a baseline file keeps.
RESOLUTION = 0.001

Kind = Literal["difference", "log ratio"]
Test = Literal["McNemar, exact", "sign flips, exact", "paired t", "paired t on log-likelihoods"]
Method = Literal["BCa bootstrap", "percentile bootstrap", "Student's t", "score"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate with its 95 % interval and its standard error by the delta method."""

    estimate: float
    low: float
    high: float
    stderr: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """A contrast of scores on the same documents, on the one scale on which it is tested.

    ``kind`` says what ``interval``, ``bounds`` and ``detectable`` are: a ``difference`` in the
    units of the score, or, for perplexities, a ``log ratio``. That is the same contrast of
    ln(perplexity): Δ and damage are the logarithm of a ratio, a difference-in-differences that
    of a ratio of ratios. A perplexity in the millions has no useful error of its own, so there
    is no interval of its raw difference.

    ``difference`` is the contrast of the scores in their own units, as papers print it: a number
    without an interval, and equal to the estimate for the kind ``difference``. ``detectable`` is
    the smallest effect that a two-sided 5 % test on as many documents finds with 80 % power.
    """

    kind: Kind
    interval: Interval
    difference: float
    method: Method  # of ``interval``
    bounds: tuple[float, float]  # one-sided 95 % bounds
    test: Test
    p: float
    p_holm: float | None = None
    p_bh: float | None = None
    detectable: float
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


def needs_rounds(aggregation: str) -> bool:
    """Whether intervals of such scores come from the bootstrap."""
    return aggregation in SLOPES and aggregation not in LOG_SCALE


def effect(
    panel: Panel,
    signs: Mapping[object, int],
    aggregation: str,
    resampled: Resampled | None = None,
) -> Effect | None:
    """The effect Σ sign · score over the panel's columns named in ``signs``.

    Right-or-wrong answers are counted: two columns are tested by McNemar's exact test; four, of
    which few documents tell anything, by flipping signs. All else has a paired t test on the
    documents' contributions. The interval is the score interval where few answers changed, else
    the bootstrap's (Student's t without ``resampled``), and for perplexities Student's t on
    their logarithm.

    ``None`` where the aggregation is not known, fewer than two documents are shared, or a score
    is not finite.
    """
    sample = _sample(panel, signs, aggregation, resampled)
    if sample is None:
        return None
    log = aggregation in LOG_SCALE
    interval, method = _interval(sample)
    found = Effect(
        kind="log ratio" if log else "difference",
        interval=interval,
        difference=_scores_difference(sample) if log else interval.estimate,
        method=method,
        bounds=_by_t(interval, sample.effective, 2 * CONFIDENCE - 1),
        test="paired t on log-likelihoods" if log else "paired t",
        p=_paired_t(interval, sample.effective),
        detectable=_detectable(sample, interval.stderr),
        documents=sample.documents,
    )
    if not sample.binary:
        return found
    counts = _counts(sample)
    changed = sample.documents - counts.get(0, 0)
    if changed < FEW_CHANGES:
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
    panel: Panel, name: object, aggregation: str, resampled: Resampled | None
) -> Interval | None:
    """One column's own score with its interval, in its units; ``None`` as for ``effect``.

    Of a perplexity, that of its logarithm; of accuracies near 0 or 1 Wilson's interval, since
    the bootstrap's is too narrow there.
    """
    sample = _sample(panel, {name: 1}, aggregation, resampled)
    if sample is None:
        return None
    found, _ = _interval(sample)
    if aggregation in LOG_SCALE:
        middle, low, high = np.exp([found.estimate, found.low, found.high]).tolist()
        return Interval(estimate=middle, low=low, high=high, stderr=middle * found.stderr)
    if sample.binary:
        counts = _counts(sample)
        if min(counts.get(0, 0), counts.get(1, 0)) < FEW_CHANGES:
            low, high = score_interval(counts, lowest=0, highest=1, confidence=CONFIDENCE)
            return dataclasses.replace(found, low=low, high=high)
    return found


def value(panel: Panel, name: object, aggregation: str) -> float:
    """One column's score, as lm-eval makes it of the outcomes."""
    index = panel.index[name]
    ratio = panel.values[:, index].sum() / panel.weights[:, index].sum()
    return float(as_scored(ratio, aggregation))


def _sample(
    panel: Panel, signs: Mapping[object, int], aggregation: str, resampled: Resampled | None
) -> _Sample | None:
    if aggregation not in SLOPES or panel.documents < 2:
        return None
    columns = [panel.index[name] for name in signs]
    sample = _Sample(
        values=panel.values[:, columns],
        weights=panel.weights[:, columns],
        sign=np.array(list(signs.values()), dtype=float),
        ratios=resampled.ratios[:, columns] if resampled else None,
        aggregation=aggregation,
    )
    weight = sample.weights.sum(axis=0)
    # A document that has all the weight leaves nothing to compare it with.
    if not (np.isfinite(sample.values).all() and np.all(sample.weights < weight)):
        return None
    return sample if math.isfinite(_scores_difference(sample)) else None


def _scores_difference(sample: _Sample) -> float:
    ratio = sample.values.sum(axis=0) / sample.weights.sum(axis=0)
    with np.errstate(invalid="ignore"):  # ∞ − ∞: not finite either
        return float(as_scored(ratio, sample.aggregation) @ sample.sign)


def _interval(sample: _Sample) -> tuple[Interval, Method]:
    values, weights, sign = sample.values, sample.weights, sample.sign
    estimate, stderr = contrast(values, weights, sign, sample.aggregation)
    found = Interval(estimate=estimate, low=estimate, high=estimate, stderr=stderr)
    documents = sample.effective
    if sample.ratios is None or sample.aggregation in LOG_SCALE:
        low, high = _by_t(found, documents, CONFIDENCE)
        return dataclasses.replace(found, low=low, high=high), "Student's t"
    slope = SLOPES[sample.aggregation]
    left_out = (values.sum(axis=0) - values) / (weights.sum(axis=0) - weights)
    low, high = bootstrap_interval(
        estimate,
        slope * sample.ratios @ sign,
        slope * left_out @ sign,
        confidence=CONFIDENCE,
        documents=documents,
    )
    corrected = documents >= ENOUGH_TO_CORRECT
    method: Method = "BCa bootstrap" if corrected else "percentile bootstrap"
    return dataclasses.replace(found, low=low, high=high), method


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
        method="score",
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
