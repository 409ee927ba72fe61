"""lm-eval's filters are part of a metric's name and change nothing of its scale."""

import csv
import io

import numpy as np
import pandas as pd
import pytest
from synthetic import make_record, make_store, scores

from qbench.comparison.compare import compare
from qbench.gate import baseline, check
from qbench.gate.verdict import parse_margins
from qbench.metrics import base_metric, is_percentage
from qbench.tables import render

METRICS = ("exact_match [strict-match]", "exact_match [flexible-extract]")
DOCUMENTS = 200


def filled(path, right):
    """A grid of one cell that answers so many of its documents rightly under both filters."""
    store = make_store(path, sizes={"arc_easy": 2}, quantizers=("bf16",), checkpoints=("softmax",))
    (cell,) = store.manifest().cells
    values = np.random.default_rng(right).permutation(np.arange(DOCUMENTS) < right) * 1.0
    table = pd.concat(
        [
            pd.DataFrame({"task": "arc_easy", "document": np.arange(DOCUMENTS), "metric": metric,
                          "value": values, "weight": 1.0})
            for metric in METRICS
        ],
        ignore_index=True,
    )  # fmt: skip
    store.put(make_record(cell, scores(table)), table, None)
    return store


@pytest.mark.parametrize(
    ("metric", "base", "percent"),
    [
        ("exact_match [strict-match]", "exact_match", True),
        ("acc_norm [get-answer]", "acc_norm", True),
        ("exact_match", "exact_match", True),
        ("word_perplexity", "word_perplexity", False),
        ("brier_score [none-of-these]", "brier_score", False),
    ],
)
def test_the_filter_is_parsed_off_once(metric, base, percent):
    assert base_metric(metric) == base
    assert is_percentage(metric) is percent


def test_filtered_metrics_are_shown_in_per_cent_everywhere(tmp_path):
    old = filled(tmp_path / "a", 180)
    assert "| Exact Match [strict-match] ↑ " in render(compare(old))
    assert " 90.00 ± 2.13 |" in render(compare(old))
    row = next(csv.DictReader(io.StringIO(render(compare(old), format="csv"))))
    assert float(row["value"]) == 0.9


@pytest.mark.parametrize(
    "margins",
    [
        ["exact_match [strict-match]=1", "exact_match [flexible-extract]=1"],
        ["exact_match=1"],
        ["acc=1"],
        ["acc=99", "exact_match=50"],
    ],
)
def test_a_fall_from_90_to_7_per_cent_fails_the_gate_at_any_spelling_of_the_margin(
    tmp_path, margins
):
    path = tmp_path / "baseline.tar.xz"
    baseline.make(filled(tmp_path / "a", 180), path)
    result = check.check(
        filled(tmp_path / "b", 14), path, margins=parse_margins(margins)
    )  # fmt: skip
    scored = [gate for gate in result.gates if gate.metric in METRICS]
    assert [gate.outcome for gate in scored] == ["fail", "fail"]
    assert all(80 < gate.worse.estimate < 86 for gate in scored)  # points
    assert result.exit_code == 1
