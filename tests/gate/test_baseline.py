"""The baseline file: gives back what was put in, stays small, and damage is noticed."""

import base64
import json
import shutil
import zlib

import pyarrow.parquet as parquet
import pytest
from gate_results import CELL, changed, record_of, update

from qbench.errors import ResultsError
from qbench.gate import baseline, check


def test_a_baseline_gives_back_what_was_put_in(good, standard):
    from qbench.comparison.changes import read_results

    ours, again = read_results(good, decimals=baseline.DECIMALS), baseline.read(standard)
    assert again.name == ours.name
    assert list(again.cells) == list(ours.cells)
    for cell, one in ours.cells.items():
        other = again.cells[cell]
        assert (other.record, other.scores) == (one.record, one.scores)
        for name, column in one.columns.items():
            assert (other.columns[name].documents == column.documents).all()
            assert (other.columns[name].values == column.values).all()
            assert (other.columns[name].weights == column.weights).all()


def test_replacing_a_baseline_must_be_asked_for_and_shows_old_and_new(tmp_path, good, standard):
    from qbench.tables.changes import changes_table

    path = tmp_path / "baseline.parquet"
    shutil.copy(standard, path)
    worse = changed(tmp_path, shift={"softpick/hqq-4bit": 0.4})
    before = path.read_bytes()
    with pytest.raises(ResultsError, match=r"exists already; .* --replace"):
        baseline.make(worse, path)
    assert path.read_bytes() == before
    change = baseline.make(worse, path, replace=True)
    assert path.read_bytes() != before
    old = next(s for s in good.get(good.manifest().cells[3]).scores if s.metric == "acc")
    line = next(row for row in changes_table(change).splitlines() if "softpick/hqq-4bit" in row)
    assert f"| {old.value * 100:.2f} |" in line
    assert "‡" in line


@pytest.mark.parametrize("state", ["failed", "missing"])
def test_no_baseline_is_made_of_a_broken_grid(tmp_path, state):
    store = changed(tmp_path, **{state: ("softmax/hqq-4bit", "softpick/hqq-4bit")})
    words = rf"no baseline from this: softmax/hqq-4bit, softpick/hqq-4bit: {state}"
    with pytest.raises(ResultsError, match=words):
        baseline.make(store, tmp_path / "baseline.parquet")


def test_no_baseline_is_made_without_a_task_that_could_not_be_scored(tmp_path):
    store = changed(tmp_path)
    kept = tuple(one for one in record_of(store, CELL).scores if one.task != "wikitext")
    update(store, CELL, scores=kept, failed_tasks={"wikitext": "it gives NaN"})
    words = rf"no baseline from this: {CELL}: wikitext failed: it gives NaN"
    with pytest.raises(ResultsError, match=words):
        baseline.make(store, tmp_path / "baseline.parquet")


def test_no_baseline_is_made_of_a_score_that_is_not_finite(tmp_path):
    store = changed(tmp_path)
    first, *others = record_of(store, CELL).scores
    update(store, CELL, scores=(first.model_copy(update={"value": float("inf")}), *others))
    with pytest.raises(ResultsError, match=rf"{CELL}: arc_easy acc is inf"):
        baseline.make(store, tmp_path / "baseline.parquet")


def test_a_file_that_never_was_a_baseline_is_not_replaced(tmp_path, good, standard):
    path = tmp_path / "recipe.yaml"
    path.write_text("name: mine\n")
    with pytest.raises(ResultsError, match=r"recipe\.yaml: not a baseline; name another file"):
        baseline.make(good, path, replace=True)
    assert path.read_text() == "name: mine\n"
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(standard.read_bytes()[:99])
    told = baseline.make(good, torn, replace=True).problems
    assert "nothing to compare with" in told[0]
    assert baseline.read(torn).cells


@pytest.mark.parametrize("content", [None, b"", b"PAR1 nonsense PAR1", b"PAR1"])
def test_an_unreadable_baseline_is_unusable_input(tmp_path, good, content):
    path = tmp_path / "baseline.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ResultsError, match=r"baseline\.parquet: .*make it with"):
        check.check(good, path)


def rewrite(standard, path, change) -> None:
    """The baseline with its description changed, and a digest that agrees."""
    table = parquet.ParquetFile(standard).read()
    about = json.dumps(change(json.loads(table.schema.metadata[baseline.ABOUT]))).encode()
    stated = {baseline.ABOUT: about, baseline.DIGEST: baseline._digest(about, table)}
    with parquet.ParquetWriter(path, table.schema.remove_metadata()) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(stated)


def of_records(change):
    """Of the description: its records changed."""

    def changed(about):
        records = json.loads(zlib.decompress(base64.b85decode(about["records"])))
        packed = zlib.compress(json.dumps(change(records)).encode())
        return about | {"records": base64.b85encode(packed).decode()}

    return changed


def test_a_record_that_another_qbench_wrote_is_named_with_what_is_wrong(tmp_path, good, standard):
    path = tmp_path / "baseline.parquet"
    rewrite(standard, path, of_records(lambda found: [{**found[0], "later": 1}, *found[1:]]))
    with pytest.raises(ResultsError, match=r"incomplete \(0\.later: Extra inputs are not"):
        check.check(good, path)


CHANGES = {
    "a list": lambda about: [about],
    "no key": of_records(lambda found: [{**found[0], "key": None}, *found[1:]]),
    "a cell too many": of_records(lambda found: [*found, {**found[0], "checkpoint": "x"}]),
    "a cell too few": of_records(lambda found: found[:-1]),
    "a score too few": of_records(lambda found: [{**one, "scores": []} for one in found]),
    "another version": lambda about: about | {"version": 2},
    "records that are none": lambda about: about | {"records": "zzz"},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_baseline_with_wrong_metadata_is_unusable_input(tmp_path, good, standard, change):
    path = tmp_path / "baseline.parquet"
    rewrite(standard, path, change)
    with pytest.raises(ResultsError, match="make it with"):
        check.check(good, path)


def test_a_baseline_of_a_newer_qbench_says_what_to_update(tmp_path, good, standard):
    path = tmp_path / "baseline.parquet"
    rewrite(standard, path, lambda about: about | {"version": 99})
    with pytest.raises(ResultsError, match=r"version 99.*update qbench"):
        check.check(good, path)
