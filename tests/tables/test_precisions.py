"""One checkpoint's precisions among themselves: each pair, against one, and which is best."""

import re
from pathlib import Path

import pytest
from synthetic import make_store

from qbench.cli import results as command
from qbench.comparison.changes import compare_cells
from qbench.comparison.compare import compare
from qbench.comparison.explain import find_cell
from qbench.errors import ResultsError
from qbench.store import Store
from qbench.tables import render
from qbench.tables.rank import ranking
from qbench.tables.scores import gib

SIZES = {"arc_easy": 60}
QUANTIZERS = ("bf16", "bnb-8bit", "bnb-4bit", "gptq-4bit", "hqq-2bit")


@pytest.fixture
def store(tmp_path):
    return make_store(
        tmp_path / "mine", checkpoints=("mine",), quantizers=QUANTIZERS, sizes=SIZES,
        shift={"mine/hqq-2bit": 3.0},
    )  # fmt: skip


def test_each_pair_of_quantized_precisions_is_compared_below_the_table(store):
    comparison = compare(store)
    pairs = {one.cell for one in comparison.pairs if one.metric == "acc"}
    assert pairs == {
        "bnb-4bit − bnb-8bit", "gptq-4bit − bnb-8bit", "hqq-2bit − bnb-8bit",
        "gptq-4bit − bnb-4bit", "hqq-2bit − bnb-4bit", "hqq-2bit − gptq-4bit",
    }  # fmt: skip
    assert "hqq-2bit − bnb-8bit" in render(comparison).partition("among themselves")[2]
    corrected = [one.effect for one in comparison.pairs]
    assert all(one.p_holm >= one.p for one in corrected)


def test_a_pair_is_what_two_cells_give(store):
    pair = next(
        one
        for one in compare(store).pairs
        if one.cell == "hqq-2bit − gptq-4bit" and one.metric == "acc"
    )
    alone = compare_cells(
        *(find_cell(f"{store.directory}/mine/{name}") for name in ("gptq-4bit", "hqq-2bit"))
    )
    same = next(one for one in alone.lines if one.metric == "acc")
    assert (same.old, same.new, same.effect.p) == (pair.old, pair.new, pair.effect.p)
    values = {e.quantizer: e.value for one in compare(store).lines if one.metric == "acc"
              for e in one.entries}  # fmt: skip
    assert pair.effect.estimate == pytest.approx(values["hqq-2bit"] - values["gptq-4bit"])


def test_against_names_the_precision_that_others_are_compared_with(store):
    pairs = compare(store, against="bnb-8bit").pairs
    assert {one.cell for one in pairs} == {
        f"{name} − bnb-8bit" for name in ("bnb-4bit", "gptq-4bit", "hqq-2bit")
    }
    with pytest.raises(ResultsError, match=r"^--against nf4: .*there are bnb-8bit, bnb-4bit, "):
        compare(store, against="nf4")


def test_against_is_for_one_checkpoint(tmp_path):
    store = make_store(tmp_path / "two", quantizers=("bf16", "bnb-4bit"), sizes={"arc_easy": 20})
    with pytest.raises(ResultsError, match="one checkpoint"):
        compare(store, against="bnb-4bit")


def test_two_cells_of_a_folder_are_compared(store, capsys):
    folder = store.directory / "mine"
    command.compare(folder / "bnb-4bit", folder / "hqq-2bit")
    text = capsys.readouterr().out
    assert "### mine/hqq-2bit against mine/bnb-4bit" in text
    with pytest.raises(ResultsError, match=r"no cell mine/gptq-2bit; .*mine has mine/bf16"):
        command.compare(folder / "bnb-4bit", folder / "gptq-2bit")


def test_the_best_precision_is_named_with_those_that_are_not_significantly_worse(store):
    (layout,) = ranking(compare(store), store)
    (row,) = [row for row in layout.rows if row[1].startswith("Acc ↑")]
    best, alike, worse = row[3], row[7], row[8]
    assert worse == "hqq-2bit"
    assert {best, *re.split(", ", alike)} == {"bnb-8bit", "bnb-4bit", "gptq-4bit"}
    with pytest.raises(ResultsError, match="--rank: leave --published and --against out"):
        command.tables(store.directory, rank=True, against="bnb-8bit")


def test_the_best_bleu_is_named_though_no_test_says_which_are_worse(tmp_path):
    names = ("bf16", "hqq-4bit", "hqq-3bit")
    store = make_store(tmp_path / "a", checkpoints=("mine",), quantizers=names, sizes={"t": 9})
    for bits, cell in enumerate(store.grid().cells):
        record = store.get(cell)
        bleu = {"metric": "bleu", "aggregation": "bleu", "value": 30.0 - bits, "stderr": None}
        scores = (*record.scores, record.scores[0].model_copy(update=bleu))
        store.put(record.model_copy(update={"scores": scores}), store.outcomes(record))
    (layout,) = ranking(compare(store), store)
    (row,) = [row for row in layout.rows if row[1].startswith("Bleu")]
    assert (row[3], row[5], row[7], row[8]) == ("hqq-4bit", "29.00", "—", "—")


def test_points_a_gib_are_those_lost_for_what_is_saved():
    store = Store(Path(__file__).parents[2] / "results" / "published-27m-gguf")
    (table,) = ranking(compare(store), store, 0.018)  # Q4_0 and Q3_K_M, of 0.0161 and 0.0158 GiB
    row = next(row for row in table.rows if row[:2] == ("arc_easy", "Acc Norm ↑"))
    comparison = compare(store)
    sizes = {name: gib(comparison.records[f"softmax/{name}"]) for name in ("bf16", row[3])}
    scores = {
        one.quantizer: one.entry("softmax").value
        for one in comparison.lines
        if (one.label, one.metric) == ("arc_easy", "acc_norm")
    }
    lost = 100 * (scores[row[3]] - scores["bf16"])
    expected = lost / (sizes["bf16"] - sizes[row[3]])
    assert float(row[6].replace("−", "-")) == pytest.approx(expected, rel=1e-2)
