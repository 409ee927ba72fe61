"""Effects of all kinds, correction for many tests, non-inferiority; the score test."""

import dataclasses
from itertools import combinations

import numpy as np
import pytest
from panels import FOUR, SIMULATIONS, TWO, answers, panel, together
from scipy import optimize, stats

from qbench import statistics
from qbench.statistics import KL_MEAN, Column, Panel, adjust, effect, effects
from qbench.statistics.intervals import ScoreTest, detectable_by_t, detectable_mean
from qbench.statistics.panel import UNTHREADED, error_of

# Perplexities


def test_a_perplexitys_score_interval_is_that_of_its_logarithm():
    nats = -np.random.default_rng(3).lognormal(size=1_200)
    one = Panel(values=nats[:, None], weights=np.ones((1_200, 1)), index={"a": 0})
    low, high, _ = effect(one, {"a": 1}, "perplexity").score_interval()
    reference = stats.ttest_1samp(-nats, 0).confidence_interval()
    assert (low, high) == pytest.approx(tuple(np.exp(reference)), rel=1e-9)


def test_the_interval_of_a_log_ratio_is_that_of_llama_cpps_covariance_formula():
    rng = np.random.default_rng(4)
    old = -rng.lognormal(size=1_500)
    new = old - 0.1 * rng.lognormal(size=1_500)
    result = effect(panel(new, old), TWO, "perplexity")
    covariance = np.cov(new, old)
    variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    assert result.stderr == pytest.approx(np.sqrt(variance / 1_500))
    assert result.estimate == pytest.approx(old.mean() - new.mean())
    assert result.p == pytest.approx(stats.ttest_rel(new, old).pvalue, rel=1e-6)


LENGTHS = {  # the spread of lengths' logarithm; a token's damage by that logarithm; its noise
    "at random": (1.0, 0.0, "normal"), "at random, heavy tails": (1.0, 0.0, "t(3)"),
    "as WikiText's": (0.74, 0.1, "normal"), "less on long pages": (1.0, -0.1, "normal"),
    "heavy tails": (1.0, 0.1, "t(3)"), "one length": (0.0, 0.0, "t(3)"),
}  # fmt: skip


def coverage(case, pages, simulations):
    """Return how often the truth is in the interval, and within either bound."""
    rng, (spread, slope, noise) = np.random.default_rng(12), LENGTHS[case]
    truth = 0.1 + slope * spread**2
    covered, below, above = 0, 0, 0
    for _ in range(simulations):
        length = rng.lognormal(0, spread, pages)
        rest = rng.normal(size=pages) if noise == "normal" else rng.standard_t(3, pages) / 3**0.5
        damage = length * (0.1 + slope * np.log(length) + 0.05 * rest)
        both = panel(-damage, np.zeros(pages), weights=length)
        result = effect(both, TWO, "weighted_perplexity")
        covered += result.low <= truth <= result.high
        below, above = below + (result.bounds[0] <= truth), above + (truth <= result.bounds[1])
        assert (result.p < 0.05) == (result.low > 0 or result.high < 0)
    return covered / simulations, min(below, above) / simulations


@pytest.mark.parametrize(
    ("case", "pages"),
    [
        ("less on long pages", 62),
        *(
            pytest.param(case, pages, marks=pytest.mark.slow)
            for case in LENGTHS
            for pages in (16, 20, 62, 200)
        ),
    ],
)
def test_perplexity_intervals_cover_935_of_1000(case, pages, monkeypatch):
    monkeypatch.setattr("qbench.statistics.intervals.ROUNDS", 300)
    covered, bound = coverage(case, pages, 400)
    assert covered >= 0.935 - 0.012
    assert bound >= 0.935 - 0.012


@pytest.mark.parametrize(("pages", "rest"), [(16, 0.0), (16, 1e-5), (30, 0.0)])
def test_an_end_is_at_most_twice_as_far_as_the_page_that_changed_most(pages, rest):
    """Two of 16 pages changed: rounds without either have no spread, and the interval's end was
    113,421 nats."""
    rng = np.random.default_rng(2)
    words = rng.integers(110, 200, pages).astype(float)
    damage = words * rest * rng.random(pages)
    damage[[3, 9][: 32 // pages]] = (31.3, 28.3)[: 32 // pages]
    result = effect(panel(-damage, 0 * words, weights=words), TWO, "weighted_perplexity")
    most = (damage / words).max()
    assert result.high == pytest.approx(2 * most - result.estimate, rel=1e-9)
    assert result.low < 0 < result.estimate
    assert result.p > 0.05


# KL divergence


def divergences(rng, documents):
    """KL of two precisions on the same documents: heavy tails, alike on each document."""
    common = rng.normal(size=documents)
    one, other = (np.exp(common + 0.8 * rng.normal(size=documents)) for _ in range(2))
    return 0.02 * one, 0.03 * other


@pytest.mark.parametrize("signs", [{"new": 1}, TWO], ids=["one", "ratio"])
@pytest.mark.parametrize("documents", [20, pytest.param(200, marks=pytest.mark.slow),
                                       pytest.param(1_100, marks=pytest.mark.slow)])  # fmt: skip
def test_intervals_of_kl_cover_935_of_1000(signs, documents):
    rng = np.random.default_rng(5)
    mean = np.log(0.02) + (1 + 0.8**2) / 2
    truth = mean if len(signs) == 1 else np.log(0.02 / 0.03)
    results = together([divergences(rng, documents) for _ in range(200)], KL_MEAN, signs)
    for result in results:
        assert (result.p < 0.05) == (result.low > 0 or result.high < 0)
    assert np.mean([one.low <= truth <= one.high for one in results]) >= 0.935 - 0.017


def test_intervals_allow_for_documents_with_much_kl_that_a_sample_has_missed():
    """Of 200 documents two have 27 and 15 times the mean KL, as those of an int8 copy: 77 of 100
    intervals of 50 documents held the mean."""
    rng = np.random.default_rng(5)
    kl = 0.0006 * np.exp(0.7 * rng.normal(size=200))
    kl[:2] = 0.018, 0.0096
    results = together([[rng.choice(kl, 50)] * 2 for _ in range(200)], KL_MEAN, {"new": 1})
    truth = np.log(kl.mean())
    assert np.mean([one.low <= truth <= one.high for one in results]) >= 0.935


def test_the_error_of_many_documents_is_summed_in_parts():
    terms = np.random.default_rng(3).normal(size=(2, 3 * UNTHREADED + 7))
    expected = np.sqrt((terms**2).sum(axis=1) * (1 - 1 / terms.shape[1]))
    np.testing.assert_allclose(error_of(terms), expected, rtol=1e-12)


@pytest.mark.parametrize("aggregation", [KL_MEAN, "perplexity", "weighted_perplexity", "mean"])
@pytest.mark.parametrize("documents", [30, pytest.param(1_100, marks=pytest.mark.slow)])
def test_contrasts_that_are_computed_together_are_those_of_each_alone(aggregation, documents):
    """Equal columns, few changes, other documents and other lengths among them."""
    rng, names = np.random.default_rng(6), np.arange(documents)
    first, second = divergences(rng, documents)
    values = {"a": first, "same": first, "b": second, "few": np.where(names < 7, second, first),
              "rounding": first * (1 + 1e-16 * rng.integers(-1, 2, documents)),
              "zero": np.zeros(documents), "none": np.full(documents, np.nan)}  # fmt: skip
    sign = -1 if "perplexity" in aggregation else 1
    lengths = rng.lognormal(size=documents) if "weighted" in aggregation else np.ones(documents)
    columns = {name: Column.of(names, sign * each, lengths) for name, each in values.items()}
    columns["fewer"] = Column.of(names[5:], sign * first[5:], lengths[5:])
    columns["longer"] = Column.of(names, sign * second, 2 * lengths)
    if aggregation == "mean":
        columns["right"], columns["wrong"] = (
            Column.of(names, rng.random(documents) < chance, lengths) for chance in (0.7, 0.6)
        )
    contrasts = [{one: 1.0, other: -1.0} for one, other in combinations(columns, 2)]
    contrasts += [{name: 1.0} for name in columns] + [{"a": 1, "b": -1, "fewer": -1, "few": 1}]
    together = effects(columns, contrasts, aggregation)
    for signs, answer in zip(contrasts, together, strict=True):
        alone = effect(Panel.of({name: columns[name] for name in signs}), signs, aggregation)
        assert type(alone) is type(answer)
        if isinstance(alone, statistics.Missing):
            assert (answer.reason, answer.kind) == (alone.reason, alone.kind)
            assert (answer.estimate is None) == (alone.estimate is None)
            assert (answer.estimate or 0) == pytest.approx(alone.estimate or 0, abs=1e-15)
        else:
            assert (answer.test, answer.documents) == (alone.test, alone.documents)
            both = ([e.estimate, e.low, e.high, e.stderr, *e.bounds, e.p] for e in (answer, alone))
            assert next(both) == pytest.approx(next(both), rel=1e-9, abs=1e-14)


# Metrics over all documents at once, and values without known ends


@pytest.mark.parametrize(
    ("aggregation", "new", "old", "reason"),
    [
        ("f1", np.ones(5), np.ones(5), "no test is known for scores that are aggregated as f1"),
        ("bits_per_byte", np.where(np.arange(50) == 3, -9.0, -1), np.full(50, -1.0), "1 of 50 doc"),
        ("bleu", np.ones(5), np.ones(5), "no test is known for scores that are aggregated as bleu"),
        ("perplexity", np.full(20, -np.inf), np.zeros(20), "a score is not finite"),
        ("perplexity", np.full(20, np.nan), np.zeros(20), "a score is not finite"),
        ("mean", np.ones(1), np.ones(1), "fewer than two documents"),
        (KL_MEAN, np.zeros(20), np.ones(20), "a KL divergence is 0"),
    ],
)
def test_what_has_no_interval_says_why(aggregation, new, old, reason):
    both = panel(new, old)
    result = effect(both, TWO, aggregation)
    assert isinstance(result, statistics.Missing)
    assert result.reason.startswith(reason)
    assert (result.estimate is not None) == ("changed" in reason or reason.startswith("1 of"))


# Clusters, edges, identical outcomes


def test_rows_of_one_document_are_one_cluster():
    document = np.repeat(np.arange(50), 3)
    per_document = np.random.default_rng(9).normal(size=50)
    thrice = Column.of(document, np.repeat(per_document, 3), np.ones(150))
    once = Column.of(np.arange(50), per_document, np.ones(50))
    result = []
    for column in (thrice, once):
        zero = Column.of(column.documents, np.zeros(50), column.weights)
        result.append(effect(Panel.of({"new": column, "old": zero}), TWO, "mean"))
    first, second = ([e.estimate, e.low, e.high, e.stderr] for e in result)
    assert first == pytest.approx(second)


def test_cells_that_saw_different_documents_are_paired_on_the_common_ones():
    new = Column.of([3, 1, 7, 9], [1, 0, 1, 1], [1, 1, 1, 1])
    old = Column.of([1, 3, 8, 9, 2], [1, 0, 1, 1, 0], [1] * 5)
    both = Panel.of({"new": new, "old": old})
    assert both.documents == 3
    assert both.values.tolist() == [[0, 1], [1, 0], [1, 1]]


@pytest.mark.parametrize("documents", [7, 200, 2376])
def test_equal_damages_are_a_tie_whatever_the_scores(documents):
    rng = np.random.default_rng(documents)
    for _ in range(15):
        a, c = (int(count) for count in rng.integers(3, documents - 3, size=2))
        step = int(rng.integers(-3, 4))
        counts = (a + step, a, c + step, c)
        four = panel(*[rng.permutation(np.arange(documents) < count) for count in counts])
        assert effect(four, FOUR, "mean").estimate == 0.0


@pytest.mark.parametrize("signs", [TWO, FOUR])
@pytest.mark.parametrize(
    ("aggregation", "least", "most"), [("mean", 4 / 200, 10 / 200), ("perplexity", 1e-4, 1e-3)]
)
def test_identical_outcomes_have_a_bound_on_what_could_be_seen(signs, aggregation, least, most):
    same = np.random.default_rng(22).random(200) < 0.3
    column = same if aggregation == "mean" else -np.exp(np.random.default_rng(23).normal(size=200))
    (result,) = adjust([effect(panel(*[column] * len(signs)), signs, aggregation)])
    assert (result.estimate, result.p) == (0.0, 1.0)
    assert least < result.detectable < most
    if aggregation == "mean":  # as few documents claim no certainty
        assert result.low < -0.01 < 0.01 < result.high


# Many tests, power, non-inferiority


def test_holm_gives_the_textbook_values_and_the_size_that_the_mark_would_show():
    one = effect(panel(*answers(np.random.default_rng(12), 99, 0.1, 0.1)), TWO, "mean")
    result = adjust([dataclasses.replace(one, p=p) for p in (0.01, 0.04, 0.03, 0.005)])
    assert [e.p_holm for e in result] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert [e.mark for e in result] == ["‡", "", "", "‡"]
    assert [e.family for e in result] == [4] * 4
    assert result[1].detectable == statistics.at_level(
        [one], "size_at", 0.05 / 2
    )  # two of four are marked
    assert result[0].detectable == statistics.at_level([one], "size_at", 0.05 / 3)


@pytest.mark.parametrize("seeds", [False, True])
def test_at_the_detectable_size_the_mark_appears_in_80_of_100_tables_of_72(seeds):
    """An unadjusted level showed it in 18 to 28 of 100."""
    freedom = 2 if seeds else 199
    size = detectable_by_t(1.0, freedom, 0.05 / 72)
    rng = np.random.default_rng(20)
    t = stats.nct.rvs(freedom, size, size=20_000, random_state=rng)
    least = stats.t.isf(0.05 / 72 / 2, freedom)  # docs/tables.md states that of three seeds
    assert least == pytest.approx(37.9 if seeds else 3.44, abs=0.05)
    marked = np.abs(t) > least
    assert marked.mean() == pytest.approx(0.80, abs=0.02)


def test_a_score_at_the_margin_passes_non_inferiority_in_5_of_100_simulations():
    rng = np.random.default_rng(14)
    pairs = [answers(rng, 301, 0.05, 0.08)[::-1] for _ in range(SIMULATIONS)]
    passed = [loss.bounds[1] < 0.03 for loss in together(pairs, "mean")]
    assert np.mean(passed) == pytest.approx(0.05, abs=0.02)


def test_with_as_many_documents_as_needed_an_equal_quantizer_passes_in_80_of_100():
    needed = statistics.documents_needed(0.03, 0.02, 400)
    se = 0.02 * np.sqrt(400 / needed)
    estimates = np.random.default_rng(15).normal(scale=se, size=20_000)
    assert np.mean(estimates + 1.645 * se < 0.03) == pytest.approx(0.80, abs=0.01)
    loss = effect(panel(*answers(np.random.default_rng(1), 400, 0.08, 0.08)), TWO, "mean")
    assert statistics.documents_for_margin(loss, 0.03) == pytest.approx(needed, rel=0.2)


# The score test and its interval against the literature, against scipy, and in simulations.


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
