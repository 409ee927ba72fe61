"""The gate: passes what is as good, fails what is worse, and says when it cannot tell."""

import math
import re
import shutil

import pandas as pd
import pytest
from gate_results import CELL, QUANTIZERS, SIZES, audit_of, changed, failed, of, record_of, update
from small_recipe import qbench
from synthetic import make_store, scores

from qbench.errors import OutputError, RecipeError
from qbench.gate import baseline, check
from qbench.gate.verdict import as_markdown, parse_margins


@pytest.fixture(scope="module")
def nearly(tmp_path_factory):
    """A cell whose answers differ a little from the good grid's."""
    return changed(tmp_path_factory.mktemp("nearly"), shift={CELL: 0.01})


def test_the_same_results_pass(good, standard):
    result = check.check(good, standard)
    assert result.outcome == "pass"
    assert result.exit_code == 0
    scored = [gate for gate in result.gates if gate.task != "audit"]
    assert len(scored) == 4 * 5
    assert {gate.reason.split(" on ")[0] for gate in scored} == {"same outcomes"}


@pytest.mark.parametrize("options", [("--summary", "base"), ("--summary", "x", "--junit", "x")])
def test_no_file_is_written_over_another(good, standard, tmp_path, options):
    base = shutil.copy(standard, tmp_path / "base")
    given = [one if one.startswith("-") else tmp_path / one for one in options]
    with pytest.raises(OutputError, match=r"--(baseline|summary) names the same file; name"):
        qbench("check", good.directory, "--baseline", base, *given)
    assert (tmp_path / "base").read_bytes() == standard.read_bytes()


def test_a_worse_cell_fails_and_the_others_pass(tmp_path, standard):
    result = check.check(changed(tmp_path, shift={"softpick/hqq-4bit": 0.4}), standard)
    assert result.outcome == "fail"
    assert result.exit_code == 1
    scored = [gate for gate in of(result, "softpick/hqq-4bit") if gate.task != "audit"]
    assert {gate.outcome for gate in scored} == {"fail"}
    assert {gate.outcome for gate in of(result, "softmax/hqq-4bit")} == {"pass"}


def test_too_few_documents_are_inconclusive_and_it_is_said_what_would_tell(nearly, standard):
    result = check.check(nearly, standard, margins={"acc": 0.1})
    gates = [gate for gate in of(result, CELL, "arc_easy") if gate.outcome == "inconclusive"]
    assert gates
    words = r"about (\d+) are needed at this difference; 700 support a margin of ([\d.]+)$"
    results = [re.search(words, gate.reason) for gate in gates]
    assert all(int(one[1]) > 700 for one in results)
    wide = check.check(nearly, standard, margins={"acc": float(results[0][2])})
    assert {gate.outcome for gate in of(wide, CELL, "arc_easy")} == {"pass"}


def test_an_estimate_within_the_margin_is_not_enough(nearly, standard):
    def asked(margin):
        result = check.check(nearly, standard, margins={"acc": margin})
        (gate,) = (one for one in of(result, CELL, "arc_easy") if one.metric == "acc")
        return gate

    worse = asked(0.1).worse
    assert worse.estimate < worse.high
    assert asked((worse.estimate + worse.high) / 2).outcome == "inconclusive"
    assert asked(worse.high + 0.01).outcome == "pass"


@pytest.mark.parametrize(("counts_as", "code"), [("pass", 0), ("fail", 1)])
def test_inconclusive_counts_as_the_user_chooses(nearly, standard, counts_as, code):
    result = check.check(nearly, standard, margins={"acc": 0.1}, inconclusive=counts_as)
    assert result.outcome == "inconclusive"
    assert result.exit_code == code


def without_audit(store):
    update(store, CELL, audit=None)


def failed_audit(store):
    problem = {"passed": False, "problems": ("one layer left out",)}
    update(store, CELL, audit=audit_of(store, CELL).model_copy(update=problem))


def without_a_task(store, **more):
    kept = tuple(one for one in record_of(store, CELL).scores if one.task != "wikitext")
    update(store, CELL, scores=kept, **more)


def failed_task(store):
    without_a_task(store, failed_tasks={"wikitext": "it gives NaN"})


@pytest.mark.parametrize(
    ("settings", "change", "task", "reason"),
    [({"failed": (CELL,)}, None, "", "failed: out of memory"),
     ({"missing": (CELL,)}, None, "", "missing"),
     ({}, without_audit, "", "not audited"), ({}, failed_audit, "", "failed: one layer left out"),
     ({}, without_a_task, "wikitext", "score is missing"),
     ({}, failed_task, "wikitext", "score is missing: it gives NaN")],
)  # fmt: skip
def test_what_is_broken_or_gone_never_passes(tmp_path, standard, settings, change, task, reason):
    store = changed(tmp_path, **settings)
    if change is not None:
        change(store)
    result = check.check(store, standard, inconclusive="pass")
    (gate,) = (one for one in result.gates if one.outcome == "fail")
    assert (gate.cell, gate.task) == (CELL, task)
    assert gate.reason.startswith(reason)
    assert result.exit_code == 1


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
    update(store, CELL, audit=audit_of(store, CELL).model_copy(update=change))
    (gate,) = failed(store, standard)
    assert (gate.cell, gate.task, gate.metric) == (CELL, "audit", metric)
    wide = parse_margins(["weight_error=10", "bits_per_weight=120", "coverage=2"])
    assert not failed(store, standard, margins=wide)


def test_a_cell_that_the_baseline_lacks_is_named_and_not_gated(tmp_path, standard):
    store = make_store(tmp_path / "new", sizes=SIZES, quantizers=(*QUANTIZERS, "hqq-8bit"))
    result = check.check(store, standard)
    assert result.notes == (
        "softmax/hqq-8bit: not in the baseline, so not gated",
        "softpick/hqq-8bit: not in the baseline, so not gated",
    )


def test_a_perplexity_beyond_the_largest_number_never_passes(tmp_path, standard):
    store = changed(tmp_path)
    record = record_of(store, CELL)
    table = store.outcomes(record)
    table.loc[(table["document"] == 3) & table["metric"].str.endswith("perplexity"), "value"] = -1e7
    endless = {"value": math.inf, "stderr": math.inf}
    scores = tuple(
        one.model_copy(update=endless) if one.metric == "perplexity" else one
        for one in record.scores
    )
    store.put(record.model_copy(update={"scores": scores}), table, None)
    result = check.check(store, standard, inconclusive="pass")
    words, answers = (
        next(g for g in of(result, CELL, task) if "perplexity" in g.metric)
        for task in ("wikitext", "lambada_openai")
    )
    assert (answers.outcome, answers.reason) == ("fail", "its score is not finite")
    assert (words.outcome, words.worse.high) == ("inconclusive", math.inf)
    assert "∞" in as_markdown(result)


def with_bleu(folder, value, documents=700):
    """A score of all documents at once, of which no outcomes are kept, and a median."""
    store = changed(folder)
    record = record_of(store, CELL)
    like = record.scores[0].model_copy(update={"value": value, "documents": documents})
    more = [like.model_copy(update={"metric": one, "aggregation": one}) for one in ("bleu", "mid")]
    table = store.outcomes(record)
    middle = table[table["metric"] == "acc_norm"].assign(metric="mid", value=math.nan)
    store.put(
        record.model_copy(update={"scores": (*record.scores, *more)}), pd.concat([table, middle])
    )
    return store


@pytest.mark.parametrize(("now", "outcome"), [(30.0, "pass"), (29.2, "pass"), (28.9, "fail")])
def test_a_score_that_no_test_knows_is_held_to_the_margin_by_its_value(tmp_path, now, outcome):
    path = tmp_path / "baseline.tar.xz"
    baseline.make(with_bleu(tmp_path / "old", 30.0), path)
    store = with_bleu(tmp_path, now)
    with pytest.raises(RecipeError, match="no margin by default: bleu, mid; add --margin"):
        check.check(store, path)
    result = check.check(store, path, margins={"bleu": 1.0, "mid": 1.0})
    gates = [gate for gate in result.gates if gate.metric in ("bleu", "mid")]
    assert [gate.outcome for gate in gates] == [outcome] * 2
    assert all("the margin: by its value alone" in gate.reason for gate in gates)
    assert [gate.worse.estimate for gate in gates] == pytest.approx([30 - now] * 2)
    assert [gate.documents for gate in gates] == [700, 700]
    assert result.outcome == outcome


def test_documents_that_are_missing_fail_and_are_counted(tmp_path, good, standard):
    store = make_store(tmp_path / "new", sizes=SIZES, quantizers=QUANTIZERS)
    for cell in store.manifest().cells:
        record = store.get(cell)
        table = store.outcomes(record)
        table = table[table["document"] < 30].reset_index(drop=True)
        store.put(record.model_copy(update={"scores": scores(table)}), table, None)
    gates = of(check.check(store, standard), "softmax/bf16", "arc_easy")
    assert [gate.documents for gate in gates] == [30, 30]
    assert all(gate.old == gate.new for gate in gates)
    assert all(gate.outcome == "fail" for gate in gates)
    assert all("670 of the baseline's 700 documents are missing" in g.reason for g in gates)
