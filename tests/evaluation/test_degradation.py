"""Damage against what hand-made tables say."""

import math

import numpy as np
import pandas as pd
import pytest

from qbench.evaluation.degradation import (
    Outcomes,
    answer_agreement,
    answer_change,
    divergence_table,
    perplexity_ratio,
    task_damage,
)
from qbench.records import DIVERGENCE_COLUMNS, Score
from qbench.statistics import Column, Panel, effect

KEYS = ["task", "document", "request"]


def table_of(**columns):
    return pd.DataFrame(columns)


def outcomes(values, metric="acc", weights=None):
    weights = [1.0] * len(values) if weights is None else weights
    return pd.DataFrame(
        {
            "task": "t",
            "document": range(len(values)),
            "metric": metric,
            "value": np.asarray(values, dtype=float),
            "weight": np.asarray(weights, dtype=float),
        }
    )


def test_the_perplexity_ratio_and_its_error_by_hand():
    base = outcomes([-10.0, -20.0, -33.0], "word_perplexity", [5, 8, 11])
    worse = outcomes([-11.0, -20.5, -36.0], "word_perplexity", [5, 8, 11])
    found = perplexity_ratio(base, worse)
    assert found.value == pytest.approx((1 + 0.5 + 3) / 24)
    ratio = 4.5 / 24
    residuals = np.array([1 - 5 * ratio, 0.5 - 8 * ratio, 3 - 11 * ratio])
    residuals /= 1 - np.array([5, 8, 11]) / 24  # a long page pulls the ratio towards itself
    assert found.stderr == pytest.approx(math.sqrt((residuals**2).sum() * 2 / 3) / 24)
    columns = {name: Column.of(table["document"], table["value"], table["weight"])
               for name, table in (("new", worse), ("old", base))}  # fmt: skip
    table = effect(Panel.of(columns), {"new": 1, "old": -1}, "weighted_perplexity")
    assert found.stderr == pytest.approx(table.interval.stderr)  # one error in record and tables
    assert found.documents == 3


def test_the_right_answers_change_is_that_of_its_own_request():
    def responses(values):
        return pd.DataFrame(
            [("t", d, r, v, False) for (d, r), v in values.items()],
            columns=["task", "document", "request", "log_likelihood", "greedy"],
        )

    base = responses({(0, 0): -1.0, (0, 1): -2.0, (1, 0): -3.0, (1, 1): -4.0})
    after = responses({(0, 0): -9.0, (0, 1): -2.5, (1, 0): -3.25, (1, 1): -9.0})
    found = answer_change(base, after, {0: 1, 1: 0})
    assert found.value == pytest.approx((-0.5 - 0.25) / 2)
    assert found.documents == 2


def test_generated_answers_agree_up_to_their_first_difference():
    """Filtered answers are no answers of their own; several of a document count once."""

    def answers(*said):
        rows = [("t", d, r, text, taken, *(cut or [0])) for d, r, text, taken, *cut in said]
        return pd.DataFrame(rows, columns=[*KEYS, "answer", "filter", "cut"])

    base = answers((0, 0, "abcd", None), (0, 0, "d", "last"), (1, 0, "", None), (2, 0, "xy", None))
    after = answers((0, 0, "abXXXXXX", None), (0, 0, "X", "last"), (1, 0, "", None),
                    (2, 0, "xy", None))  # fmt: skip
    found = answer_agreement(base, after)
    assert found.identical == 2
    assert found.agreed.value == pytest.approx((2 / 8 + 1 + 1) / 3)
    assert found.agreed.documents == 3
    assert answer_agreement(base[:0], after[:0]) is None
    # beyond what is kept nobody knows whether they agree
    long = answers((0, 0, "abcd", None, 6), (1, 0, "abcd", None, 4), (2, 0, "ab", None))
    other = answers((0, 0, "abcd", None, 6), (1, 0, "abXd", None, 0), (2, 0, "ab", None))
    found = answer_agreement(long, other)
    assert (found.identical, found.left_out, found.agreed.documents) == (1, 1, 2)
    assert found.agreed.value == pytest.approx((2 / 8 + 1) / 2)


def test_damage_of_a_task_has_all_its_parts():
    scores = (
        Score(task="t", label="t", metric="acc", value=0.5, stderr=0.1, higher_is_better=True,
              aggregation="mean", documents=2),
        Score(task="t", label="t", metric="ppl", value=9.0, stderr=None, higher_is_better=False,
              aggregation="perplexity", documents=2),
    )  # fmt: skip
    table = pd.concat([outcomes([1, 0]), outcomes([-1.0, -2.0], "ppl")])
    later = pd.concat([outcomes([0, 0]), outcomes([-1.5, -2.5], "ppl")])
    responses = pd.DataFrame(
        [("t", 0, 0, -1.0, False, None, None, 0), ("t", 1, 0, -2.0, False, None, None, 0)],
        columns=[*KEYS, "log_likelihood", "greedy", "answer", "filter", "cut"],
    )
    found = task_damage(
        Outcomes(outcomes=table, responses=responses, scores=scores),
        Outcomes(outcomes=later, responses=responses, scores=scores),
        divergences=table_of(
            kl=np.array([1.0, 2, 0]),
            agrees=np.array([True, False, True]),
            change=np.zeros(3),
            confidence=np.array([0.2, 0.5, 1]),
            document=np.arange(3),
            request=np.zeros(3, int),
            token=np.arange(3),
        ),
        correct={0: 0, 1: 0},
    )
    assert found.ln_perplexity_ratio["ppl"].value == pytest.approx(0.5)
    assert found.correct_answer.value == 0
    assert found.distributions.kl.mean == 1
    assert found.distributions.kl.mean_stderr == pytest.approx(1 / 3**0.5)
    bins = [(b.low, b.tokens, b.kl, b.top1_agreement) for b in found.distributions.by_confidence]
    assert bins == [
        (0, 1, 1, 1), (0.25, 0, None, None), (0.5, 1, 2, 0), (0.75, 0, None, None), (0.95, 1, 0, 1),
    ]  # fmt: skip


def test_divergences_are_means_by_request_and_single_tokens_of_whole_texts(monkeypatch):
    monkeypatch.setattr("qbench.evaluation.degradation.TOKENS_KEPT", 4)
    measured = table_of(
        kl=np.array([1.0, 3.0, 0.5, 0.5, 2.0]),
        agrees=np.ones(5, bool),
        confidence=np.ones(5),
        change=np.array([-1.0, 0.0, 1.0, 1.0, -2.0]),
        document=np.array([0, 0, 1, 1, 2]),
        request=np.zeros(5, int),
        token=np.array([7, 8, 9, 7, 8]),
    )
    names = {7: " a", 8: "b", 9: "<"}
    table = divergence_table(
        {"asked": measured, "whole": measured},
        {"whole"},
        lambda ids: [names[token] for token in ids.tolist()],
    )
    assert tuple(table.columns) == DIVERGENCE_COLUMNS
    asked, whole = (table[table["task"] == name] for name in ("asked", "whole"))
    assert asked["tokens"].tolist() == [2, 2, 1]
    assert asked["kl"].tolist() == [2.0, 0.5, 2.0]
    assert asked["change"].tolist() == [-0.5, 1.0, -2.0]
    assert asked["text"].isna().all()
    # two documents fit into four tokens, the third stays together
    assert whole["tokens"].tolist() == [1, 1, 1, 1, 1]
    assert whole["text"].tolist()[:4] == [" a", "b", "<", " a"]
    assert whole["text"].isna().tolist() == [False] * 4 + [True]
    assert whole["document"].tolist() == [0, 0, 1, 1, 2]
