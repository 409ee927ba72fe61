"""The gate: passes what is as good, fails what is worse, and says when it cannot tell."""

import dataclasses
import math
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from gate import conftest
from gate.conftest import (
    CELL,
    QUANTIZERS,
    SIZES,
    changed,
    of,
    record_of,
    update,
)
from small_recipe import qbench
from synthetic import LAYERS, make_store, scores

from qbench.errors import OutputError, RecipeError, ResultsError
from qbench.gate import baseline, check, verdict
from qbench.gate.verdict import GateResult, Verdict, as_markdown, parse_margins
from qbench.store import Store, extract, pack

pytestmark = pytest.mark.usefixtures("few_rounds")


@pytest.fixture(scope="module")
def nearly(tmp_path_factory):
    """A cell whose answers differ a little from the good grid's."""
    return changed(tmp_path_factory.mktemp("nearly"), shift={CELL: 0.01})


@pytest.mark.parametrize("options", [("--summary", "base"), ("--summary", "x", "--junit", "x")])
def test_no_file_is_written_over_another(good, standard, tmp_path, options):
    base = shutil.copy(standard, tmp_path / "base")
    given = [one if one.startswith("-") else tmp_path / one for one in options]
    with pytest.raises(OutputError, match=r"--(baseline|summary) names the same file; name"):
        qbench("check", good.directory, "--baseline", base, *given)
    assert (tmp_path / "base").read_bytes() == standard.read_bytes()


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
    def asked(margin, counts_as="fail"):
        result = check.check(nearly, standard, margins={"acc": margin}, inconclusive=counts_as)
        (gate,) = (one for one in of(result, CELL, "arc_easy") if one.metric == "acc")
        return gate, result.outcome, result.exit_code

    worse = asked(0.1)[0].worse
    assert worse.estimate < worse.high
    between = (worse.estimate + worse.high) / 2
    assert asked(between)[0].outcome == "inconclusive"
    assert asked(worse.high + 0.01)[0].outcome == "pass"
    for counts_as, code in (("pass", 0), ("fail", 1)):
        assert asked(between, counts_as)[1:] == ("inconclusive", code)


FAILED = {"passed": False, "problems": ("one layer left out",)}


@pytest.mark.parametrize(
    ("settings", "change", "task", "reason"),
    [({"failed": (CELL,)}, None, "", "failed: out of memory"),
     ({"missing": (CELL,)}, None, "", "missing"),
     ({}, lambda record: {"audit": None}, "", "not audited"),
     ({}, lambda record: {"audit": record.audit.model_copy(update=FAILED)}, "",
      "failed: one layer left out"),
     ({}, lambda record: conftest.without_wikitext(record) | {"failed_tasks": {}}, "wikitext",
      "score is missing"),
     ({}, conftest.without_wikitext, "wikitext", "score is missing: it gives NaN")],
)  # fmt: skip
def test_what_is_broken_or_gone_never_passes(tmp_path, standard, settings, change, task, reason):
    store = changed(tmp_path, **settings)
    if change is not None:
        update(store, CELL, **change(record_of(store, CELL)))
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
    update(store, CELL, audit=record_of(store, CELL).audit.model_copy(update=change))
    wide = parse_margins(["weight_error=10", "bits_per_weight=120", "coverage=2"])
    for margins, worse in (({}, [(CELL, "audit", metric)]), (wide, [])):
        gates = check.check(store, standard, margins=margins).gates
        assert [(g.cell, g.task, g.metric) for g in gates if g.outcome == "fail"] == worse


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


@pytest.fixture(scope="module")
def bleu(tmp_path_factory):
    path = tmp_path_factory.mktemp("bleu") / "baseline.tar.xz"
    baseline.make(with_bleu(path.parent, 30.0), path)
    return path


@pytest.mark.parametrize(("now", "outcome"), [(30.0, "pass"), (29.2, "pass"), (28.9, "fail")])
def test_a_score_that_no_test_knows_is_held_to_the_margin_by_its_value(
    tmp_path, bleu, now, outcome
):
    store = with_bleu(tmp_path, now)
    with pytest.raises(RecipeError, match="no margin by default: bleu, mid; add --margin"):
        check.check(store, bleu)
    result = check.check(store, bleu, margins={"bleu": 1.0, "mid": 1.0})
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


# One broken layer is caught and named, though the model's mean and its scores hide it.


BROKEN = LAYERS[1]
OTHER_BITS = {"digest": "f" * 64}


def with_layer(folder, **fields):
    """The good grid, one layer of one cell measured otherwise."""
    store = changed(folder)
    audit = record_of(store, CELL).audit
    modules = tuple(
        one.model_copy(update=fields) if one.name == BROKEN else one for one in audit.modules
    )
    update(store, CELL, audit=audit.model_copy(update={"modules": modules}))
    return store


@pytest.mark.parametrize(
    ("fields", "metric", "reason"),
    [
        ({}, None, "same bits in all 4 layers"),
        (OTHER_BITS, None, "same bits in 3 of 4 layers"),
        ({"weight_error": 0.9}, "layer_error", BROKEN),  # the same bits, read wrongly
        ({"name": "model.layers.9.other"}, "", f"no longer quantized, or not audited: {BROKEN}"),
        *((OTHER_BITS | fields, metric, f"beyond the margin: {BROKEN}; worst: {BROKEN} ")
          for fields, metric in (
              ({"weight_error": 0.0375 * 0.452 / 0.216}, "layer_error"),  # scales rolled by one
              ({"weight_error": 0.0375 * 1.11}, "layer_error"),
              ({"gain": 0.998 * 1.03}, "layer_gain"),  # scales 3 % too large
              ({"gain": 0.998 * 0.97}, "layer_gain"),
              ({"levels": 8}, "layer_levels"),
              ({"bits_per_weight": 5.0}, "layer_bits"),
          )),
        *((OTHER_BITS | fields, None, "same bits in 3 of 4 layers")  # as of another processor
          for fields in ({"weight_error": 0.0375 * 1.013}, {"gain": 0.998 + 0.002}, {"levels": 15},
                         {"weight_error": 0.01})),
    ],
)  # fmt: skip
def test_a_layer_that_measures_worse_fails_and_is_named(tmp_path, standard, fields, metric, reason):
    gates = check.check(with_layer(tmp_path, **fields), standard).gates
    worse = [(gate.cell, gate.metric) for gate in gates if gate.outcome == "fail"]
    assert worse == ([] if metric is None else [(CELL, metric)])
    assert any(reason in gate.reason for gate in gates if gate.cell == CELL)


# Results of other weights, normalizers, data or settings are refused or named.


def with_part(folder, cells, part, value):
    store = changed(folder)
    for cell in store.manifest().cells:
        if cell.cell in cells:
            parts = {**store.get(cell).key_parts, part: value}
            update(store, cell.cell, key_parts=parts)
    return store


@pytest.mark.parametrize("part", ["weights", "normalizer"])
def test_results_of_another_checkpoint_are_unusable_unless_asked_for(tmp_path, standard, part):
    store = with_part(tmp_path, [CELL], part, "e" * 64)
    with pytest.raises(ResultsError, match=rf"{CELL}: these results are .*--across {part}"):
        check.check(store, standard)
    result = check.check(store, standard, across=[part])
    assert result.outcome == "pass"
    assert any(note.startswith(part) and CELL in note for note in result.notes)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("quantizer", {"name": "hqq-4bit", "bits": 4.0, "group_size": 32}),
        ("versions", {"torch": "2.13.0", "transformers": "5.17.0"}),
        ("code", "c" * 64),
    ],
)
def test_every_other_difference_is_named_and_does_not_fail(tmp_path, good, standard, part, value):
    everywhere = [cell.cell for cell in good.manifest().cells]
    result = check.check(with_part(tmp_path, everywhere, part, value), standard)
    assert result.outcome == "pass"
    assert any(note.startswith(part) and note.endswith("in all 4 cells") for note in result.notes)


def test_results_of_another_recipe_are_unusable(tmp_path, standard):
    store = make_store(tmp_path, sizes={"arc_easy": 50}, quantizers=("bf16",), checkpoints=("x",))
    with pytest.raises(ResultsError, match="has no cell of"):
        check.check(store, standard)


def test_the_same_documents_from_other_files_are_the_same_data(tmp_path, standard):
    def store_of(name, documents, files):
        store = changed(tmp_path / name)
        for cell in store.manifest().cells:
            parts = store.get(cell).key_parts | {"tasks": {"arc_easy": files}}
            update(store, cell.cell, key_parts=parts, documents={"arc_easy": documents})
        return store

    path = tmp_path / "baseline.tar.xz"
    baseline.make(store_of("old", "a" * 64, "b" * 64), path)
    result = check.check(store_of("moved", "a" * 64, "c" * 64), path)
    assert result.outcome == "pass"
    assert "tasks.arc_easy: bbbbbbbbbbbb… → cccccccccccc… in all 4 cells" in result.notes
    with pytest.raises(ResultsError, match="arc_easy: definition or data of this task differ"):
        check.check(store_of("other", "d" * 64, "b" * 64), path)


# The verdict as files: what is in them, and that nothing in a name can break them.


def columns(text: str) -> int:
    """Of the table, where all its rows have as many."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    (result,) = {row.replace("\\|", "").count("|") - 1 for row in rows}
    return result


def test_the_verdict_is_told_as_markdown_and_junit(tmp_path, standard):
    store = changed(tmp_path, shift={"softpick/hqq-4bit": 0.4}, failed=("softmax/bf16",))
    result = check.check(store, standard)
    assert (result.outcome, result.exit_code) == ("fail", 1)
    worse, same = (of(result, f"{name}/hqq-4bit") for name in ("softpick", "softmax"))
    assert {gate.outcome for gate in worse if gate.task != "audit"} == {"fail"}
    assert {gate.outcome for gate in same} == {"pass"}
    text = verdict.as_markdown(result)
    assert text.startswith("## qbench check: fail")
    assert re.search(r"^- baseline: softmax, softpick, 2\d{3}-\d\d-\d\d, ", text, re.MULTILINE)
    assert re.search(r"\| ✗ fail +\| softmax/bf16 +\| — +\|", text)
    assert columns(text) == 11
    short = verdict.as_markdown(result, passed=False)
    assert ("✓ pass" in text, "✓ pass" in short) == (True, False)
    assert short.count("✗ fail") == 6

    suite = ElementTree.fromstring(verdict.as_junit(result)).find("testsuite")
    failures = suite.findall("testcase/failure")
    assert int(suite.get("failures")) == len(failures) == result.count("fail") == 6
    assert int(suite.get("tests")) == len(suite.findall("testcase"))


def test_junit_has_inconclusive_lines_as_skipped_where_they_count_as_passed(tmp_path, standard):
    store = changed(tmp_path, shift={"softmax/hqq-4bit": 0.01})
    for counts_as, tag in (("pass", "skipped"), ("fail", "error")):
        result = check.check(store, standard, margins={"acc": 0.1}, inconclusive=counts_as)
        suite = ElementTree.fromstring(verdict.as_junit(result)).find("testsuite")
        assert len(suite.findall(f"testcase/{tag}")) == result.count("inconclusive") > 0


def test_no_name_or_reason_breaks_the_table_the_page_or_the_xml():
    evil = "a|b\nc <img src=x onerror=alert(1)> [x](javascript:y) `d` \x00\x1b[31m\ud800 end"
    gate = GateResult(cell=evil, task="", metric="", outcome="fail", reason=evil)
    result = Verdict(results=evil, baseline=evil, gates=(gate,), notes=(evil,), inconclusive="fail")
    text = verdict.as_markdown(result)
    assert columns(text) == 11
    assert "<img" not in text
    assert "](" not in text
    (case,) = ElementTree.fromstring(verdict.as_junit(result)).iter("testcase")
    assert case.get("classname").endswith(" end")
    assert "\x1b" not in case.find("failure").text


def test_a_default_margin_is_marked_and_the_mark_explained(good, standard):
    result = check.check(good, standard, margins={"perplexity": 9.0})
    text = verdict.as_markdown(result)
    assert re.search(r"\| +9 \|", text)
    assert re.search(r"\d\* \|", text)
    assert "* the smallest that the documents allow" in text
    given = dataclasses.replace(next(g for g in result.gates if g.score), given=True)
    assert (
        "*" not in verdict.as_markdown(dataclasses.replace(result, gates=(given,))).split("\n-")[0]
    )


# The baseline file: gives back what was put in, and what cannot be read is one line.


def assert_same(first, second):
    assert list(first.cells) == list(second.cells)
    for one, other in zip(first.cells.values(), second.cells.values(), strict=True):
        assert (other.scores, other.record.audit) == (one.scores, one.record.audit)
        for name, column in one.columns.items():
            for part in ("documents", "values", "weights"):
                assert (getattr(other.columns[name], part) == getattr(column, part)).all()


def test_a_baseline_gives_back_what_was_put_in_as_a_folder_does(good, standard):
    results = baseline.read_results(good)
    assert_same(results, baseline.read(standard))
    assert_same(results, baseline.read(good.directory))


def test_replacing_a_baseline_must_be_asked_for(tmp_path, good, standard):
    path = tmp_path / "baseline.tar.xz"
    shutil.copy(standard, path)
    worse = changed(tmp_path, shift={"softpick/hqq-4bit": 0.4})
    before = path.read_bytes()
    with pytest.raises(ResultsError, match=r"exists already; .* --replace"):
        baseline.make(worse, path)
    assert path.read_bytes() == before
    baseline.make(worse, path, replace=True)
    assert path.read_bytes() != before


@pytest.mark.parametrize(
    ("settings", "change", "words"),
    [*(({state: (CELL, "softpick/hqq-4bit")}, None, f", softpick/hqq-4bit: {state}")
       for state in ("failed", "missing")),
     ({}, conftest.without_wikitext, ": wikitext failed: it gives NaN"),
     ({}, lambda record: {"scores": (record.scores[0].model_copy(update={"value": math.inf}),
                                     *record.scores[1:])}, ": arc_easy acc is inf"),
     ({}, lambda record: {"audit": None}, ": not audited")],
)  # fmt: skip
def test_no_baseline_is_made_of_a_cell_that_is_no_standard(tmp_path, settings, change, words):
    store = changed(tmp_path, **settings)
    if change is not None:
        update(store, CELL, **change(record_of(store, CELL)))
    with pytest.raises(ResultsError, match=rf"no baseline can be made from it: {CELL}{words}"):
        baseline.make(store, tmp_path / "baseline.tar.xz")


def test_a_file_that_never_was_a_baseline_is_not_replaced(tmp_path, good, standard):
    path = tmp_path / "recipe.yaml"
    path.write_text("name: mine\n")
    with pytest.raises(ResultsError, match=r"recipe\.yaml: exists and is no baseline"):
        baseline.make(good, path, replace=True)
    assert path.read_text() == "name: mine\n"
    (tmp_path / "torn").write_bytes(standard.read_bytes()[:99])
    baseline.make(good, tmp_path / "torn", replace=True)
    assert baseline.read(tmp_path / "torn").cells


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such baseline"), (b"", "damaged"), (b"\xfd7zXZ\0 nonsense", "damaged")],
)  # fmt: skip
def test_an_unreadable_baseline_says_how_to_make_it(tmp_path, good, content, words):
    path = tmp_path / "base"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ResultsError, match=rf"base: {words}.*; make it with `qbench baseline DIR"):
        check.check(good, path)


def test_a_baseline_that_lacks_a_file_is_incomplete(tmp_path, good, standard):
    for pattern, words in (("*.parquet", r"parquet: missing"), ("*.json", "softmax/bf16: missing")):
        folder = tmp_path / words
        extract(standard, folder)
        next(iter(sorted(Path(folder).glob(f"records/softmax/bf16/{pattern}")))).unlink()
        pack(folder, folder.rglob("*"), tmp_path / "base")
        with pytest.raises(ResultsError, match=rf"base: incomplete \(.*{words}.*make it with"):
            check.check(good, tmp_path / "base")


def test_right_answers_that_are_listed_twice_are_refused(tmp_path, standard):
    store = changed(tmp_path, shift={CELL: 0.4})
    record = record_of(store, CELL)
    table = store.outcomes(record)
    right = table[(table["metric"] == "acc") & (table["value"] == 1.0)]
    twice = pd.concat([table, *[right] * 9], ignore_index=True)
    store.put(record, twice)
    with pytest.raises(ResultsError, match="damaged: it lists a document twice"):
        check.check(Store(store.directory), standard)
