"""Margins of the gate: those that the user gives, defaults, and what the documents support."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from qbench.errors import RecipeError
from qbench.metrics import LOG_MEAN, LOG_SCALE, base_metric, is_percentage
from qbench.records import ANSWERS, Score
from qbench.statistics import Column, Panel, Regression, effect
from qbench.statistics.panel import MOST_DOCUMENTS, degrees_of_freedom, estimate_contrast

# Percentage points for accuracies, per cent of the value for perplexities, the KL divergence along
# answers and their length.
LEAST = {"acc": 1.0, "perplexity": 2.0, "kl": 10.0, "length": 5.0}
# Per cent. Weights are measured, not sampled, so these see what scores cannot. With other threads
# or instructions of the processor GPTQ moves one layer's error by up to 1.3 %, its gain by 0.2 %
# and the model's error by 0.1 %; other methods move by less than 0.001 %. Scales 3 % too large are
# a gain of 3 %, at any number of bits.
AUDIT_MARGINS = {
    "weight_error": 5.0,
    "bits_per_weight": 1.0,
    "coverage": 0.0,
    "activation_error": 5.0,
    "key_error": 5.0,
    "value_error": 5.0,
    "layer_error": 10.0,
    "layer_gain": 1.0,
    "layer_levels": 25.0,
    "layer_bits": 1.0,
}
# What a harmless change does to scores, measured on 4-bit GPTQ of two small models with other
# threads and instructions of the processor: 0.5 to 3 % of the answers flip, and documents'
# log-likelihoods move by 7 to 15 % of their own standard deviation.
FLIPS = 0.03
MOVES = 0.15
# The same of answers: from the first token that rounding changes on they are others.
ANSWER_FLIPS = 0.1
ANSWER_MOVES = 0.5
LEVEL = 0.05  # one-sided, of the test
MISSED = 0.05  # share of harmless changes that do not pass on every line


@dataclass(frozen=True, kw_only=True, slots=True)
class Margin:
    """How much worse a score may be, in percentage points or per cent. ``supported`` is the
    smallest margin that the number of documents supports; ``given``: by the user."""

    value: float
    given: bool
    supported: float


def parse_margins(texts: Sequence[str]) -> dict[str, float]:
    """Return the margins by metric of texts such as ``["acc=0.5", "word_perplexity=1"]``.

    ``acc`` and ``perplexity`` stand for all accuracies and all perplexities that are not named, a
    metric's name for it with any of lm-eval's filters. Raises RecipeError for any other text.
    """
    margins = {}
    for text in texts:
        metric, _, number = text.rpartition("=")
        try:
            margin = float(number.removesuffix("%"))
        except ValueError:
            margin = math.nan
        if not metric.strip() or not math.isfinite(margin) or margin < 0:
            raise RecipeError(
                f"--margin {text}: write METRIC=NUMBER, such as acc=0.5 (percentage points) or "
                "perplexity=2 (per cent)"
            )
        if metric.strip() in margins:
            raise RecipeError(f"--margin {text}: {metric.strip()} is given twice")
        margins[metric.strip()] = margin
    return margins


def require_known(given: Mapping[str, float], scores: Collection[Score]) -> None:
    """Raise RecipeError if a margin is ``given`` for a metric that the baseline's ``scores`` do not
    have, or if a metric that is neither an accuracy nor a perplexity has no margin."""
    named = [name for score in scores for name in (score.metric, base_metric(score.metric))]
    possible = [*dict.fromkeys([*LEAST, *named]), *AUDIT_MARGINS]
    for name in given:
        if name not in possible:
            raise RecipeError(
                f"--margin {name}={given[name]:g}: the baseline has no {name}; possible: "
                f"{', '.join(possible)}"
            )

    need = dict.fromkeys(score.metric for score in scores if _family(score) is None)
    if lacking := [metric for metric in need if not {metric, base_metric(metric)} & given.keys()]:
        raise RecipeError(
            f"no margin by default: {', '.join(lacking)}; add "
            + " ".join(f'--margin "{metric}=NUMBER"' for metric in lacking)
            + " (in the metric's own units)"
        )


def margin_of(score: Score, column: Column, given: Mapping[str, float], *, lines: int) -> Margin:
    """Return the margin of one ``score`` of the baseline. ``column`` has its outcomes, ``lines`` is
    the number of scores that are compared together. Call ``require_known`` before."""
    family = _family(score)
    supported = math.nan
    if family is not None:
        supported = max(LEAST[family], _supported(score, column, lines))
    for name in (score.metric, base_metric(score.metric), family):
        if name in given:
            return Margin(value=given[name], given=True, supported=supported)
    return Margin(value=supported, given=False, supported=supported)


def _family(score: Score) -> str | None:
    if is_percentage(score.metric):
        return "acc"
    if score.aggregation == LOG_MEAN:
        return score.metric
    return "perplexity" if score.aggregation in LOG_SCALE else None


def _supported(score: Score, column: Column, lines: int) -> float:
    """Return the smallest margin at which a harmless change passes on all ``lines`` with
    probability 1 − MISSED (Bonferroni), rounded up to a tenth.

    The test passes if its upper bound is within the margin, so this is a quantile of that bound's
    distribution under a change with mean 0. It depends on the baseline alone.
    """
    documents, missed = len(column.documents), MISSED / lines
    if documents < 2 or not math.isfinite(score.value):
        return 0.0
    if _family(score) == "acc":  # an answer that is partly right moves less than one that flips
        flips = ANSWER_FLIPS if score.task == ANSWERS else FLIPS
        margin = _bound_of_flips(documents, missed, flips)
    else:
        weights, level, freedom = column.weights, LEVEL, documents - 1
        values, signs = column.values[:, None], np.ones(1)
        _, stderr = estimate_contrast(values, weights[:, None], signs, score.aggregation)
        # The bound of the bootstrap-t is the end of the two-sided interval.
        if np.ptp(weights) or documents <= MOST_DOCUMENTS:
            kurtosis = 3 * float(np.mean(weights**4) / np.mean(weights**2) ** 2)
            level, freedom = LEVEL / 2, degrees_of_freedom(weights, kurtosis)
        reach = special.stdtrit(freedom, (1 - level, 1 - missed)).sum()
        margin = float(reach) * (ANSWER_MOVES if score.task == ANSWERS else MOVES) * stderr
        margin = math.expm1(margin)
    return math.ceil(1000 * margin - 1e-9) / 10


@functools.cache
def _bound_of_flips(documents: int, missed: float, flips: float) -> float:
    """Return the one-sided bound on the loss, as a fraction, that harmless flips of a share
    ``flips`` exceed with probability ``missed``: answers are lost and won at the same rate, and by
    chance lost more."""
    rate = flips * documents / 2  # of either, Poisson
    loss = int(stats.skellam.ppf(1 - missed, rate, rate))  # of lost − won
    # The likeliest counts with that difference: lost · won = rate².
    won = round((math.hypot(loss, 2 * rate) - loss) / 2)
    values = np.zeros((documents, 2))
    values[: min(loss + won, documents), 0] = 1
    values[max(0, documents - won) :, 1] = 1
    panel = Panel(values=values, weights=np.ones_like(values), index={"old": 0, "new": 1})
    return Regression.of(effect(panel, {"old": 1, "new": -1}, "mean")).high
