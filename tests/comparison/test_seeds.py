"""Effects over seeds: intervals that cover, and what of the uncertainty is the seeds'."""

import itertools

import numpy as np
import pytest
from panels import panel_of as panel
from scipy import stats

from qbench.statistics import Missing, effect, over_seeds

DOCUMENTS = 50


def pairs(seeds):
    """Contrasts of the second model minus the first, seed by seed."""
    return [[{("new", seed): 1, ("old", seed): -1} for seed in range(seeds)]]


def drawn(rng, seeds, by_seed, by_document, rest):
    """Outcomes whose differences have these standard deviations, and mean 0."""
    document = rng.normal(0, by_document, DOCUMENTS)
    values = {}
    for seed in range(seeds):
        level = rng.normal(0, by_seed)
        values["old", seed] = common = rng.normal(0, 1, DOCUMENTS)
        values["new", seed] = common + level + document + rng.normal(0, rest, DOCUMENTS)
    return panel(values)


def covers(result):
    return result.low <= 0 <= result.high


PARTS = [(0.1, 1.0, 1.0), (0.3, 0.3, 1.0), (0.0, 1.0, 1.0), (0.2, 1.0, 0.3), (1.0, 1.0, 1.0)]
QUICK = [(2, PARTS[0]), (3, PARTS[1])]


@pytest.mark.parametrize(
    ("seeds", "parts"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
     for case in itertools.product((2, 3, 4, 5), PARTS)],
)  # fmt: skip
def test_the_interval_covers_whichever_part_is_the_larger(seeds, parts):
    by_seed, by_document, rest = parts
    rng = np.random.default_rng([seeds, int(100 * by_seed), int(100 * by_document)])
    result = [
        over_seeds(drawn(rng, seeds, by_seed, by_document, rest), pairs(seeds), "mean")
        for _ in range(800)
    ]
    assert np.mean([covers(one) for one in result]) >= 0.935
    # p and interval agree: both ask whether 0 is among what the outcomes allow
    assert all(covers(one) == (one.p >= 0.05) for one in result if abs(one.p - 0.05) > 1e-6)


@pytest.mark.parametrize(
    ("old", "new", "interval"),
    [(np.arange(100) % 2.0, np.arange(100) % 2.0, (-0.037, 0.037)),
     (np.ones(100), np.zeros(100), (-1.0, -0.926))],
)  # fmt: skip
def test_answers_that_all_changed_alike_leave_the_interval_of_one_training(old, new, interval):
    """Not no interval at all: 300 answers that stayed do not say that none ever changes, nor 300
    that a model lost, with every seed, that all would be."""
    values = {(side, s): each for side, each in (("old", old), ("new", new)) for s in range(3)}
    result = over_seeds(panel(values), pairs(3), "mean")
    one = effect(panel(values), {("new", 0): 1, ("old", 0): -1}, "mean")
    assert (result.low, result.high) == pytest.approx((one.low, one.high))
    assert (result.low, result.high) == pytest.approx(interval, abs=1e-3)
    assert result.estimate == new[0] - old[0]
    assert (result.p == 1) == (old[0] == new[0])


LEVELS = [10.0, 40.0, 25.0, 30.0]  # of four trainings
GAINS = np.random.default_rng(1).normal(0.2, 1, DOCUMENTS)  # of each document


@pytest.mark.parametrize(
    ("new", "sample", "of_seeds"),
    [([np.full(DOCUMENTS, level) for level in LEVELS], LEVELS, 1), ([GAINS] * 3, GAINS, 0)],
    ids=["documents alike", "seeds alike"],
)
def test_without_the_other_part_it_is_students_t_over_seeds_or_documents(new, sample, of_seeds):
    values = {("old", s): np.zeros(DOCUMENTS) for s in range(len(new))}
    values |= {("new", s): each for s, each in enumerate(new)}
    result = over_seeds(panel(values), pairs(len(new)), "mean")
    expected = stats.ttest_1samp(sample, 0)
    interval = expected.confidence_interval()
    assert (result.low, result.high) == pytest.approx((interval.low, interval.high))
    assert result.p == pytest.approx(expected.pvalue, rel=1e-6)
    assert result.of_seeds == pytest.approx(of_seeds)
    assert result.each == pytest.approx([each.mean() for each in new])


def test_two_trainings_that_happen_to_agree_are_no_surer_than_their_documents():
    one, other = np.random.default_rng(4).normal(0, 1, (2, DOCUMENTS))
    values = {("old", s): np.zeros(DOCUMENTS) for s in range(2)}
    values |= {("new", 0): one, ("new", 1): other + one.mean() - other.mean()}
    result = over_seeds(panel(values), pairs(2), "mean")
    documents = stats.ttest_1samp((one + values["new", 1]) / 2, 0).confidence_interval()
    assert result.low <= documents.low + 1e-9
    assert result.high >= documents.high - 1e-9


def test_perplexities_are_compared_by_their_logarithm_long_pages_weighing_more():
    rng = np.random.default_rng(2)
    words = rng.integers(20, 400, DOCUMENTS).astype(float)
    nats = words * rng.normal(3, 0.2, DOCUMENTS)
    values = {("old", s): -nats * (1 + 0.001 * s) for s in range(3)}
    values |= {("new", s): -nats * (1.02 + 0.002 * s) for s in range(3)}
    result = over_seeds(panel(values, words), pairs(3), "weighted_perplexity")
    mean = nats.sum() / words.sum()
    assert result.kind == "log ratio"
    assert result.each == pytest.approx([mean * 0.02, mean * 0.021, mean * 0.022])
    assert result.low < result.estimate < result.high


def test_unequal_numbers_of_seeds_are_groups_of_their_own():
    rng = np.random.default_rng(5)
    values = {("old", s): rng.normal(0, 1, DOCUMENTS) + s for s in range(2)}
    values |= {("new", s): rng.normal(0, 1, DOCUMENTS) for s in range(3)}
    groups = [[{("new", s): 1} for s in range(3)], [{("old", s): -1} for s in range(2)]]
    result = over_seeds(panel(values), groups, "mean")
    new, old = (
        np.mean([values[side, s].mean() for s in range(n)]) for side, n in (("new", 3), ("old", 2))
    )
    assert result.estimate == pytest.approx(new - old)
    assert result.seeds == 2
    assert len(result.each) == 5


@pytest.mark.parametrize(
    "groups",
    [[[{("new", 0): 1, ("old", 0): -1}]], [[{("new", 0): 1}, {("new", 1): 1}], [{("old", 0): -1}]]],
)
def test_one_training_says_nothing_about_seeds(groups):
    rng = np.random.default_rng(0)
    result = over_seeds(drawn(rng, 2, 1, 1, 1), groups, "mean")
    assert result == Missing(reason="a group has one training")
