"""McNemar's test and the score interval against the literature and against scipy."""

import numpy as np
import pytest
from scipy import optimize, stats
from statsmodels.stats.contingency_tables import mcnemar as reference_mcnemar

from qbench.statistics.effect import mcnemar, score_interval

# McNemar


@pytest.mark.parametrize(("gained", "lost"), [(3, 9), (0, 5), (25, 25), (121, 59), (1, 0)])
def test_mcnemar_equals_the_exact_test_of_statsmodels(gained, lost):
    table = [[40, gained], [lost, 17]]
    assert mcnemar(gained, lost) == pytest.approx(reference_mcnemar(table, exact=True).pvalue)


# Score interval


def tango(gained, lost, documents, confidence=0.95):
    counts = {1: gained, 0: documents - gained - lost, -1: lost}
    return score_interval(counts, lowest=-1, highest=1, confidence=confidence)


def closed_form(gained, lost, documents):
    """Tango (1998) as printed there: the upper end of gained − lost, at 95 %."""
    z = stats.norm.ppf(0.975)

    def excess(gap):
        a, c = 2 * documents, -lost * gap * (1 - gap)
        b = -gained - lost + (2 * documents - gained + lost) * gap
        share = (np.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
        return (
            gained
            - lost
            - documents * gap
            + z * np.sqrt(documents * max(2 * share + gap * (1 - gap), 0.0))
        )

    return optimize.brentq(excess, (gained - lost) / documents + 1e-9, 1.0)


@pytest.mark.parametrize(
    ("gained", "lost", "documents"), [(9, 4, 57), (0, 5, 33), (900, 1100, 20_000), (8, 8, 16)]
)
def test_the_score_interval_of_changes_is_tangos(gained, lost, documents):
    low, high = tango(gained, lost, documents)
    assert high == pytest.approx(closed_form(gained, lost, documents), abs=1e-9)
    assert low == pytest.approx(-closed_form(lost, gained, documents), abs=1e-9)


@pytest.mark.parametrize(("right", "documents"), [(0, 20), (3, 20), (20, 20), (1, 500)])
def test_the_score_interval_of_right_answers_is_wilsons(right, documents):
    counts = {0: documents - right, 1: right}
    ours = score_interval(counts, lowest=0, highest=1, confidence=0.95)
    reference = stats.binomtest(right, documents).proportion_ci(0.95, method="wilson")
    assert ours == pytest.approx((reference.low, reference.high), abs=1e-9)


def test_the_score_interval_of_several_steps_is_the_means_that_lagrange_does_not_reject():
    counts = {-2: 1, -1: 4, 0: 190, 1: 3, 2: 2}
    low, high = score_interval(counts, lowest=-2, highest=2, confidence=0.95)
    values, often = (np.array(part, dtype=float) for part in zip(*counts.items(), strict=True))

    def statistic(mean):  # by the dual of the constrained likelihood, another way than ours
        def slack(tilt):
            return np.sum(often * (values - mean) / (1 + tilt * (values - mean)))

        tilt = optimize.brentq(slack, -1 / (2 - mean) + 1e-9, 1 / (2 + mean) - 1e-9)
        shares = often / 200 / (1 + tilt * (values - mean))
        variance = np.sum(shares * values**2) - mean**2
        return (np.sum(often * values) / 200 - mean) ** 2 * 200 / variance

    assert statistic(low) == pytest.approx(stats.chi2.ppf(0.95, 1), rel=1e-6)
    assert statistic(high) == pytest.approx(stats.chi2.ppf(0.95, 1), rel=1e-6)
