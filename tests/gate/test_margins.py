"""Margins: what the user states, and what so many documents can support."""

import itertools

import numpy as np
import pytest
from gate.conftest import answered, changed, gate_of
from scipy import stats

from qbench.errors import RecipeError
from qbench.gate import check, verdict
from qbench.records import Score
from qbench.statistics import Column, effects


def column(values) -> Column:
    return Column.of(np.arange(len(values)), values, np.ones(len(values)))


def score(metric: str, aggregation: str, documents: int) -> Score:
    return Score(task="t", label="t", metric=metric, value=0.8, stderr=None,
                 higher_is_better=aggregation == "mean", aggregation=aggregation,
                 documents=documents)  # fmt: skip


def test_a_margin_is_for_one_metric_or_its_family():
    texts = ["acc=0.5", "word_perplexity=3%", "f1 [a=b]=1"]
    given = {"acc": 0.5, "word_perplexity": 3.0, "f1 [a=b]": 1.0}
    assert verdict.parse_margins(texts) == given


@pytest.mark.parametrize(
    ("texts", "words"),
    [*(([text], "write METRIC=NUMBER")
       for text in ("acc", "acc=", "acc=-1", "=1", "acc=nan", "acc=1pt", "acc=inf")),
     (["acc=1", "acc=2"], r"--margin acc=2: acc is given twice")],
)  # fmt: skip
def test_a_text_that_is_no_margin_is_refused(texts, words):
    with pytest.raises(RecipeError, match=words):
        verdict.parse_margins(texts)


def test_a_margin_of_no_metric_is_refused_and_the_known_ones_are_named(good, standard):
    with pytest.raises(RecipeError, match=r"--margin nosuch=1: .*no nosuch; possible: acc, perpl"):
        check.check(good, standard, margins={"nosuch": 1.0})


LINES = 50


def answers(draw, documents):
    """As many answers lost as gained."""
    old = (draw.random(documents) < 0.8) * 1.0
    while True:
        share = np.where(old == 1, old.mean(), 1 - old.mean())
        flips = draw.random(documents) < verdict.FLIPS / 2 / share
        yield column(old), column(np.where(flips, 1 - old, old))


def pages(draw, documents):
    """Of different lengths: 90 of 100 passed at a margin for as many of one length."""
    while True:
        words = draw.lognormal(5, 0.74, documents)
        old = -words * draw.normal(3, 0.3, documents)
        moved = old + verdict.MOVES * words * draw.normal(0, 0.3, documents)
        yield tuple(Column.of(np.arange(documents), values, words) for values in (old, moved))


@pytest.mark.parametrize(
    ("metric", "aggregation", "pairs", "documents", "least"),
    [  # of 50 lines, all pass 95 times of 100: 999 of 1,000 each
        *(("acc", "mean", answers, n, 297) for n in (60, 200, 2400)),
        ("word_perplexity", "weighted_perplexity", pages, 62, 285),  # the bound is wider there
    ],
)
def test_a_harmless_change_passes_at_the_default_margin(
    metric, aggregation, pairs, documents, least, monkeypatch
):
    monkeypatch.setattr("qbench.statistics.intervals.ROUNDS", 300)
    about, worse = score(metric, aggregation, documents), -1 if aggregation == "mean" else 1
    made = list(itertools.islice(pairs(np.random.default_rng(documents), documents), 300))
    columns = {(side, place): column for place, pair in enumerate(made)
               for side, column in zip(("old", "new"), pair, strict=True)}  # fmt: skip
    signs = [{("new", place): worse, ("old", place): -worse} for place in range(300)]
    answers, passed = effects(columns, signs, aggregation), 0
    for (old, _), answer in zip(made, answers, strict=True):
        margin = verdict.margin_of(about, old, {}, lines=LINES)
        assert not margin.given
        limit = margin.value / 100 if aggregation == "mean" else np.log1p(margin.value / 100)
        passed += answer.bounds[1] <= limit
    assert passed >= least


@pytest.mark.parametrize(("documents", "points"), [(200, 7.2), (2400, 1.8)])
def test_margins_are_those_that_the_readme_and_the_help_state(documents, points):
    old = column((np.arange(documents) % 5 > 0) * 1.0)
    margin = verdict.margin_of(score("acc", "mean", documents), old, {}, lines=LINES)
    assert margin.value == points


@pytest.mark.parametrize(("documents", "lines"), [(60, 1), (200, 50), (2400, 50)])
def test_harmless_losses_have_skellams_quantiles(documents, lines):
    rate, missed = 0.03 * documents / 2, verdict.MISSED / lines
    loss = int(stats.skellam.ppf(1 - missed, rate, rate))
    won = round((np.hypot(loss, 2 * rate) - loss) / 2)
    values = np.repeat([1.0, 0.0, -1.0], (loss + won, documents - loss - 2 * won, won))
    old, new = column(np.maximum(values, 0)), column(np.maximum(-values, 0))
    (answer,) = effects({"old": old, "new": new}, [{"old": 1, "new": -1}], "mean")
    bound = verdict._bound_of_flips(documents, missed, 0.03)
    assert bound == pytest.approx(answer.bounds[1])


def test_many_lines_of_many_answers_have_a_margin():
    """scipy.stats raised "updating stopped, endless loop" here."""
    assert 0 < verdict._bound_of_flips(5153, verdict.MISSED / 7800, 0.1) < 0.05


def test_a_broken_quantizer_does_not_widen_its_own_margin(tmp_path, good, standard):
    worse = changed(tmp_path, shift={"softmax/hqq-4bit": 0.4})
    before, after = (
        {gate.name: gate.margin for gate in check.check(store, standard).gates if gate.score}
        for store in (good, worse)
    )
    assert before == after


@pytest.mark.parametrize("name", ["ter", "ter [first]"])
def test_a_margin_is_given_with_the_filter_or_without(name):
    ter, given = score("ter [first]", "ter", 60), {name: 2.0}
    verdict.require_known(given, [ter])
    assert verdict.margin_of(ter, column(np.arange(60.0)), given, lines=1).given


# Margins of answers: KL along them, their length both ways, and what drawing adds.


PROMPTS = 200


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
    result = gate_of(metric, *(answered(metric, side) for side in (old, new)), given, lines=20)
    assert result.outcome == outcome, result.reason
    assert result.given == bool(given)


def test_what_cannot_be_told_says_how_many_prompts_or_samples_would():
    draw = np.random.default_rng(1)
    share = draw.random(PROMPTS)
    old, new = (draw.binomial(4, share) / 4 for _ in range(2))
    drawn, greedy = (
        gate_of("stops", *(answered("stops", *side) for side in sides), {"stops": 1.0}, lines=20)
        for sides in (
            [(each, share * (1 - share) / 4) for each in (old, new)],
            [((each > 0.5) * 1.0,) for each in (old, new)],
        )
    )
    assert drawn.outcome == "inconclusive"
    assert "documents to tell: about" in drawn.reason
    assert "times as many samples" in drawn.reason
    assert "samples" not in greedy.reason
