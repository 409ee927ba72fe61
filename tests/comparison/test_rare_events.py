"""Right-or-wrong answers are counted: ties are ties, and rare changes keep their coverage."""

from functools import cache

import numpy as np
import pytest
from panels import FOUR, TWO, panel
from scipy import special, stats

from qbench.statistics import effect, resample
from qbench.statistics.effect import (
    detectable_by_mcnemar,
    detectable_by_t,
)

REPETITIONS = 2_000
# One standard error of a coverage of 95 % from so many repetitions is 0.49 points.
TOLERANCE = 3 * (0.95 * 0.05 / REPETITIONS) ** 0.5
STEPS = range(-2, 3)


def right(count, documents):
    return np.arange(documents) < count


# Ties


@pytest.mark.parametrize("documents", [7, 49, 200, 1000, 2376, 5153])
def test_equal_damages_are_a_tie_whatever_the_scores(documents):
    rng = np.random.default_rng(documents)
    for _ in range(15):
        a, c = (int(count) for count in rng.integers(3, documents - 3, size=2))
        step = int(rng.integers(-3, 4))
        columns = [right(a + step, documents), right(a, documents),
                   right(c + step, documents), right(c, documents)]  # fmt: skip
        four = panel(*[rng.permutation(column) for column in columns])
        for resampled in (None, resample(four, rounds=20)):
            assert effect(four, FOUR, "mean", resampled).estimate == 0.0


# Coverage


@cache
def interval(counts):
    """What ``effect`` gives for four columns that differ in so many documents each way."""
    steps = np.repeat(list(STEPS), counts)
    columns = [steps > 0, steps < 0, steps < -1, steps > 1]
    four = panel(*columns)
    found = effect(four, FOUR, "mean", resample(four, rounds=1_000))
    return found.interval.low, found.interval.high


@pytest.mark.parametrize(
    ("documents", "chances"),
    [
        (200, (0.01, 0.01, 0.01, 0.01)),
        (200, (0.99, 0.99, 0.99, 0.99)),
        (1000, (0.003, 0.003, 0.003, 0.003)),
        (200, (0.03, 0.01, 0.01, 0.01)),
        (200, (0.05, 0.01, 0.02, 0.01)),
        (1000, (0.012, 0.002, 0.002, 0.002)),
        (200, (0.03, 0.03, 0.03, 0.03)),  # about 22 documents tell: score or bootstrap
    ],
)
def test_differences_in_differences_of_rare_events_keep_their_coverage(documents, chances):
    rng = np.random.default_rng(18)
    columns = [rng.random((REPETITIONS, documents)) < chance for chance in chances]
    contrast = sum(sign * column for sign, column in zip(FOUR.values(), columns, strict=True))
    truth = sum(sign * chance for sign, chance in zip(FOUR.values(), chances, strict=True))
    counts = np.stack([(contrast == step).sum(axis=1) for step in STEPS], axis=1)
    ends = np.array([interval(tuple(row)) for row in counts.tolist()])
    covered = np.mean((ends[:, 0] <= truth) & (truth <= ends[:, 1]))
    assert covered >= 0.95 - TOLERANCE


@pytest.mark.parametrize("kept", [0.0, 0.002, 0.015])
def test_the_interval_covers_where_nearly_every_answer_changes_alike(kept):
    """A model that falls apart: right nearly everywhere before, nearly nowhere after."""
    rng, documents = np.random.default_rng(24), 200
    lost = rng.binomial(documents, 1 - kept, size=REPETITIONS)
    found = {}
    for count in np.unique(lost).tolist():
        two = panel(np.zeros(documents), right(count, documents))
        found[count] = effect(two, TWO, "mean", resample(two, rounds=1_000)).interval
    covered = [found[count].low <= kept - 1 <= found[count].high for count in lost.tolist()]
    assert np.mean(covered) >= 0.95 - TOLERANCE
    assert all(one.low < one.high for one in found.values())


# Detectable


@pytest.mark.parametrize(
    ("changed", "documents"), [(0, 200), (3, 200), (12, 200), (60, 200), (500, 5153), (0, 6)]
)
def test_what_is_called_detectable_is_found_by_mcnemar_in_80_of_100_simulations(changed, documents):
    gap = detectable_by_mcnemar(changed, documents)
    share = max(changed / documents, gap)
    rng = np.random.default_rng(19)
    changes = rng.binomial(documents, share, size=20_000)
    gained = rng.binomial(changes, (share + gap) / (2 * share))
    fewer = np.minimum(gained, changes - gained).astype(float)
    found = np.minimum(1, 2 * special.bdtr(fewer, changes, 0.5)) < 0.05
    assert found.mean() == pytest.approx(0.80, abs=0.01)  # 3.5 standard errors


@pytest.mark.parametrize("documents", [3, 16, 150, 2000])
def test_what_is_called_detectable_is_found_by_a_t_test_in_80_of_100_simulations(documents):
    size = detectable_by_t(1 / np.sqrt(documents), documents)
    rng = np.random.default_rng(20)
    found = [
        stats.ttest_1samp(size + rng.normal(size=(2_500, documents)), 0, axis=1).pvalue < 0.05
        for _ in range(4)
    ]
    assert np.mean(found) == pytest.approx(0.80, abs=0.014)  # 3.5 standard errors


@pytest.mark.parametrize("signs", [TWO, FOUR])
@pytest.mark.parametrize(
    ("aggregation", "least", "most"),
    [("mean", 6 / 200, 10 / 200), ("perplexity", 1e-4, 1e-3), ("bits_per_byte", 1e-4, 1e-3)],
)
def test_identical_outcomes_have_a_sensible_bound_on_what_could_be_seen(
    signs, aggregation, least, most
):
    same = np.random.default_rng(22).random(200) < 0.3
    column = same if aggregation == "mean" else -np.exp(np.random.default_rng(23).normal(size=200))
    alike = panel(*[column] * len(signs))
    found = effect(alike, signs, aggregation, resample(alike, rounds=20))
    assert found.estimate == 0.0
    assert found.p == 1.0
    assert least < found.detectable < most
    if aggregation == "mean":  # as few documents claim no certainty
        assert found.interval.low < -0.01 < 0.01 < found.interval.high


@cache
def of_steps(counts):
    """Detectable, and p, of a difference-in-differences with so many −1, 0 and 1."""
    steps = np.repeat([-1, 0, 1], counts)
    found = effect(panel(steps > 0, steps < 0, steps < -1, steps > 1), FOUR, "mean")
    return found.detectable, found.p


@pytest.mark.parametrize(("documents", "changed"), [(200, 4), (200, 22), (200, 40), (1000, 100)])
def test_a_difference_in_differences_of_the_printed_size_is_found_in_80_of_100_simulations(
    documents, changed
):
    gap, _ = of_steps((changed // 2, documents - changed, changed // 2))
    share = max(changed / documents, gap)
    chances = [(share - gap) / 2, 1 - share, (share + gap) / 2]
    counts = np.random.default_rng(24).multinomial(documents, chances, size=3_000)
    found = [of_steps(tuple(row))[1] < 0.05 for row in counts.tolist()]
    assert np.mean(found) == pytest.approx(0.80, abs=0.03)  # 4 standard errors
