"""A group of tasks such as mmlu is a line like a task: its documents are those of its tasks."""

import csv
import io

import numpy as np
import pandas as pd
import pytest
from lm_eval.utils import make_table
from synthetic import make_record, make_store, scores

from qbench import export
from qbench.api import load_records
from qbench.comparison.compare import compare
from qbench.gate import baseline, check
from qbench.gate.verdict import parse_margins
from qbench.records import GroupScore
from qbench.statistics import Column, Panel, effect
from qbench.tables import render

PARTS = {f"part_{i}": 40 + 5 * i for i in range(12)}
CELL, WHOLE = "softmax/hqq-4bit", "softmax/bf16"


def grouped(path, **settings):
    """Records with the group of all parts, as a run leaves them."""
    store = make_store(path, sizes=PARTS, quantizers=("bf16", "hqq-4bit"), **settings)
    for cell in store.manifest().cells:
        record = store.get(cell)
        parts = [score for score in record.scores if score.metric == "acc"]
        sizes = [score.documents for score in parts]
        values = [score.value for score in parts]
        group = GroupScore(
            group="all_parts", label="all parts", metric="acc", stderr=0.01,
            value=float(np.average(values, weights=sizes)), higher_is_better=True,
            weight_by_size=True, documents=sum(sizes),
            tasks=tuple(PARTS),
        )  # fmt: skip
        changed = record.model_copy(update={"groups": (group,)})
        store.put(changed, store.outcomes(record), None)
    return store


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return grouped(tmp_path_factory.mktemp("groups") / "good")


def pooled(store, cell):
    """Of all documents of all parts, read afresh."""
    result = next(one for one in store.manifest().cells if one.cell == cell)
    table = store.outcomes(store.get(result)).query("metric == 'acc'")
    table = table.sort_values(["task", "document"])
    return Column.of(np.arange(len(table)), table["value"], table["weight"])


def test_its_damage_is_that_of_all_documents(good):
    line = next(
        one for one in compare(good).lines if (one.task, one.quantizer) == ("all_parts", "hqq-4bit")
    )
    panel = Panel.of({name: pooled(good, name) for name in (CELL, WHOLE)})
    expected = effect(panel, {CELL: -1, WHOLE: 1}, "mean")
    damage = line.of("damages")["softmax"]
    assert panel.documents == sum(PARTS.values()) == line.entries["softmax"].documents
    assert (damage.estimate, damage.p) == pytest.approx((expected.estimate, expected.p))
    assert (damage.low, damage.high) == pytest.approx((expected.low, expected.high))
    values = [line.entries["softmax"].value]
    assert values == [pytest.approx(panel.values[:, 0].mean())]


def test_tables_have_it_once_and_its_flips_are_those_of_all_tasks(good):
    comparison = compare(good)
    assert "all parts" in render(comparison)
    rows = [row for row in render(comparison, format="csv").splitlines() if "all_parts" in row]
    assert len(rows) == 4
    flips = comparison.flips[CELL]
    for name in ("documents", "right_to_wrong", "wrong_to_right"):
        total = sum(getattr(flips[task]["acc"], name) for task in PARTS)
        assert getattr(flips["all_parts"]["acc"], name) == total > 0


def test_the_gate_sees_in_the_group_what_is_too_small_for_its_tasks(good, tmp_path):
    standard = tmp_path / "baseline.tar.xz"
    baseline.make(good, standard)
    same = check.check(good, standard)
    assert same.outcome == "pass"
    assert "all_parts" in {gate.task for gate in same.gates}
    worse = grouped(tmp_path / "worse", shift={CELL: 0.3})
    gates = [gate for gate in check.check(worse, standard).gates if gate.cell == CELL]
    outcomes = {gate.task: gate.outcome for gate in gates if gate.metric == "acc"}
    assert outcomes.pop("all_parts") == "fail"
    assert "pass" in set(outcomes.values())


def test_exports_have_it(good, tmp_path):
    record = good.records()[0]
    result = export.results(record)
    assert result["results"]["all_parts"]["acc,none"] == record.groups[0].value
    assert result["groups"] == {"all_parts": result["results"]["all_parts"]}
    assert result["group_subtasks"]["all_parts"] == list(PARTS)
    assert "all parts" in make_table(result)
    assert "all parts" in make_table(result, "groups")
    assert "| all parts | acc | " in " ".join(export.card(record).split())
    assert "all_parts" in set(load_records(good.directory)["task"])


# lm-eval's filters are part of a metric's name and change nothing of its scale.


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


def test_filtered_metrics_are_shown_in_per_cent_everywhere(tmp_path):
    old = filled(tmp_path / "a", 180)
    assert "| Exact Match [strict-match] ↑ " in render(compare(old))
    assert " 90.00 ± 2.13 |" in render(compare(old))
    row = next(csv.DictReader(io.StringIO(render(compare(old), format="csv"))))
    assert float(row["value"]) == 0.9


def test_a_fall_from_90_to_7_per_cent_fails_the_gate_at_any_spelling_of_the_margin(tmp_path):
    baseline.make(filled(tmp_path / "a", 180), path := tmp_path / "baseline.tar.xz")
    worse = filled(tmp_path / "b", 14)
    for margins in (
        [f"{metric}=1" for metric in METRICS], ["exact_match=1"], ["acc=1"],
        ["acc=99", "exact_match=50"],
    ):  # fmt: skip
        result = check.check(worse, path, margins=parse_margins(margins))
        scored = [gate for gate in result.gates if gate.metric in METRICS]
        assert [gate.outcome for gate in scored] == ["fail", "fail"]
        assert all(80 < gate.worse.estimate < 86 for gate in scored)  # points
        assert result.exit_code == 1
