"""One checkpoint's precisions among themselves: each pair, and against one."""

import pytest
from synthetic import make_store

from qbench.cli import results as command
from qbench.comparison.changes import compare_cells
from qbench.comparison.compare import compare
from qbench.comparison.rows import find_cell
from qbench.errors import ResultsError
from qbench.tables import render

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
    assert pair.effect.estimate == pytest.approx(values["gptq-4bit"] - values["hqq-2bit"])


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
