"""Metrics over all documents at once: scikit-learn's values, and errors as simulation has them."""

import numpy as np
import pytest
from sklearn.metrics import f1_score, matthews_corrcoef

from qbench.statistics import Column, Panel, effect, score, value
from qbench.statistics.pairs import pair_scores

METRICS = {"f1": f1_score, "matthews_corrcoef": matthews_corrcoef}


def drawn(rng, documents, agreement, classes=2):
    gold = rng.integers(classes, size=documents)
    right = rng.random((documents, len(agreement))) < agreement
    other = (gold[:, None] + rng.integers(1, classes, size=right.shape)) % classes
    return gold, np.where(right, gold[:, None], other)


def panel(gold, guesses):
    number = np.arange(len(gold))
    return Panel.of({i: Column.of(number, gold, guess) for i, guess in enumerate(guesses.T)})


@pytest.mark.parametrize(("metric", "classes"), [("f1", 2), ("matthews_corrcoef", 2),
                                                 ("matthews_corrcoef", 5)])  # fmt: skip
def test_scores_are_scikit_learns(metric, classes):
    gold, guesses = drawn(np.random.default_rng(0), 60, [0.9, 0.5, 0.1], classes)
    guesses = np.column_stack([guesses, np.ones(60), np.zeros(60)])
    expected = [METRICS[metric](gold, guess) for guess in guesses.T]
    whole, rounds = pair_scores(gold.astype(float), guesses.astype(float), metric, rounds=50)
    assert whole == pytest.approx(expected)
    assert rounds.shape == (50, 5)
    found = panel(gold, guesses)
    assert [value(found, i, metric) for i in range(5)] == pytest.approx(expected)
    assert score(found, 0, metric, None).low < expected[0] < score(found, 0, metric, None).high


@pytest.mark.parametrize("metric", METRICS)
def test_the_error_is_that_of_repeated_draws_and_the_interval_holds(metric):
    rng, found = np.random.default_rng(1), []
    for _ in range(60):
        found.append(effect(panel(*drawn(rng, 150, [0.8, 0.7])), {0: 1, 1: -1}, metric))
    truth = np.mean([one.estimate for one in found])
    errors = [one.interval.stderr for one in found]
    assert np.mean(errors) == pytest.approx(np.std([one.estimate for one in found]), rel=0.3)
    assert sum(one.interval.low <= truth <= one.interval.high for one in found) >= 52


def test_cells_that_answer_alike_differ_by_nothing_and_others_than_asked_are_not_compared():
    gold, guesses = drawn(np.random.default_rng(2), 50, [0.8])
    same = effect(panel(gold, np.repeat(guesses, 2, axis=1)), {0: 1, 1: -1}, "f1")
    assert (same.estimate, same.interval.low, same.interval.high, same.p) == (0, 0, 0, 1)
    number = np.arange(50)
    other = Panel.of({0: Column.of(number, gold, guesses[:, 0]),
                      1: Column.of(number, 1 - gold, guesses[:, 0])})  # fmt: skip
    assert effect(other, {0: 1, 1: -1}, "f1") is None
