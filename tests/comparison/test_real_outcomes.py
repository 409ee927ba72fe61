"""Intervals and the verdict in samples of documents of real runs (docs/simulate.py)."""

import runpy
from pathlib import Path

import pytest

from qbench.comparison.compare import compare, read_columns
from qbench.records import ANSWERS
from qbench.statistics import KL_MEAN, Panel, effect
from qbench.store import Store

RESULTS = Path(__file__).parents[2] / "results"


def records(folder):
    store = Store(RESULTS / folder)
    return store, {record.cell: record for record in store.records()}


def test_kl_along_answers_has_the_interval_of_every_kl():
    store, result = records("answers")
    rows = {(row.metric, row.quantizer): row for row in compare(store).lines}
    cell, kl = "smollm2/rtn-8bit", (ANSWERS, "kl")
    column = read_columns(store, result[cell], [kl])[kl]
    scores = rows["kl", "rtn-8bit"].of("scores")
    assert scores["smollm2"] == effect(Panel.of({cell: column}), {cell: 1}, KL_MEAN)


simulations = runpy.run_path(str(RESULTS.parent / "docs" / "simulate.py"))
GRIDS = simulations["GRIDS"] // 3


def slack(share):
    return 2 * (share * (1 - share) / GRIDS) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "names", "documents"), simulations["EQUAL"])
def test_equal_precisions_are_told_apart_in_at_most_5_of_100_runs(folder, names, documents):
    wrong = simulations["wrong_order"](folder, names, documents, GRIDS)
    assert wrong <= 0.05 + slack(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("folder", simulations["HALF"])
def test_half_of_the_documents_reverse_no_order_of_the_real_run(folder):
    shares = simulations["half_of_the_documents"](folder, GRIDS)
    assert shares["reversed"] == 0
    assert shares["nearest"] >= 0.95
    assert shares["seen"] >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize("documents", [20, 100, 1_000])
@pytest.mark.parametrize("trainings", [1, 3])
@pytest.mark.parametrize("cells", simulations["INTERVALS"], ids=" ".join)
def test_intervals_of_kl_cover(cells, documents, trainings):
    """The mean ± 1.96 standard errors covered 71 to 95 of 100; Student's t over trainings 86; of
    int8 copies in which few documents have much of all KL 77 before intervals allowed for them."""
    folder, *cells = cells
    covered = simulations["coverage"](folder, cells, documents, trainings, GRIDS)
    assert covered >= 0.935 - slack(0.935)
