"""What several trainings' analyses say together, and what is missing."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from qbench.store import Analyses, Store
from qbench.tables.analyses import over_seeds
from qbench.tables.analysis_results import load_analyses
from qbench.text import MINUS
from qbench.viewer.figures import sensitivity, sinks, write_analyses

PAIR = Path(__file__).parents[2] / "results" / "pair-27m"
CHECKPOINTS = ("softmax.1", "softmax.2", "softpick.1", "softpick.2")
GROUPS = {"softmax": CHECKPOINTS[:2], "softpick": CHECKPOINTS[2:]}


@pytest.fixture(scope="module")
def why():
    return load_analyses(Store(PAIR))


@pytest.fixture(scope="module")
def seeds(why):
    """The pair twice, as two trainings of each kind; the second with twice the kurtosis."""

    def twice(found, second=lambda one: one):
        return tuple(
            made.model_copy(update={"checkpoint": f"{one.checkpoint}.{number}"})
            for one in found
            for number, made in ((1, one), (2, second(one)))
        )

    def doubled(one):
        hidden = one.measured.hidden
        hidden = hidden.model_copy(update={"kurtosis": 2 * hidden.kurtosis})
        return one.model_copy(update={"measured": one.measured.model_copy(
            update={"hidden": hidden})})  # fmt: skip

    return replace(
        why, cells=twice(why.cells, doubled), long=twice(why.long),
        sensitivities=twice(why.sensitivities), records=twice(why.records), replicates=GROUPS,
    )  # fmt: skip


def test_table_4_and_the_damage_are_told_over_seeds(seeds):
    (table,) = over_seeds(seeds)
    assert [row[0] for row in table.rows] == [f"{n}/bf16, 2 trainings" for n in GROUPS]
    kurtosis = seeds.cells[0].measured.hidden.kurtosis
    told = dict(zip(table.head, table.rows[0], strict=True))
    assert told["Kurtosis"] == f"{1.5 * kurtosis:.2f} ({kurtosis:.2f} to {2 * kurtosis:.2f})"
    assert told["KL gptq-3bit"].count("0.1") == 3
    assert told["KL gptq-8bit"].startswith("0.0003732 (")


def test_cells_that_failed_alike_are_named_in_one_line(tmp_path):
    shutil.copytree(PAIR / "analysis", tmp_path / "analysis")
    analyses = Analyses(tmp_path)
    for one in analyses.records():
        analyses.put(one.model_copy(update={"status": "failed", "error": "no", "measured": None}))
    assert load_analyses(Store(tmp_path)).problems == ("softmax/bf16, softpick/bf16: failed: no",)


@pytest.mark.parametrize("layers", [4, 12])
def test_layers_on_axes_are_whole_numbers(layers):
    why = load_analyses(Store(PAIR))
    cells = [replace_layers(one, one.measured.layers[:layers]) for one in why.cells if one.measured]
    ones = [one.model_copy(update={"units": tuple(u for u in one.units if u.layer < layers)})
            for one in why.sensitivities]  # fmt: skip
    for draw, found in ((sinks, cells), (sensitivity, ones)):
        ((_, figure),) = draw(found)
        for axes in figure.axes[: len(found)]:
            figure.draw_without_rendering()
            ticks = [tick.get_text() for tick in axes.get_xticklabels()]
            assert ticks
            assert all(tick.replace(MINUS, "-").lstrip("-").isdecimal() for tick in ticks), ticks


def replace_layers(one, layers):
    return one.model_copy(update={"measured": one.measured.model_copy(update={"layers": layers})})


@pytest.mark.slow
def test_figures_and_numbers_of_analyses_are_files_that_come_out_alike(tmp_path):
    shutil.copytree(PAIR / "analysis", tmp_path / "analysis")
    written = [{path.name: path.read_bytes() for path in write_analyses(Store(tmp_path))}
               for _ in range(2)]  # fmt: skip
    assert written[0] == written[1]
    assert {"tables.md", "cells.csv", "boxes.svg", "maps-softmax-bf16.svg", "sinks.svg",
            "along-the-text.svg", "sensitivity-hqq-3bit.svg"} <= written[0].keys()  # fmt: skip
    assert b"softpick/bf16" in written[0]["boxes.svg"]  # text stays text
