"""Many tests at once, and non-inferiority."""

import dataclasses

import numpy as np
import pytest
from panels import SIMULATIONS, TWO, answers, panel

from qbench.statistics import adjust, documents_needed, effect, resample, worsening

# Many tests, power, non-inferiority


def test_holm_and_benjamini_hochberg_give_the_textbook_values():
    both = panel(*answers(np.random.default_rng(12), 99, 0.1, 0.1))
    one = effect(both, TWO, "mean", resample(both, rounds=50))
    raw = [0.01, 0.04, 0.03, 0.005]
    found = adjust([dataclasses.replace(one, p=p) for p in raw])
    assert [e.p_holm for e in found] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert [e.p_bh for e in found] == pytest.approx([0.02, 0.04, 0.04, 0.02])
    assert [e.mark for e in found] == ["‡", "†", "†", "‡"]


def test_a_score_at_the_margin_passes_non_inferiority_in_5_of_100_simulations():
    rng = np.random.default_rng(14)
    passed = 0
    for simulation in range(SIMULATIONS):
        both = panel(*answers(rng, 301, 0.05, 0.08))
        found = effect(both, TWO, "mean", resample(both, rounds=20, seed=simulation))
        passed += worsening(found, higher_is_better=True).high < 0.03
    assert passed / SIMULATIONS == pytest.approx(0.05, abs=0.02)


def test_with_as_many_documents_as_needed_an_equal_quantizer_passes_in_80_of_100():
    needed = documents_needed(0.03, 0.02, 400)
    se = 0.02 * np.sqrt(400 / needed)
    estimates = np.random.default_rng(15).normal(scale=se, size=20_000)
    assert np.mean(estimates + 1.645 * se < 0.03) == pytest.approx(0.80, abs=0.01)


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_worse_is_positive_whichever_way_a_metric_points(higher_is_better):
    new, old = np.zeros(60), np.concatenate([np.ones(30), np.zeros(30)])
    found = effect(panel(new, old), TWO, "mean", resample(panel(new, old), rounds=50))
    worse = worsening(found, higher_is_better=higher_is_better)
    assert worse.estimate == (0.5 if higher_is_better else -0.5)
    assert worse.low < worse.estimate < worse.high
