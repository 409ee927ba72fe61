"""A group of tasks such as mmlu is a line like a task: its documents are those of its tasks."""

import numpy as np
import pytest
from lm_eval.utils import make_table
from synthetic import make_store

from qbench import export
from qbench.api import load_records
from qbench.comparison.compare import compare
from qbench.gate import baseline, check
from qbench.records import GroupScore
from qbench.statistics import Column, Panel, effect
from qbench.tables import render

PARTS = {f"part_{i}": 40 + 5 * i for i in range(12)}
CELL, WHOLE = "softmax/hqq-4bit", "softmax/bf16"


def grouped(path, *, weight_by_size=True, **settings):
    """Records with the group of all parts, as a run leaves them."""
    store = make_store(path, sizes=PARTS, quantizers=("bf16", "hqq-4bit"), **settings)
    for cell in store.manifest().cells:
        record = store.get(cell)
        parts = [score for score in record.scores if score.metric == "acc"]
        sizes = [score.documents for score in parts]
        values = [score.value for score in parts]
        group = GroupScore(
            group="all_parts", label="all parts", metric="acc", stderr=0.01,
            value=float(np.average(values, weights=sizes) if weight_by_size else np.mean(values)),
            higher_is_better=True, weight_by_size=weight_by_size, documents=sum(sizes),
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


def test_tables_have_it_once(good):
    assert "all parts" in render(compare(good))
    rows = [row for row in render(compare(good), format="csv").splitlines() if "all_parts" in row]
    assert len(rows) == 4


def test_its_flips_are_those_of_all_tasks(tmp_path):
    store = grouped(tmp_path / "flips", checkpoints=("softmax",))
    comparison = compare(store)
    ((_, flips),) = comparison.flips.items()
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
