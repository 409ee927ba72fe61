"""What analyses say as tables and files: table 4, over seeds, one CSV, the paper's rows."""

import csv
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from qbench.store import Analyses, Store
from qbench.tables.analyses import analyses_csv, load_analyses, table_4

PAIR = Path(__file__).parents[2] / "results" / "pair-27m"
CHECKPOINTS = ("softmax.1", "softmax.2", "softpick.1", "softpick.2")
GROUPS = {"softmax": CHECKPOINTS[:2], "softpick": CHECKPOINTS[2:]}


@pytest.fixture(scope="module")
def results():
    return load_analyses(Store(PAIR))


@pytest.fixture(scope="module")
def seeds(results):
    """The pair twice, as two trainings of each kind; the second with twice the kurtosis."""

    def twice(analyses, second=lambda one: one):
        return tuple(
            made.model_copy(update={"checkpoint": f"{one.checkpoint}.{number}"})
            for one in analyses
            for number, made in ((1, one), (2, second(one)))
        )

    def doubled(one):
        hidden = one.measured.hidden
        hidden = hidden.model_copy(update={"kurtosis": 2 * hidden.kurtosis})
        return one.model_copy(update={"measured": one.measured.model_copy(
            update={"hidden": hidden})})  # fmt: skip

    return replace(
        results, cells=twice(results.cells, doubled), records=twice(results.records),
        replicates=GROUPS,
    )  # fmt: skip


def test_table_4_and_the_damage_are_means_over_seeds(seeds):
    (table,) = table_4(seeds)
    names = [row[0] for row in table.rows]
    assert names[:2] == [f"{group}/bf16, 2 trainings" for group in GROUPS]
    assert {*names[2:]} == {f"{checkpoint}/bf16" for checkpoint in CHECKPOINTS}
    kurtosis = seeds.cells[0].measured.hidden.kurtosis
    row = dict(zip(table.head, table.rows[0], strict=True))
    assert row["Kurtosis"] == f"{1.5 * kurtosis:.2f} ({kurtosis:.2f} to {2 * kurtosis:.2f})"
    assert row["KL gptq-3bit"].count("0.1") == 3
    assert row["KL gptq-8bit"].startswith("0.000372")


def test_the_csv_has_every_number_in_full_precision(results):
    rows = list(csv.DictReader(analyses_csv(results).splitlines()))
    values = {(row["key"], row["measure"]): row["value"] for row in rows}
    one = results.cells[0]
    mass = one.measured.layers[3].heads[2].mass
    assert float(values[one.key, "layers.3.heads.2.mass"]) == mass
    alone = results.sensitivities[0]
    unit = alone.units[0]
    assert float(values[alone.key, f"{unit.name}.kl.value"]) == unit.kl.value
    assert {row["analysis"] for row in rows} == {"text", "sensitivity"}


def test_cells_that_failed_alike_are_named_in_one_line(tmp_path):
    shutil.copytree(PAIR / "analysis", tmp_path / "analysis")
    analyses = Analyses(tmp_path)
    for one in analyses.records():
        analyses.put(one.model_copy(update={"status": "failed", "error": "no", "measured": None}))
    assert load_analyses(Store(tmp_path)).problems == ("softmax/bf16, softpick/bf16: failed: no",)
