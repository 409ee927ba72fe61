"""One effect: a signed sum of scores on the same documents, with its interval and its test."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special

from qbench.comparison.statistics.bootstrap import ENOUGH_TO_CORRECT, Resampled, bootstrap_interval
from qbench.comparison.statistics.pairs import mcnemar, score_interval
from qbench.comparison.statistics.panel import Floats, Panel

CONFIDENCE = 0.95
POWER = 0.80
LOG_SCALE = ("perplexity", "weighted_perplexity")
# A bootstrap of a handful of changed answers is too narrow (90 % at 4 of 1,000), and of none has
# no width at all; below this many the score interval is used, whose coverage holds.
FEW_CHANGES = 20
KNOWN = ("mean", "bits_per_byte", *LOG_SCALE)

Test = Literal["McNemar, exact", "paired t", "paired t on log-likelihoods"]
Method = Literal["BCa bootstrap", "percentile bootstrap", "Student's t", "score", "agreement"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate with its 95 % interval and its standard error by the delta method."""

    estimate: float
    low: float
    high: float
    stderr: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """A difference between scores, or between such differences, on the same documents.

    ``interval`` is in the units of the score. ``log_ratio`` is there for perplexities: the same
    contrast of ln(perplexity), which is what is tested, since a perplexity in the millions has
    no useful standard error; its interval is the test's own, from Student's t. ``detectable`` is
    the smallest effect that a two-sided 5 % test on as many documents finds with 80 % power, on
    the scale of the test.
    """

    interval: Interval
    log_ratio: Interval | None
    method: Method  # of ``interval``
    bounds: tuple[float, float]  # one-sided 95 % bounds on the scale of the test
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
    def tested(self) -> Interval:
        """The interval on the scale that the test uses."""
        return self.log_ratio or self.interval

    @property
    def mark(self) -> str:
        """``‡`` significant at 5 % after Holm, ``†`` after Benjamini–Hochberg only."""
        if self.p_holm is not None and self.p_holm < 1 - CONFIDENCE:
            return "‡"
        return "†" if self.p_bh is not None and self.p_bh < 1 - CONFIDENCE else ""


def effect(
    panel: Panel,
    signs: Mapping[object, int],
    aggregation: str,
    resampled: Resampled | None = None,
) -> Effect | None:
    """The effect Σ sign · score over the panel's columns named in ``signs``.

    Without ``resampled`` the interval is Student's t with the delta method's standard error.

    Two terms whose values are 0 or 1 are tested by McNemar's exact test, all else by a paired t
    test on the documents' contributions. ``None`` where the aggregation is not known, fewer than
    two documents are shared, or a score is not finite.
    """
    if aggregation not in KNOWN or panel.documents < 2:
        return None
    columns = [panel.place[name] for name in signs]
    values, weights = panel.values[:, columns], panel.weights[:, columns]
    sign = np.array(list(signs.values()), dtype=float)
    ratios = resampled.ratios[:, columns] if resampled else None
    scores = "exp" if aggregation in LOG_SCALE else aggregation
    if not (np.isfinite(values).all() and np.all(weights.sum(axis=0) > 0)):
        return None
    interval = _interval(values, weights, sign, ratios, scores)
    if not math.isfinite(interval.estimate):
        return None
    documents = panel.documents
    binary = scores == "mean" and np.all(weights == 1) and np.all((values == 0) | (values == 1))
    effective = effective_documents(weights)
    method: Method = "Student's t"
    if ratios is not None:
        corrected = effective >= ENOUGH_TO_CORRECT
        method = "BCa bootstrap" if corrected else "percentile bootstrap"
    log_ratio = None
    if scores == "exp":
        log_ratio = _interval(values, weights, sign, None, "log")
    tested = log_ratio or interval
    reach = float(special.stdtrit(effective - 1, CONFIDENCE)) * tested.stderr
    bounds = tested.estimate - reach, tested.estimate + reach
    test: Test = "paired t on log-likelihoods" if log_ratio else "paired t"
    if binary and len(columns) == 2:
        gained, lost = (int(np.sum(values @ sign == step)) for step in (1, -1))
        test, p = "McNemar, exact", mcnemar(gained, lost)
        if gained + lost < FEW_CHANGES:
            method = "score"
            counts = gained, lost, documents
            low, high = score_interval(*counts, confidence=CONFIDENCE)
            interval = dataclasses.replace(interval, low=low, high=high)
            bounds = score_interval(*counts, confidence=2 * CONFIDENCE - 1)
    else:
        p = _paired_t(tested, effective)
        if binary and len(columns) > 1 and not np.any(values @ sign):
            method = "agreement"
            reach = agreement_bound(documents) * len(columns) / 2
            interval = dataclasses.replace(interval, low=-reach, high=reach)
            bounds = -reach, reach
    return Effect(
        interval=interval,
        log_ratio=log_ratio,
        method=method,
        bounds=bounds,
        test=test,
        p=p,
        detectable=detectable(tested.stderr, effective),
        documents=documents,
    )


def score(panel: Panel, name: object, aggregation: str, resampled: Resampled) -> Interval | None:
    """One column's own score with its interval; ``None`` as for ``effect``.

    Wilson's interval for accuracies near 0 or 1, where the bootstrap's is too narrow.
    """
    found = effect(panel, {name: 1}, aggregation, resampled)
    if found is None:
        return None
    right = panel.values[:, panel.place[name]]
    rare = min(right.sum(), panel.documents - right.sum())
    if found.test == "paired t" and set(np.unique(right)) <= {0, 1} and rare < FEW_CHANGES:
        from scipy import stats  # takes a second to import, and this is rare

        test = stats.binomtest(int(right.sum()), panel.documents)
        low, high = test.proportion_ci(CONFIDENCE, method="wilson")
        return dataclasses.replace(found.interval, low=float(low), high=float(high))
    return found.interval


def value(panel: Panel, name: object, aggregation: str) -> float:
    """One column's score, as lm-eval makes it of the outcomes."""
    place = panel.place[name]
    ratio = panel.values[:, place].sum() / panel.weights[:, place].sum()
    return float(_score(ratio, "exp" if aggregation in LOG_SCALE else aggregation))


def agreement_bound(documents: int) -> float:
    """Upper 97.5 % bound (Clopper–Pearson) on the share that differ when none of n did.

    A bootstrap of identical outcomes has width zero, which claims too much.
    """
    return 1 - ((1 - CONFIDENCE) / 2) ** (1 / documents)


def detectable(stderr: float, documents: float) -> float:
    """The effect that a two-sided 5 % test finds with 80 % power, given the standard error."""
    critical = special.stdtrit(documents - 1, (1 + CONFIDENCE) / 2)
    return float((critical + special.ndtri(POWER)) * stderr)


def _interval(
    values: Floats, weights: Floats, sign: Floats, ratios: Floats | None, scale: str
) -> Interval:
    total, weight = values.sum(axis=0), weights.sum(axis=0)
    ratio = total / weight
    documents = effective_documents(weights)
    with np.errstate(over="ignore", invalid="ignore"):
        estimate = float(_score(ratio, scale) @ sign)
        slope = _slope(ratio, scale) * sign / weight
        # Linearization of a ratio of sums: each document's share of the error (delta method),
        # over 1 − its leverage, since a long page pulls the ratio towards itself.
        share = ((values - ratio * weights) / (1 - weights / weight)) @ slope
        stderr = math.sqrt((len(values) - 1) / len(values) * float(np.sum(share**2)))
        if ratios is None:
            reach = float(special.stdtrit(documents - 1, (1 + CONFIDENCE) / 2)) * stderr
            low, high = estimate - reach, estimate + reach
        else:
            left_out = _score((total - values) / (weight - weights), scale) @ sign
            rounds = _score(ratios, scale) @ sign
            low, high = bootstrap_interval(
                estimate, rounds, left_out, confidence=CONFIDENCE, documents=documents
            )
    return Interval(estimate=estimate, low=low, high=high, stderr=stderr)


def effective_documents(weights: Floats) -> float:
    """Equally long documents that would tell as much: (Σw)² / Σw², by Kish; at least 2."""
    return max(2.0, float(np.min(weights.sum(axis=0) ** 2 / np.sum(weights**2, axis=0))))


def _score(ratio: Floats, scale: str) -> Floats:
    """What lm-eval makes of Σ values / Σ weights, or its logarithm."""
    if scale == "exp":
        return np.exp(-ratio)
    if scale == "log":
        return -ratio
    return -ratio / math.log(2) if scale == "bits_per_byte" else ratio


def _slope(ratio: Floats, scale: str) -> Floats:
    """Derivative of ``_score``."""
    if scale == "exp":
        return -np.exp(-ratio)
    steepness = {"log": -1.0, "bits_per_byte": -1 / math.log(2), "mean": 1.0}[scale]
    return np.full_like(ratio, steepness)


def _paired_t(interval: Interval, documents: float) -> float:
    if interval.stderr == 0:
        return 1.0 if interval.estimate == 0 else 0.0
    return float(2 * special.stdtr(documents - 1, -abs(interval.estimate / interval.stderr)))
