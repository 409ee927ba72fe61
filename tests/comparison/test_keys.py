"""Which parts of two keys differ, and how a cell is found by its name."""

import pytest
from synthetic import make_store

from qbench.comparison.compare import cell_flips, compare, count_flips, read_columns
from qbench.comparison.rows import changed_files, explanation, find_cell, key_differences
from qbench.errors import ResultsError
from qbench.records import Flips, Unavailable
from qbench.statistics import Column

GRID = {"sizes": {"arc_easy": 30}, "quantizers": ("bf16", "hqq-4bit")}


@pytest.fixture
def grid(tmp_path):
    return make_store(tmp_path / "a", **GRID)


def test_explain_names_exactly_the_parts_that_differ(grid):
    a, b = (grid.get(grid.manifest().cells[index]) for index in (0, 1))
    differing = [part for part, _, _ in key_differences(a.key_parts, b.key_parts)]
    assert differing == ["quantizer.name", "quantizer.bits"]
    assert "quantizer.name  bf16  →  hqq-4bit" in explanation(a, b)
    less, more = {"device": "cpu"}, {"device": "cpu", "calibration": {"bos": True}}
    assert key_differences(less, more) == [("calibration.bos", "(absent)", "True")]
    assert key_differences(more, less) == [("calibration.bos", "True", "(absent)")]


@pytest.mark.parametrize(
    ("changed", "words"),
    [(["tokenizer"], "another tokenizer"), (["weights"], "other weights"),
     (["config", "tokenizer"], "another config.json and another tokenizer"),
     (None, "other weights, configuration or tokenizer")],
)  # fmt: skip
def test_which_files_of_a_checkpoint_differ_is_said(changed, words):
    files = dict.fromkeys(("weights", "config", "tokenizer"), "a")
    both = files, files | dict.fromkeys(changed or (), "b")
    old, new = ({} if changed is None else {"checkpoint": each} for each in both)
    assert changed_files(old, new) == words


def test_a_record_is_found_by_cell_or_by_file(grid, monkeypatch):
    record = find_cell(f"{grid.directory}/softpick/hqq-4bit")[1]
    assert record.cell == "softpick/hqq-4bit"
    file = next(grid.directory.glob("records/softpick/hqq-4bit/*.json"))
    monkeypatch.chdir(file.parent)  # where its name alone says which
    for name in (str(file), file.name):
        result, same = find_cell(name)
        assert (result.directory, same) == (grid.directory, record)


@pytest.mark.parametrize(
    ("address", "said"),
    [("bf16", "write DIR/CHECKPOINT/QUANTIZER"), ("./../{}/a", "write DIR/CHECKPOINT/QUANTIZER"),
     ("a/softmax/nf4", "no cell softmax/nf4"),
     ("a/softmax/hqq-4bit", "no record yet"), ("nowhere/softmax/bf16", "of a folder that"),
     ("a/grid.json", "not a record")],
)  # fmt: skip
def test_a_cell_that_is_not_there_is_one_clear_line(tmp_path, monkeypatch, address, said):
    monkeypatch.chdir(tmp_path)
    make_store(tmp_path / "a", missing=("softmax/hqq-4bit",), **GRID)
    with pytest.raises(ResultsError, match=said):
        find_cell(address.format(tmp_path.name))


# Answers that quantization changed are counted from the outcomes of two cells.


def outcomes(values, metric="acc"):
    return {("t", metric): Column.of(range(len(values)), values, [1.0] * len(values))}


@pytest.mark.parametrize(
    ("before", "after", "counts"),
    [
        (outcomes([1, 1, 0, 0, 1]), outcomes([0, 0, 1, 0, 1]), (5, 2, 1)),
        (outcomes([0.5, 1, 0]), outcomes([1, 1, 0]), None),  # partly right
        (outcomes([-9.5, -3.25], "ppl"), outcomes([-9.0, -3.0], "ppl"), None),
    ],
)
def test_flips_are_counted_in_both_directions(before, after, counts):
    result = count_flips(before, after)
    if counts is None:
        assert result == {}
        return
    names = ("documents", "right_to_wrong", "wrong_to_right")
    (metrics,) = result.values()
    assert list(metrics.values()) == [Flips(**dict(zip(names, counts, strict=True)))]


def test_they_need_no_cache_and_no_divergence(tmp_path):
    """A cell whose divergence could not be measured has flips all the same."""
    store = make_store(tmp_path / "r", quantizers=("bf16", "hqq-4bit"), sizes={"arc_easy": 60})
    for cell in store.manifest().cells:
        record = store.get(cell)
        lost = Unavailable(reason="hidden states are gone", retry=True)
        store.put(record.model_copy(update={"damage": lost}), store.outcomes(record))
    comparison = compare(store)
    base, quantized = (store.get(cell) for cell in store.manifest().cells[:2])
    expected = count_flips(read_columns(store, base), read_columns(store, quantized))
    assert expected["arc_easy"]["acc"].documents == 60
    assert comparison.flips[quantized.cell] == expected
    parts = quantized.key_parts | {"damage against": base.key}
    assert cell_flips(store, quantized.model_copy(update={"key_parts": parts})) == expected
    assert cell_flips(store, base) == {}
