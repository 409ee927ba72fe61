"""The baseline file: gives back what was put in, and what cannot be read is one line."""

import math
import shutil
from pathlib import Path

import pandas as pd
import pytest
from gate.conftest import CELL, changed, record_of, update, without_wikitext

from qbench.errors import ResultsError
from qbench.gate import baseline, check
from qbench.store import Store, extract, pack


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
     ({}, without_wikitext, ": wikitext failed: it gives NaN"),
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
