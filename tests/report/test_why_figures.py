"""Figures of analyses: nothing is cut or written over, and trainings of one kind look alike."""

from __future__ import annotations

import csv
import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib import rc_context

from qbench.analyses import Analyses
from qbench.report.style import RC, SERIES
from qbench.report.why import drawings, read, write_numbers
from qbench.store import Store
from qbench.tables.analyses import gather, over_seeds

PAIR = Path(__file__).parents[2] / "results" / "pair-27m"
CHECKPOINTS = ("softmax.1", "softmax.2", "softpick.1", "softpick.2")
GROUPS = {"softmax": CHECKPOINTS[:2], "softpick": CHECKPOINTS[2:]}


@pytest.fixture(scope="module")
def why():
    return gather(Store(PAIR))


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


def drawn(why):
    found = [one for make in drawings(why) for one in make()]
    with rc_context(RC):
        for one in found:
            one.figure.draw_without_rendering()
    return found


@pytest.mark.parametrize("several", [False, True])
def test_no_number_of_a_colour_bar_is_cut_or_on_a_title(why, seeds, several):
    for one in drawn(seeds if several else why):
        width, height = one.figure.bbox.width, one.figure.bbox.height
        numbers = [
            text.get_window_extent()
            for axes in one.figure.axes
            for axis in (axes.xaxis, axes.yaxis)
            for text in axis.get_ticklabels()
            if text.get_visible() and text.get_text()
            and _within(axis, text)
        ]  # fmt: skip
        titles = [
            title.get_window_extent()
            for axes in one.figure.axes
            for title in (axes.title, axes._left_title)
            if title.get_text()
        ]
        for box in [*numbers, *titles]:
            inside = box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height
            assert inside, one.name
        for box, title in itertools.product(numbers, titles):
            assert not box.overlaps(title), one.name
        for a, b in itertools.combinations(titles, 2):
            assert not a.overlaps(b), one.name


def _within(axis, text):
    """Ticks beyond the axis' ends are not drawn."""
    low, high = sorted(axis.get_view_interval())
    place = text.get_position()[0 if axis.axis_name == "x" else 1]
    return low <= place <= high


def test_the_largest_activations_are_told_in_numbers_a_reader_expects(why):
    figure = next(one.figure for one in drawn(why) if one.name == "largest")
    axis = figure.axes[0].yaxis
    shown = [text.get_text() for text in axis.get_ticklabels(which="both") if _within(axis, text)]
    assert len(shown) >= 2
    assert all(text.rstrip("0") in {"1", "2", "5"} for text in shown)
    label = axis.label.get_window_extent()
    assert not any(label.overlaps(text.get_window_extent()) for text in axis.get_ticklabels())


def test_captions_leave_names_as_they_are(why):
    caption = next(one.caption for one in drawn(why) if one.name == "outliers-hqq-3bit")
    assert "softmax/hqq-3bit: ρ = −0.10 (−0.31 to +0.12)" in caption


def test_trainings_of_one_kind_look_alike_and_stand_once_in_the_legend(seeds):
    for one in drawn(seeds):
        if one.name in ("largest", "sparsity", "along-the-text"):
            (legend,) = one.figure.legends
            assert [t.get_text() for t in legend.get_texts()] == ["softmax/bf16", "softpick/bf16"]
            colours = {line.get_color() for line in one.figure.axes[0].get_lines()}
            assert colours == set(SERIES[:2])


def test_table_4_and_the_damage_are_told_over_seeds(seeds):
    (table,) = over_seeds(seeds)
    assert [row[0] for row in table.rows] == [f"{n}/bf16, 2 trainings" for n in GROUPS]
    kurtosis = seeds.cells[0].measured.hidden.kurtosis
    told = dict(zip(table.head, table.rows[0], strict=True))
    assert told["Kurtosis"] == f"{1.5 * kurtosis:.2f} ({kurtosis:.2f} to {2 * kurtosis:.2f})"
    assert told["KL gptq-3bit"].count("0.1") == 3


def test_the_page_says_what_was_read():
    """Sink rates mean nothing without their text and its length."""
    _, told = read(Store(PAIR))
    assert told[0].startswith("softmax/bf16: 60 texts of 512 tokens (BOS counted) of task wikitext")
    assert any("texts of 4096 tokens" in line for line in told)


def test_without_replicates_there_is_no_such_table(why):
    assert over_seeds(why) == []


def test_the_curve_of_heads_cut_out_has_its_numbers_in_a_csv(tmp_path):
    store = Store(PAIR.with_name("pair-27m-heads"))
    why = gather(store)
    (path,) = write_numbers(store, why, tmp_path)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert path.name == "pruned.csv"
    curve = next(one for one in drawn(why) if one.name == "pruning")
    assert "Numbers: pruned.csv" in curve.caption
    for line in curve.figure.axes[0].get_lines():
        own = [row for row in rows if row["checkpoint"] == line.get_label()]
        assert [100 * float(row["share"]) for row in own] == list(line.get_xdata())


def test_cells_that_failed_alike_are_named_in_one_line(tmp_path):
    shutil.copytree(PAIR / "analysis", tmp_path / "analysis")
    analyses = Analyses(tmp_path)
    for one in analyses.all():
        analyses.put(one.model_copy(update={"status": "failed", "error": "no", "measured": None}))
    assert gather(Store(tmp_path)).problems == ("softmax/bf16, softpick/bf16: failed: no",)
