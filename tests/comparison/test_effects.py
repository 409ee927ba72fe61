"""Intervals of effects against known values, against scipy, and against simulated truth."""

import numpy as np
import pytest
from panels import FOUR, SIMULATIONS, TWO, answers, panel
from scipy import stats

from qbench.statistics import Column, Panel, effect, resample, score

# Intervals of effects


@pytest.mark.parametrize("aggregation", ["mean", "bits_per_byte"])
def test_bca_agrees_with_scipys_on_its_own_rounds(aggregation):
    rng = np.random.default_rng(1)
    words = rng.lognormal(3, 0.8, 411).round() + 1
    old = -words * (3 + 0.3 * rng.normal(size=411))
    new = old - words * (0.05 + 0.1 * rng.normal(size=411))
    if aggregation == "mean":
        words = np.ones(411)
    ours = effect(
        panel(new, old, weights=words), TWO, aggregation,
        resample(panel(new, old, weights=words), rounds=5_000),
    )  # fmt: skip

    def statistic(new, old, words, axis=-1):
        ratios = [column.sum(axis=axis) / words.sum(axis=axis) for column in (new, old)]
        transform = {
            "mean": lambda r: r,
            "bits_per_byte": lambda r: -r / np.log(2),
        }[aggregation]
        return transform(ratios[0]) - transform(ratios[1])

    reference = stats.bootstrap(
        (new, old, words), statistic, paired=True, n_resamples=5_000, batch=500,
        rng=np.random.default_rng(2),
    ).confidence_interval  # fmt: skip
    width = reference.high - reference.low
    assert ours.interval.low == pytest.approx(reference.low, abs=0.05 * width)
    assert ours.interval.high == pytest.approx(reference.high, abs=0.05 * width)


def test_bca_leans_as_scipys_where_differences_are_skewed():
    """With the acceleration's sign turned the lower end is off by more than a tenth of the
    interval."""
    rng = np.random.default_rng(4)
    old = rng.normal(size=300)
    new = old + rng.exponential(size=300) ** 3
    found = effect(panel(new, old), TWO, "mean", resample(panel(new, old), rounds=20_000)).interval
    reference = stats.bootstrap(
        (new, old), lambda a, b, axis=-1: (a - b).mean(axis=axis), paired=True, n_resamples=20_000,
        batch=1_000, rng=np.random.default_rng(5),
    ).confidence_interval  # fmt: skip
    width = reference.high - reference.low
    assert found.low == pytest.approx(reference.low, abs=0.04 * width)
    assert found.high == pytest.approx(reference.high, abs=0.06 * width)


def test_delta_method_and_bootstrap_agree_for_perplexities():
    rng = np.random.default_rng(3)
    words = rng.lognormal(7, 0.6, 400).round()
    old = -words * (3 + 0.2 * rng.normal(size=400))
    new = old - words * (0.1 + 0.05 * rng.normal(size=400))
    both = panel(new, old, weights=words)
    found = effect(both, TWO, "weighted_perplexity").interval
    rounds = -(resample(both) @ [1, -1])
    assert found.stderr == pytest.approx(rounds.std(), rel=0.05)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * found.stderr, rel=0.06)


def test_a_perplexitys_own_interval_is_that_of_its_logarithm():
    nats = -np.random.default_rng(3).lognormal(size=100)
    one = Panel(values=nats[:, None], weights=np.ones((100, 1)), index={"a": 0})
    found = score(one, "a", "perplexity", resample(one, rounds=20))
    reference = stats.ttest_1samp(-nats, 0).confidence_interval()
    assert (found.low, found.high) == pytest.approx(tuple(np.exp(reference)), rel=1e-9)


def test_an_end_beyond_the_largest_number_is_infinite():
    found = score(panel(np.linspace(-800, -610, 20), np.zeros(20)), "new", "perplexity", None)
    assert np.isfinite(found.estimate)
    assert found.high == np.inf


def test_the_interval_of_a_log_ratio_is_that_of_llama_cpps_covariance_formula():
    rng = np.random.default_rng(4)
    old = -rng.lognormal(size=500)
    new = old - 0.1 * rng.lognormal(size=500)
    found = effect(panel(new, old), TWO, "perplexity", resample(panel(new, old), rounds=100))
    covariance = np.cov(new, old)
    variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    assert found.interval.stderr == pytest.approx(np.sqrt(variance / 500))
    assert found.estimate == pytest.approx(old.mean() - new.mean())
    assert found.p == pytest.approx(stats.ttest_rel(new, old).pvalue, rel=1e-6)


def test_a_difference_in_differences_is_tested_as_one_sample_of_documents():
    rng = np.random.default_rng(5)
    columns = (rng.random((4, 211)) < 0.5).astype(float)
    four = panel(*columns)
    found = effect(four, FOUR, "mean", resample(four, rounds=200))
    contrast = columns[0] - columns[1] - columns[2] + columns[3]
    assert found.estimate == pytest.approx(contrast.mean())
    assert found.p == pytest.approx(stats.ttest_1samp(contrast, 0).pvalue)


COVERAGE = {
    # documents, P(gained), P(lost): many changes, an even few, one-sided and rare
    "many changes": (301, 0.12, 0.08),
    "a few changes": (199, 0.02, 0.02),
    "only losses": (601, 0.0, 0.01),
}


@pytest.mark.parametrize("case", COVERAGE)
def test_accuracy_intervals_cover_the_truth_in_95_of_100_simulations(case):
    documents, gained, lost = COVERAGE[case]
    rng = np.random.default_rng(6)
    covered = 0
    for simulation in range(SIMULATIONS):
        both = panel(*answers(rng, documents, gained, lost))
        rounds = resample(both, rounds=400, seed=simulation)
        interval = effect(both, TWO, "mean", rounds).interval
        covered += interval.low <= gained - lost <= interval.high
    assert covered / SIMULATIONS == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize(
    ("documents", "spread"),
    [(62, 0.74), (200, 0.0)],
    ids=["as few and unequal as WikiText's pages", "200 of one length"],
)
def test_perplexity_intervals_cover_the_truth_in_95_of_100_simulations(
    documents, spread, monkeypatch
):
    monkeypatch.setattr("qbench.statistics.panel.ROUNDS", 400)
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(2 * SIMULATIONS):
        words = rng.lognormal(8, spread, documents)
        old = -words * (3 + 0.3 * rng.normal(size=documents))
        new = old - words * (0.1 + 0.1 * rng.normal(size=documents))
        both = panel(new, old, weights=words)
        found = effect(both, TWO, "weighted_perplexity").interval
        covered += found.low <= 0.1 <= found.high
    assert 0.927 <= covered / (2 * SIMULATIONS) <= 0.985  # 3 standard errors below 95 %


LENGTHS = {  # the spread of lengths' logarithm; a token's damage by that logarithm; its noise
    "at random": (1.0, 0.0, "normal"),
    "at random, heavy tails": (1.0, 0.0, "t(3)"),
    "even lengths": (0.5, 0.1, "normal"),
    "as WikiText's": (0.74, 0.1, "normal"),
    "uneven lengths": (1.0, 0.1, "normal"),
    "less on long pages": (1.0, -0.1, "normal"),
    "heavy tails": (1.0, 0.1, "t(3)"),
}


def covered_of(case, pages, simulations):
    """How often the truth is in the interval, and within either bound."""
    rng, (spread, slope, noise) = np.random.default_rng(12), LENGTHS[case]
    truth = 0.1 + slope * spread**2
    covered, below, above = 0, 0, 0
    for _ in range(simulations):
        length = rng.lognormal(0, spread, pages)
        rest = rng.normal(size=pages) if noise == "normal" else rng.standard_t(3, pages) / 3**0.5
        damage = length * (0.1 + slope * np.log(length) + 0.05 * rest)
        both = panel(-damage, np.zeros(pages), weights=length)
        found = effect(both, TWO, "weighted_perplexity")
        covered += found.interval.low <= truth <= found.interval.high
        below, above = below + (found.bounds[0] <= truth), above + (truth <= found.bounds[1])
    return covered / simulations, min(below, above) / simulations


def test_perplexity_intervals_cover_85_of_100_where_damage_is_in_proportion_to_length(monkeypatch):
    """79 of 100 where no end is farther than the page that changed most."""
    monkeypatch.setattr("qbench.statistics.panel.ROUNDS", 300)
    rng, covered = np.random.default_rng(12), 0
    for _ in range(300):
        length = rng.lognormal(0, 1.0, 16)
        damage = length * (0.1 * length + 0.05 * rng.normal(size=16))
        found = effect(panel(-damage, 0 * damage, weights=length), TWO, "weighted_perplexity")
        covered += found.interval.low <= 0.1 * np.exp(1.5) <= found.interval.high
    assert covered >= 255


def test_perplexity_intervals_hold_where_damage_depends_on_a_pages_length(monkeypatch):
    """The bootstrap-t's own one-sided bounds, of as many degrees of freedom as pages: 89 %."""
    monkeypatch.setattr("qbench.statistics.panel.ROUNDS", 300)
    covered, bound = covered_of("less on long pages", 62, 300)
    assert covered >= 0.93
    assert bound >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize("pages", [16, 62, 200])
@pytest.mark.parametrize("case", LENGTHS)
def test_perplexity_intervals_cover_935_of_1000_where_damage_depends_on_length(
    case, pages, monkeypatch
):
    monkeypatch.setattr("qbench.statistics.panel.ROUNDS", 300)
    covered, bound = covered_of(case, pages, 800)
    assert covered >= 0.935
    assert bound >= 0.935


def test_p_of_unequal_documents_is_below_5_percent_where_the_interval_excludes_0():
    rng = np.random.default_rng(13)
    words = rng.lognormal(7, 0.8, 40)
    noise = words * 0.1 * rng.normal(size=40)
    for shift in np.linspace(-0.1, 0.1, 21):
        found = effect(panel(noise + shift * words, 0 * words, weights=words), TWO,
                       "weighted_perplexity")  # fmt: skip
        assert found.test == "bootstrap-t on log-likelihoods"
        assert (found.p < 0.05) == (found.interval.low > 0 or found.interval.high < 0)


@pytest.mark.parametrize(("pages", "rest"), [(16, 0.0), (16, 1e-5), (30, 0.0)])
def test_an_end_is_at_most_twice_as_far_as_the_page_that_changed_most(pages, rest):
    """Two of 16 pages changed: rounds without either have no spread, and the interval's end was
    113,421 nats."""
    rng = np.random.default_rng(2)
    words = rng.integers(110, 200, pages).astype(float)
    damage = words * rest * rng.random(pages)
    damage[[3, 9][: 32 // pages]] = (31.3, 28.3)[: 32 // pages]
    found = effect(panel(-damage, 0 * words, weights=words), TWO, "weighted_perplexity")
    assert found.test == "bootstrap-t on log-likelihoods"
    most = (damage / words).max()
    assert found.interval.high == pytest.approx(2 * most - found.estimate, rel=1e-9)
    assert found.interval.low < 0 < found.estimate
    assert found.p > 0.05


def test_difference_in_differences_intervals_cover_the_truth():
    rng = np.random.default_rng(8)
    covered = 0
    for simulation in range(SIMULATIONS):
        a, b = answers(rng, 301, 0.05, 0.15)
        c, d = answers(rng, 301, 0.02, 0.06)
        four = panel(a, b, c, d)
        interval = effect(four, FOUR, "mean", resample(four, rounds=400, seed=simulation)).interval
        covered += interval.low <= -0.10 + 0.04 <= interval.high
    assert covered / SIMULATIONS == pytest.approx(0.95, abs=0.02)


# Clusters, seeds, edges


def test_rows_of_one_document_are_one_cluster():
    document = np.repeat(np.arange(50), 3)
    rng = np.random.default_rng(9)
    per_document = rng.normal(size=50)
    thrice = Column.of(document, np.repeat(per_document, 3), np.ones(150))
    once = Column.of(np.arange(50), per_document, np.ones(50))
    other = np.zeros(50)
    found = []
    for column in (thrice, once):
        zero = Column.of(column.documents, other, column.weights)
        two = Panel.of({"new": column, "old": zero})
        found.append(effect(two, TWO, "mean", resample(two, rounds=300)).interval)
    assert found[0].estimate == pytest.approx(found[1].estimate)
    assert found[0].stderr == pytest.approx(found[1].stderr)
    assert found[0].low == pytest.approx(found[1].low)


def test_cells_that_saw_different_documents_are_paired_on_the_common_ones():
    new = Column.of([3, 1, 7, 9], [1, 0, 1, 1], [1, 1, 1, 1])
    old = Column.of([1, 3, 8, 9, 2], [1, 0, 1, 1, 0], [1] * 5)
    both = Panel.of({"new": new, "old": old})
    assert both.documents == 3
    assert both.values.tolist() == [[0, 1], [1, 0], [1, 1]]


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_outcomes_that_are_not_finite_have_no_effect(bad):
    new, old = np.zeros((2, 20))
    new[3] = bad
    both = panel(new, old)
    assert effect(both, TWO, "perplexity", resample(both, rounds=9)) is None


def test_few_kinds_of_documents_are_resampled_as_the_documents_themselves_would_be():
    few = panel(*np.random.default_rng(17).integers(0, 2, size=(2, 400)))
    many = Panel(
        values=few.values + 1e-9 * np.arange(400)[:, None], weights=few.weights, index=few.index
    )
    by_kind, by_document = (resample(p, rounds=20_000) @ [1, -1] for p in (few, many))
    assert by_kind.std() == pytest.approx(by_document.std(), rel=0.03)
    assert np.quantile(by_kind, 0.025) == pytest.approx(np.quantile(by_document, 0.025), abs=0.004)
