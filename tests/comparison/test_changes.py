"""Two results folders side by side, and which part of two keys differs."""

import pytest
from synthetic import make_store

from qbench.comparison.changes import compare_cells, compare_results
from qbench.comparison.rows import find_cell, key_differences, text
from qbench.errors import ResultsError
from qbench.records import Trained
from qbench.store import Store
from qbench.tables.scores import changes_table

SIZES = {"arc_easy": 300, "lambada_openai": 200, "wikitext": 20}
QUANTIZERS = ("bf16", "hqq-4bit")


def grid(path, **settings):
    return make_store(path, sizes=SIZES, quantizers=QUANTIZERS, **settings)


def cell(store, name):
    return find_cell(f"{store.directory}/{name}")


def test_results_of_two_runs_are_paired_and_only_the_changed_cell_is_marked(tmp_path):
    old = grid(tmp_path / "a")
    new = grid(tmp_path / "b", shift={"softmax/hqq-4bit": 0.5})
    changes = compare_results(old, new)
    assert len(changes.lines) == 4 * 5
    marked = {line.cell for line in changes.lines if line.effect.mark}
    assert marked == {"softmax/hqq-4bit"}
    assert "‡" in changes_table(changes)
    same = next(line for line in changes.lines if line.cell == "softpick/bf16")
    assert same.old == same.new == old.get(old.manifest().cells[2]).scores[0].value


def test_cells_of_one_side_only_and_failed_ones_are_named(tmp_path):
    more = (*QUANTIZERS, "hqq-3bit", "gptq-4bit")
    old = make_store(tmp_path / "a", sizes=SIZES, quantizers=more, failed=("softmax/bf16",))
    new = make_store(tmp_path / "b", sizes=SIZES, quantizers=("bf16",))
    assert compare_results(old, new).problems == (
        f"softmax/bf16: {old.directory}: failed: out of memory | while quantizing layer 3",
        *(
            f"{name}/{one}: not in {new.directory}"
            for name in ("softmax", "softpick")
            for one in more[1:]
        ),
    )  # in the grid's order


def test_scores_of_one_side_only_are_named_with_why_they_failed(tmp_path):
    old, new = grid(tmp_path / "a"), grid(tmp_path / "b")
    for index, task in ((0, "wikitext"), (1, "wikitext"), (2, "arc_easy")):
        record = new.get(new.manifest().cells[index])
        kept = tuple(one for one in record.scores if one.task != task)
        failed = {task: "it gives NaN"} if index < 2 else {}
        record = record.model_copy(update={"scores": kept, "failed_tasks": failed})
        new.put(record, new.outcomes(record), None)
    assert compare_results(old, new).problems == (
        f"softmax/bf16, softmax/hqq-4bit: wikitext: not in {new.directory}: it gives NaN",
        f"softpick/bf16: arc_easy: not in {new.directory}",
    )
    assert compare_results(new, old).problems == compare_results(old, new).problems
    cells = compare_cells(cell(new, "softmax/bf16"), cell(old, "softpick/bf16"))
    assert cells.problems == (f"wikitext: not in {new.directory}: softmax/bf16: it gives NaN",)


def test_a_score_without_outcomes_is_compared_by_its_value(tmp_path):
    stores = []
    for side, value in (("a", 0.31), ("b", 0.29)):
        store = grid(tmp_path / side)
        record = store.get(store.manifest().cells[0])
        bleu = {"metric": "bleu", "aggregation": "bleu", "value": value}
        scores = (*record.scores, record.scores[0].model_copy(update=bleu))
        store.put(record.model_copy(update={"scores": scores}), store.outcomes(record))
        stores.append(store)
    (line,) = (one for one in compare_results(*stores).lines if one.metric == "bleu")
    assert (line.old, line.new, line.documents) == (0.31, 0.29, 300)
    assert line.effect.reason == "no test is known for scores that are aggregated as bleu"


def test_two_cells_are_compared_whatever_is_wrong_with_a_third(tmp_path):
    store = grid(tmp_path / "a", failed=("softmax/bf16",))
    next(store.directory.glob("records/softmax/hqq-4bit/*.outcomes.parquet")).unlink()
    cells = compare_cells(cell(store, "softpick/bf16"), cell(store, "softpick/hqq-4bit"))
    assert len(cells.lines) == 5
    wrong = {
        "softmax/hqq-4bit": "missing; run the recipe again",
        "softmax/bf16": "failed: out of memory",
        "softmax/x": "no cell softmax/x; .*a has softmax/bf16, ",
    }
    for name, words in wrong.items():
        with pytest.raises(ResultsError, match=words):
            compare_cells(cell(store, name), cell(store, "softpick/hqq-4bit"))


def trained(name, **in_common):
    return Trained(recipe="pair", normalizer=name, seed=0, attention=name, in_common=in_common)


def test_two_cells_that_were_trained_differently_are_named(tmp_path):
    """Cells of one folder, and the same cells of two."""
    names = ("softmax", "softpick")
    store = grid(tmp_path / "a", trained={n: trained(n, steps=len(n)) for n in names})
    (line,) = compare_cells(cell(store, "softmax/bf16"), cell(store, "softpick/bf16")).problems
    assert line.startswith("softmax/bf16 and softpick/bf16 were trained differently, not in the")
    assert not compare_cells(cell(store, "softmax/bf16"), cell(store, "softmax/hqq-4bit")).problems
    other = grid(tmp_path / "b", trained={"softmax": trained("softmax", steps=9)})
    assert compare_results(store, other).problems == (
        "softmax/bf16, softmax/hqq-4bit: trained differently: steps 7 and 9",
    )


def test_explain_names_exactly_the_parts_that_differ(tmp_path):
    store = grid(tmp_path / "a")
    a, b = (store.get(store.manifest().cells[index]) for index in (0, 1))
    assert [part for part, _, _ in key_differences(a.key_parts, b.key_parts)] == [
        "quantizer.name",
        "quantizer.bits",
    ]
    assert "quantizer.name  bf16  →  hqq-4bit" in text(a, b)


def test_a_part_that_only_one_key_has_is_named():
    less, more = {"device": "cpu"}, {"device": "cpu", "calibration": {"bos": True}}
    assert key_differences(less, more) == [("calibration.bos", "(absent)", "True")]
    assert key_differences(more, less) == [("calibration.bos", "True", "(absent)")]


def test_a_record_is_found_by_cell_or_by_file(tmp_path, monkeypatch):
    store = grid(tmp_path / "a")
    record = find_cell(f"{store.directory}/softpick/hqq-4bit")[1]
    assert record.cell == "softpick/hqq-4bit"
    file = next(store.directory.glob("records/softpick/hqq-4bit/*.json"))
    monkeypatch.chdir(file.parent)  # where its name alone says which
    for name in (str(file), file.name):
        result, same = find_cell(name)
        assert (result.directory, same) == (store.directory, record)


@pytest.mark.parametrize(
    ("address", "said"),
    [("bf16", "write DIR/CHECKPOINT/QUANTIZER"), ("a/softmax/nf4", "no cell softmax/nf4"),
     ("a/softmax/hqq-4bit", "no record yet"), ("nowhere/softmax/bf16", "no grid.json here"),
     ("a/grid.json", "not a record")],
)  # fmt: skip
def test_a_cell_that_is_not_there_is_one_clear_line(tmp_path, monkeypatch, address, said):
    monkeypatch.chdir(tmp_path)
    make_store(
        Store(tmp_path / "a").directory,
        sizes=SIZES,
        quantizers=QUANTIZERS,
        missing=("softmax/hqq-4bit",),
    )
    with pytest.raises(ResultsError, match=said):
        find_cell(address)
