"""The score test and its interval against the literature, against scipy, and in simulations."""

import numpy as np
import pytest
from scipy import optimize, stats

from qbench.statistics.intervals import ScoreTest, detectable_mean


def counted(counts, lowest, highest):
    """Return p and the ends of the interval of so many documents with each value."""
    values = np.repeat(list(counts), list(counts.values())).astype(float)
    test = score_test(values[None], highest, lowest)
    return float(test.p()[0]), tuple(float(end[0]) for end in test.interval(0.95))


def score_test(steps, highest, lowest=None):
    """Return the test of steps [estimates, documents] within −``highest``, or ``lowest``, and
    ``highest``."""
    highest = np.broadcast_to(float(highest) if np.isscalar(highest) else highest, len(steps))
    lowest = -highest if lowest is None else np.full(len(steps), float(lowest))
    zeros = np.zeros(len(steps))
    return ScoreTest.of(steps, estimate=zeros, stderr=zeros, lowest=lowest, highest=highest)


@pytest.mark.parametrize(("gained", "lost"), [(3, 9), (0, 5), (25, 25), (121, 59), (1, 0)])
def test_the_p_of_changes_is_mcnemars(gained, lost):
    expected = stats.chi2.sf((gained - lost) ** 2 / (gained + lost), 1)
    ours, _ = counted({1: gained, 0: 57, -1: lost}, -1, 1)
    assert ours == pytest.approx(expected, rel=1e-6)


def closed_form(gained, lost, documents):
    """Tango (1998) as printed there: the upper end of gained − lost, at 95 %."""
    z = stats.norm.ppf(0.975)

    def excess(gap):
        a, c = 2 * documents, -lost * gap * (1 - gap)
        b = -gained - lost + (2 * documents - gained + lost) * gap
        share = (np.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
        spread = np.sqrt(documents * max(2 * share + gap * (1 - gap), 0.0))
        return gained - lost - documents * gap + z * spread

    return optimize.brentq(excess, (gained - lost) / documents + 1e-9, 1.0)


@pytest.mark.parametrize(
    ("gained", "lost", "documents"), [(9, 4, 57), (0, 5, 33), (900, 1100, 20_000), (8, 8, 16)]
)
def test_the_interval_of_changes_is_tangos(gained, lost, documents):
    _, (low, high) = counted({1: gained, 0: documents - gained - lost, -1: lost}, -1, 1)
    assert high == pytest.approx(closed_form(gained, lost, documents), abs=1e-9)
    assert low == pytest.approx(-closed_form(lost, gained, documents), abs=1e-9)


@pytest.mark.parametrize(("right", "documents"), [(0, 20), (3, 20), (20, 20), (1, 500)])
def test_the_interval_of_right_answers_is_wilsons(right, documents):
    _, ours = counted({0: documents - right, 1: right}, 0, 1)
    reference = stats.binomtest(right, documents).proportion_ci(0.95, method="wilson")
    assert ours == pytest.approx((reference.low, reference.high), abs=1e-9)


@pytest.mark.parametrize("counts", [{-2: 1, -1: 4, 0: 190, 1: 3, 2: 2}, {-2: 1, -0.3: 4, 0: 20}])
def test_the_interval_is_the_means_that_lagrange_does_not_reject(counts):
    _, (low, high) = counted(counts, -2, 2)
    values, often = (np.array(part, dtype=float) for part in zip(*counts.items(), strict=True))
    total = often.sum()

    def statistic(mean):  # by the dual of the constrained likelihood, another way than ours
        reachable = {-2.0: 0, 2.0: 0} | dict(zip(values, often, strict=True))
        steps, counted = (np.array(part) for part in zip(*reachable.items(), strict=True))
        ends = (-1 / (2 - mean) + 1e-12, 1 / (2 + mean) - 1e-12)

        def slack(tilt):
            return np.sum(counted * (steps - mean) / (1 + tilt * (steps - mean)))

        if slack(ends[0]) * slack(ends[1]) > 0:
            return None  # mass at an end of the range that was not seen
        tilt = optimize.brentq(slack, *ends)
        shares = counted / total / (1 + tilt * (steps - mean))
        variance = np.sum(shares * steps**2) - mean**2
        return (np.sum(often * values) / total - mean) ** 2 * total / variance

    for end in (low, high):
        if (result := statistic(end)) is not None:
            assert result == pytest.approx(stats.chi2.ppf(0.95, 1), rel=1e-5)


@pytest.mark.parametrize("documents", [5, 20, 80])
def test_interval_and_p_agree_whatever_the_values(documents):
    rng = np.random.default_rng(documents)
    values = rng.choice([-1.0, 0.0, 1.0], (400, documents), p=[0.1, 0.8, 0.1])
    values[::2] *= rng.random((200, documents))
    test = score_test(values, 1.0)
    (low, high), p = test.interval(0.95), test.p()
    assert np.all(((low > 0) | (high < 0) == (p < 0.05)) | (np.abs(p - 0.05) < 1e-6))


@pytest.mark.parametrize("level", [0.05, 0.05 / 72])
@pytest.mark.parametrize(
    ("changed", "documents"), [(0, 200), (3, 200), (12, 200), (60, 200), (500, 5153)]
)
def test_what_is_called_detectable_is_found_in_80_of_100_simulations(changed, documents, level):
    square = changed / documents
    gap = float(detectable_mean(square, documents, reach=1.0, level=level))
    share = max(square, gap)
    rng = np.random.default_rng(19)
    changes = rng.binomial(documents, share, size=20_000)
    gained = rng.binomial(changes, (share + gap) / (2 * share))
    z = np.abs(2 * gained - changes) / np.sqrt(np.maximum(changes, 1))
    result = 2 * stats.norm.sf(z) < level
    assert 0.77 <= result.mean() <= 0.87
