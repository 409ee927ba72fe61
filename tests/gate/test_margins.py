"""Margins: what the user states, and what so many documents can support."""

import numpy as np
import pytest
from gate_results import changed

from qbench.errors import RecipeError
from qbench.gate import check, margins
from qbench.records import Score
from qbench.statistics import Column, Panel, Regression, effect


def column(values) -> Column:
    return Column.of(np.arange(len(values)), values, np.ones(len(values)))


def score(metric: str, aggregation: str, documents: int) -> Score:
    return Score(task="t", label="t", metric=metric, value=0.8, stderr=None,
                 higher_is_better=aggregation == "mean", aggregation=aggregation,
                 documents=documents)  # fmt: skip


def test_a_margin_is_for_one_metric_or_its_family():
    texts = ["acc=0.5", "word_perplexity=3%", "f1 [a=b]=1"]
    given = {"acc": 0.5, "word_perplexity": 3.0, "f1 [a=b]": 1.0}
    assert margins.parse_margins(texts) == given


@pytest.mark.parametrize("text", ["acc", "acc=", "acc=-1", "=1", "acc=nan", "acc=1pt", "acc=inf"])
def test_a_text_that_is_no_margin_is_refused(text):
    with pytest.raises(RecipeError, match=r"write METRIC=NUMBER"):
        margins.parse_margins([text])


def test_a_metric_has_one_margin():
    with pytest.raises(RecipeError, match=r"--margin acc=2: acc is given twice"):
        margins.parse_margins(["acc=1", "acc=2"])


def test_a_margin_of_no_metric_is_refused_and_the_known_ones_are_named(good, standard):
    with pytest.raises(RecipeError, match=r"--margin nosuch=1: .*no nosuch; possible: acc, perpl"):
        check.check(good, standard, margins={"nosuch": 1.0})


LINES = 50


@pytest.mark.parametrize("documents", [60, 200, 2400])
def test_a_harmless_change_of_answers_passes_at_the_default_margin(documents):
    draw = np.random.default_rng(documents)
    old = column((draw.random(documents) < 0.8) * 1.0)
    margin = margins.margin_of(score("acc", "mean", documents), old, {}, lines=LINES)
    assert not margin.given
    passed = 0
    for _ in range(300):
        share = np.where(old.values == 1, old.values.mean(), 1 - old.values.mean())
        flips = draw.random(documents) < margins.FLIPS / 2 / share  # as many lost as gained
        new = column(np.where(flips, 1 - old.values, old.values))
        panel = Panel.of({"new": new, "old": old})
        found = effect(panel, {"old": 1, "new": -1}, "mean")
        passed += Regression.of(found).high <= margin.value / 100
    assert passed >= 297  # of 50 lines, all pass 95 times of 100: 999 of 1,000 each


@pytest.mark.parametrize("documents", [60, 1000])
def test_a_harmless_change_of_answers_that_are_partly_right_passes_at_the_default_margin(documents):
    """The f1 of an answer's words: a margin for perplexities passed 82 to 90 of 100."""
    draw = np.random.default_rng(documents)
    answers = np.clip(draw.normal(0.5, 0.6, documents), 0, 1)
    margin = margins.margin_of(score("f1", "mean", documents), column(answers), {}, lines=LINES)
    passed = 0
    for _ in range(300):
        other = np.where(draw.random(documents) < margins.FLIPS, draw.permutation(answers), answers)
        panel = Panel.of({"new": column(other), "old": column(answers)})
        found = effect(panel, {"old": 1, "new": -1}, "mean")
        passed += Regression.of(found).high <= margin.value / 100
    assert passed >= 297


@pytest.mark.parametrize("documents", [16, 200])
def test_a_harmless_change_of_a_perplexity_passes_at_the_default_margin(documents):
    draw = np.random.default_rng(documents)
    old = column(-np.abs(draw.normal(1.0, 0.8, documents)))
    known = score("perplexity", "perplexity", documents)
    margin = margins.margin_of(known, old, {}, lines=LINES)
    spread = margins.MOVES * old.values.std()
    passed = 0
    for _ in range(300):
        new = column(old.values + draw.normal(0, spread, documents))
        panel = Panel.of({"new": new, "old": old})
        found = effect(panel, {"new": 1, "old": -1}, "perplexity")
        passed += Regression.of(found).high <= np.log1p(margin.value / 100)
    assert passed >= 297


def test_a_harmless_change_of_pages_that_differ_in_length_passes(monkeypatch):
    """90 of 100 passed at a margin for as many pages of one length; the bound is wider there."""
    monkeypatch.setattr("qbench.statistics.bootstrap.ROUNDS", 300)
    draw, passed = np.random.default_rng(62), 0
    known, pages = score("word_perplexity", "weighted_perplexity", 62), np.arange(62)
    for _ in range(300):
        words = draw.lognormal(5, 0.74, 62)
        old = Column.of(pages, -words * draw.normal(3, 0.3, 62), words)
        limit = margins.margin_of(known, old, {}, lines=LINES).value / 100
        moved = old.values + margins.MOVES * words * draw.normal(0, 0.3, 62)
        panel = Panel.of({"new": Column.of(pages, moved, words), "old": old})
        found = effect(panel, {"new": 1, "old": -1}, "weighted_perplexity")
        passed += Regression.of(found).high <= np.log1p(limit)
    assert passed >= 285


@pytest.mark.parametrize(("documents", "points"), [(200, 7.2), (2400, 1.8)])
def test_margins_are_those_that_the_readme_and_the_help_state(documents, points):
    old = column((np.arange(documents) % 5 > 0) * 1.0)
    margin = margins.margin_of(score("acc", "mean", documents), old, {}, lines=LINES)
    assert margin.value == points


def test_a_broken_quantizer_does_not_widen_its_own_margin(tmp_path, good, standard):
    worse = changed(tmp_path, shift={"softmax/hqq-4bit": 0.4})
    before, after = (
        {gate.name: gate.margin for gate in check.check(store, standard).gates if gate.change}
        for store in (good, worse)
    )
    assert before == after


def test_a_metric_without_a_family_needs_a_margin_of_its_own():
    bleu = score("bleu", "bleu", 60)
    ter = score("ter [first]", "ter", 60)
    words = (
        r"""default: bleu, ter \[first\]; add --margin "bleu=NUMBER" --margin "ter \[first\]=NUM"""
    )
    with pytest.raises(RecipeError, match=words):
        margins.require_known({}, [bleu, ter])
    margins.require_known({"bleu": 2.0, "ter": 1.0}, [bleu, ter])
    assert margins.margin_of(bleu, column(np.arange(60.0)), {"bleu": 2.0}, lines=1).given
