"""Margins of answers: KL along them, their length both ways, and what drawing adds."""

from types import SimpleNamespace

import numpy as np
import pytest

from qbench.gate.baseline import CellResults
from qbench.gate.check import _gate, changes
from qbench.gate.verdict import margin_of
from qbench.metrics import LOG_MEAN
from qbench.records import ANSWERS, Precision, Score
from qbench.statistics import Column

PROMPTS = 200


def cell(metric, values, variances=None):
    higher = metric in ("stops", "exact_match")
    score = Score(task=ANSWERS, label=ANSWERS, metric=metric, value=float(np.mean(values)),
                  stderr=None, higher_is_better=higher, documents=len(values),
                  aggregation=LOG_MEAN if metric in ("kl", "length") else "mean")  # fmt: skip
    name, each = (ANSWERS, metric), np.ones(len(values))
    columns = {name: Column.of(np.arange(len(values)), values, each)}
    spread = {} if variances is None else {name: Column.of(np.arange(len(values)), variances, each)}
    return CellResults(SimpleNamespace(precision=Precision()), columns, {name: score}, spread)


def gate(metric, old, new, given=None, variances=None):
    name = (ANSWERS, metric)
    before, after = (cell(metric, values, variances) for values in (old, new))
    margin = margin_of(before.scores[name], before.columns[name], given or {}, lines=20)
    return _gate(changes({"a/b": (before, after)})["a/b", name], margin, same=False)


@pytest.mark.parametrize(
    ("metric", "factor", "given", "outcome"),
    [
        ("kl", 1.0, {}, "pass"), ("kl", 1.0, {"kl": 10.0}, "pass"), ("kl", 1.5, {}, "fail"),
        ("kl", 0.5, {}, "pass"), ("kl", 1.5, {"kl": 100.0}, "pass"),
        ("length", 1.0, {"length": 5.0}, "pass"), ("length", 1.3, {"length": 5.0}, "fail"),
        ("length", 0.7, {"length": 5.0}, "fail"), ("length", 0.97, {"length": 5.0}, "pass"),
    ],
)  # fmt: skip
def test_kl_and_lengths_are_judged_in_per_cent_and_lengths_both_ways(
    metric, factor, given, outcome
):
    draw = np.random.default_rng(0)
    old = draw.gamma(2.0, 0.05 if metric == "kl" else 60.0, PROMPTS)
    new = old * factor * np.exp(draw.normal(0, 0.05, PROMPTS))
    result = gate(metric, old, new, given)
    assert result.outcome == outcome, result.reason
    assert result.given == bool(given)


def test_what_cannot_be_told_says_how_many_prompts_or_samples_would():
    draw = np.random.default_rng(1)
    share = draw.random(PROMPTS)
    old, new = (draw.binomial(4, share) / 4 for _ in range(2))
    variances = share * (1 - share) / 4
    result = gate("stops", old, new, {"stops": 1.0}, variances)
    assert result.outcome == "inconclusive"
    assert "documents to tell: about" in result.reason
    assert "times as many samples" in result.reason
    greedy = gate("stops", (old > 0.5) * 1.0, (new > 0.5) * 1.0, {"stops": 1.0})
    assert "samples" not in greedy.reason
