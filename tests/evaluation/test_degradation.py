"""Summaries of KL divergences against what hand-made tables say."""

import numpy as np
import pandas as pd
import pytest

from qbench.evaluation.degradation import distributions, divergence_table
from qbench.records import DIVERGENCE_COLUMNS


def table_of(**columns):
    return pd.DataFrame(columns)


def test_divergences_are_summarized_over_tokens_and_documents():
    result = distributions(
        table_of(
            kl=np.array([1.0, 2, 0]),
            agrees=np.array([True, False, True]),
            document=np.arange(3),
        )
    )
    assert result.kl.mean == 1
    assert result.kl.mean_stderr == pytest.approx(1 / 3**0.5)


def test_divergences_are_means_by_request_and_single_tokens_of_whole_texts(monkeypatch):
    monkeypatch.setattr("qbench.evaluation.degradation.TOKENS_KEPT", 4)
    measured = table_of(
        kl=np.array([1.0, 3.0, 0.5, 0.5, 2.0]),
        agrees=np.ones(5, bool),
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
