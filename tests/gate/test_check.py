"""The gate: passes what is as good, fails what is worse, and says when it cannot tell."""

from __future__ import annotations

import json
import re
import shutil
from xml.etree import ElementTree

import pyarrow.parquet as parquet
import pytest
from synthetic import make_record, make_store, outcomes, scores

from qbench.errors import RecipeError, ResultsError
from qbench.gate import baseline, check, verdict

SIZES = {"arc_easy": 700, "lambada_openai": 500, "wikitext": 40}
QUANTIZERS = ("bf16", "hqq-4bit")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("good") / "grid", sizes=SIZES, quantizers=QUANTIZERS)


@pytest.fixture(scope="module")
def standard(good, tmp_path_factory):
    path = tmp_path_factory.mktemp("baseline") / "baseline.parquet"
    assert baseline.make(good, path) is None
    return path


def changed(tmp_path, **settings):
    return make_store(tmp_path / "new", sizes=SIZES, quantizers=QUANTIZERS, **settings)


def of(result, cell, task=None):
    return [gate for gate in result.gates if gate.cell == cell and task in (None, gate.task)]


def test_the_same_results_pass(good, standard):
    result = check.check(good, standard)
    assert result.outcome == "pass"
    assert result.exit_code == 0
    assert len(result.gates) == 4 * 5 + 2 * 3


def test_a_worse_cell_fails_and_the_others_pass(tmp_path, standard):
    result = check.check(changed(tmp_path, shift={"softpick/hqq-4bit": 0.4}), standard)
    assert result.outcome == "fail"
    assert result.exit_code == 1
    scored = [gate for gate in of(result, "softpick/hqq-4bit") if gate.task != "audit"]
    assert {gate.outcome for gate in scored} == {"fail"}
    assert {gate.outcome for gate in of(result, "softmax/hqq-4bit")} == {"pass"}


def test_a_better_cell_passes(tmp_path, standard):
    result = check.check(changed(tmp_path, shift={"softpick/hqq-4bit": -0.4}), standard)
    assert result.outcome == "pass"
    scored = [gate for gate in of(result, "softpick/hqq-4bit") if gate.task != "audit"]
    assert all(gate.worse.estimate < 0 for gate in scored)


def test_too_few_documents_are_inconclusive_and_it_is_said_how_many_it_takes(
    tmp_path, good, standard
):
    result = check.check(good, standard, margins={"acc": 0.1, "perplexity": 1.0})
    gates = of(result, "softmax/hqq-4bit", "arc_easy")
    assert {gate.outcome for gate in gates} == {"inconclusive"}
    assert all(gate.needed > 700 for gate in gates)
    assert str(gates[0].needed) in gates[0].reason


@pytest.mark.parametrize(("counts_as", "code"), [("pass", 0), ("fail", 1)])
def test_inconclusive_counts_as_the_user_chooses(good, standard, counts_as, code):
    margins = {"acc": 0.1, "perplexity": 1.0}
    result = check.check(good, standard, margins=margins, inconclusive=counts_as)
    assert result.outcome == "inconclusive"
    assert result.exit_code == code


@pytest.mark.parametrize("state", ["failed", "missing"])
def test_a_failed_or_missing_cell_never_passes(tmp_path, standard, state):
    store = changed(tmp_path, **{state: ("softmax/hqq-4bit",)})
    result = check.check(store, standard, inconclusive="pass")
    (gate,) = of(result, "softmax/hqq-4bit")
    assert gate.outcome == "fail"
    assert gate.reason.startswith(state)
    assert result.exit_code == 1


def test_an_unaudited_cell_never_passes(tmp_path, standard):
    store = changed(tmp_path)
    cell = store.grid().cells[1]
    table = outcomes(cell, 0, SIZES, 0.0, 0)
    store.put(make_record(cell, scores(table), audited=False), table, None)
    (gate,) = of(check.check(store, standard), cell.cell)
    assert gate.outcome == "fail"
    assert "not audited" in gate.reason


def test_a_cell_that_failed_its_audit_never_passes(tmp_path, standard):
    store = changed(tmp_path)
    cell = store.grid().cells[3]
    record = store.get(cell)
    audit = record.audit.model_copy(update={"passed": False, "problems": ("one layer left out",)})
    store.put(record.model_copy(update={"audit": audit}), store.outcomes(record), None)
    (gate,) = of(check.check(store, standard), cell.cell)
    assert gate.reason == "failed: one layer left out"


@pytest.mark.parametrize(
    ("change", "metric"),
    [
        ({"weight_error": 0.6 * 2**-4 * 1.06}, "weight_error"),
        ({"bits_per_weight": 8.5}, "bits_per_weight"),
        ({"coverage": 0.99}, "coverage"),
    ],
)
def test_an_audit_that_measures_worse_fails_though_every_score_is_the_same(
    tmp_path, standard, change, metric
):
    store = changed(tmp_path)
    cell = store.grid().cells[1]
    record = store.get(cell)
    audit = record.audit.model_copy(update=change)
    store.put(record.model_copy(update={"audit": audit}), store.outcomes(record), None)
    result = check.check(store, standard)
    failed = [gate for gate in result.gates if gate.outcome == "fail"]
    assert [(gate.cell, gate.task, gate.metric) for gate in failed] == [
        (cell.cell, "audit", metric)
    ]
    wide = check.parse_margins(["weight_error=10", "bits_per_weight=120", "coverage=2"])
    assert check.check(store, standard, margins=wide).outcome == "pass"


def test_a_cell_that_left_the_grid_never_passes(tmp_path, standard):
    store = make_store(tmp_path / "new", sizes=SIZES, quantizers=("bf16",))
    (gate,) = of(check.check(store, standard), "softmax/hqq-4bit")
    assert gate.outcome == "fail"


def test_a_score_that_is_gone_never_passes(tmp_path, standard):
    sizes = {task: size for task, size in SIZES.items() if task != "wikitext"}
    store = make_store(tmp_path / "new", sizes=sizes, quantizers=QUANTIZERS)
    (gate,) = of(check.check(store, standard), "softmax/bf16", "wikitext")
    assert (gate.outcome, gate.reason) == ("fail", "score is missing")


def test_a_cell_that_the_baseline_lacks_is_named_and_not_gated(tmp_path, standard):
    store = make_store(tmp_path / "new", sizes=SIZES, quantizers=(*QUANTIZERS, "hqq-8bit"))
    result = check.check(store, standard)
    assert result.notes == (
        "softmax/hqq-8bit: not in the baseline, so not gated",
        "softpick/hqq-8bit: not in the baseline, so not gated",
    )


def test_fewer_documents_are_paired_with_their_own_baseline_outcomes(tmp_path, good, standard):
    store = make_store(tmp_path / "new", sizes=SIZES, quantizers=QUANTIZERS)
    for cell in store.grid().cells:
        record = store.get(cell)
        table = store.outcomes(record)
        table = table[table["document"] < 30].reset_index(drop=True)
        store.put(record.model_copy(update={"scores": scores(table)}), table, None)
    gates = of(check.check(store, standard), "softmax/bf16", "arc_easy")
    assert [gate.change.documents for gate in gates] == [30, 30]
    assert [gate.change.left_out for gate in gates] == [670, 670]
    assert all(gate.change.old == gate.change.new for gate in gates)
    assert {gate.outcome for gate in gates} == {"inconclusive"}


def test_another_task_definition_is_unusable_input(tmp_path, good, standard):
    directory = tmp_path / "new"
    shutil.copytree(good.directory, directory)
    store = type(good)(directory)
    old = tmp_path / "old.parquet"
    for digest, make in (("a" * 64, True), ("b" * 64, False)):
        for cell in store.grid().cells:
            record = store.get(cell)
            parts = {**record.key_parts, "tasks": {"arc_easy": digest}}
            table = store.outcomes(record)
            store.put(record.model_copy(update={"key_parts": parts}), table, None)
        if make:
            baseline.make(store, old)
    with pytest.raises(ResultsError, match="arc_easy: its definition or data are not those"):
        check.check(store, old)


# Margins


def test_a_margin_is_for_one_metric_or_its_family():
    margins = check.parse_margins(["acc=0.5", "word_perplexity=3%"])
    assert margins == check.AUDIT_MARGINS | {
        "acc": 0.5,
        "perplexity": 2.0,
        "word_perplexity": 3.0,
    }


@pytest.mark.parametrize("text", ["acc", "acc=", "acc=-1", "=1", "acc=nan", "acc=1pt"])
def test_a_text_that_is_no_margin_is_refused(text):
    with pytest.raises(RecipeError, match=r"write METRIC=NUMBER"):
        check.parse_margins([text])


def test_a_wider_margin_lets_a_worse_cell_pass(tmp_path, standard):
    store = changed(tmp_path, shift={"softpick/hqq-4bit": 0.05})
    assert check.check(store, standard).outcome != "pass"
    assert check.check(store, standard, margins={"acc": 9.0, "perplexity": 20.0}).outcome == "pass"


# What is written


def test_the_verdict_is_written_as_markdown_junit_and_json(tmp_path, standard):
    store = changed(tmp_path, shift={"softpick/hqq-4bit": 0.4}, failed=("softmax/bf16",))
    result = check.check(store, standard)
    paths = {name: tmp_path / name for name in ("markdown", "junit", "json")}
    verdict.write_verdict(result, **paths)
    text = paths["markdown"].read_text()
    assert text.startswith("## qbench check: fail")
    assert re.search(r"\| ✗ fail +\| softmax/bf16 +\| — +\|", text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.replace("\\|", "").count("|") for row in rows}) == 1

    suite = ElementTree.fromstring(paths["junit"].read_text()).find("testsuite")
    failures = suite.findall("testcase/failure")
    assert int(suite.get("failures")) == len(failures) == result.count("fail") == 6
    assert int(suite.get("tests")) == len(suite.findall("testcase"))

    told = json.loads(paths["json"].read_text())
    assert (told["outcome"], told["exit_code"]) == ("fail", 1)
    assert len(told["gates"]) == len(result.gates)
    assert told["gates"][-1]["worse"] > told["gates"][-1]["margin"]


def test_junit_has_inconclusive_lines_as_skipped_where_they_count_as_passed(good, standard):
    margins = {"acc": 0.1, "perplexity": 1.0}
    for counts_as, tag in (("pass", "skipped"), ("fail", "error")):
        result = check.check(good, standard, margins=margins, inconclusive=counts_as)
        suite = ElementTree.fromstring(verdict.as_junit(result)).find("testsuite")
        assert len(suite.findall(f"testcase/{tag}")) == result.count("inconclusive") > 0


# The baseline file


def test_a_baseline_gives_back_what_was_put_in(good, standard):
    from qbench.comparison.changes import read_results

    ours, again = read_results(good), baseline.read(standard)
    assert again.name == ours.name
    assert list(again.cells) == list(ours.cells)
    for cell, one in ours.cells.items():
        other = again.cells[cell]
        assert (other.key, other.scores) == (one.key, one.scores)
        for name, column in one.columns.items():
            assert (other.columns[name].documents == column.documents).all()
            assert (other.columns[name].values == column.values).all()
            assert (other.columns[name].weights == column.weights).all()


def test_the_baseline_of_a_full_grid_is_a_few_hundred_kilobytes(tmp_path):
    path = tmp_path / "baseline.parquet"
    baseline.make(make_store(tmp_path / "full"), path)
    assert path.stat().st_size < 500_000


def test_replacing_a_baseline_must_be_asked_for_and_shows_old_and_new(tmp_path, good, standard):
    from qbench.tables.changes import changes_table

    path = tmp_path / "baseline.parquet"
    shutil.copy(standard, path)
    worse = changed(tmp_path, shift={"softpick/hqq-4bit": 0.4})
    before = path.read_bytes()
    with pytest.raises(ResultsError, match=r"exists; .* --replace"):
        baseline.make(worse, path)
    assert path.read_bytes() == before
    change = baseline.make(worse, path, replace=True)
    assert path.read_bytes() != before
    old = next(s for s in good.get(good.grid().cells[3]).scores if s.metric == "acc")
    line = next(row for row in changes_table(change).splitlines() if "softpick/hqq-4bit" in row)
    assert f"| {old.value * 100:.2f} |" in line
    assert "‡" in line


@pytest.mark.parametrize("state", ["failed", "missing"])
def test_no_baseline_is_made_of_a_broken_grid(tmp_path, state):
    store = changed(tmp_path, **{state: ("softmax/hqq-4bit",)})
    with pytest.raises(ResultsError, match=rf"no baseline from this: softmax/hqq-4bit: {state}"):
        baseline.make(store, tmp_path / "baseline.parquet")


@pytest.mark.parametrize("content", [None, b"", b"PAR1 nonsense PAR1"])
def test_an_unreadable_baseline_is_unusable_input(tmp_path, good, content):
    path = tmp_path / "baseline.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ResultsError, match=r"baseline\.parquet: .*make it with"):
        check.check(good, path)


def test_a_baseline_with_a_part_missing_is_unusable_input(tmp_path, good, standard):
    table = parquet.read_table(standard)
    about = json.loads(table.schema.metadata[baseline.METADATA])
    del about["cells"]["softmax/bf16"]["measures"]
    path = tmp_path / "baseline.parquet"
    metadata = {baseline.METADATA: json.dumps(about).encode()}
    parquet.write_table(table.replace_schema_metadata(metadata), path)
    with pytest.raises(ResultsError, match=r"not whole .*measures.*; make it with"):
        check.check(good, path)


def test_a_parquet_file_of_something_else_is_no_baseline(tmp_path, good):
    path = next(good.directory.glob("records/**/*.outcomes.parquet"))
    with pytest.raises(ResultsError, match="not a baseline"):
        check.check(good, path)
