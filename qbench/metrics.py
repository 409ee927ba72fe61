"""Read a metric's name: is it printed in per cent, where in tables, what repeats it?"""

from __future__ import annotations

import functools
import math
import re
from typing import Literal

# The order of the paper's appendix; other metrics follow in the record's order.
METRIC_ORDER = ("acc_norm", "acc", "perplexity", "word_perplexity")
# Functions of the same log-likelihoods as word_perplexity: kept in the CSV, and neither shown nor
# counted among the tests, which would count one question three times.
REDUNDANT = {"byte_perplexity": "word_perplexity", "bits_per_byte": "word_perplexity"}
# Aggregations of perplexities, which are compared by their logarithm.
LOG_SCALE = ("perplexity", "weighted_perplexity")
VARIANCE = ", variance of the mean over samples"
LOG_MEAN = "log mean"  # ours: a mean over documents that is compared by its logarithm
KL_MEAN = "log mean of KL"  # the same, whose interval allows for documents that a sample has missed


def kind_of(aggregation: str) -> Literal["difference", "log ratio"]:
    """Return whether scores are compared by their difference, or by their ratio, that is by the
    difference of logarithms."""
    return "log ratio" if aggregation in (*LOG_SCALE, LOG_MEAN, KL_MEAN) else "difference"


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats; infinite beyond the largest double."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@functools.cache
def base_metric(metric: str) -> str:
    """Return the metric without lm-eval's filter: ``exact_match [strict-match]`` is exact_match."""
    return re.sub(r" \[[^\]]*\]$", "", metric)


def is_percentage(metric: str) -> bool:
    """Return whether papers print ``metric`` times 100."""
    base = base_metric(metric)
    return base.startswith("acc") or base in {"exact_match", "em", "f1", "stops", "repeats"}


def variance_name(metric: str) -> str:
    """Return the name of the outcomes that hold, by prompt, the variance of the mean of ``metric``
    over drawn answers; they are no score."""
    return f"{metric}{VARIANCE}"


def rank(metric: str) -> int:
    """Return the metric's index in the paper's order, without its filter; others come last."""
    base = base_metric(metric)
    return METRIC_ORDER.index(base) if base in METRIC_ORDER else len(METRIC_ORDER)
