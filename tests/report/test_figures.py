"""The report's figures: every point at its row, with its interval, and nothing cut."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure
from measured_damage import DAMAGE
from synthetic import make_store

from qbench import report
from qbench.comparison.compare import compare
from qbench.records import Damage, Flips
from qbench.report import figures
from qbench.report.figures import groups, plates, score_figures
from qbench.report.style import RC, WIDTH

SIZES = {"arc_easy": 120, "piqa": 80, "wikitext": 12}
QUANTIZERS = ("bf16", "gptq-2bit", "gptq-4bit", "hqq-2bit", "rtn-8bit")


@pytest.fixture(scope="module", params=[1, 3])
def comparison(request, tmp_path_factory):
    names = ("softmax", "softpick", "third-with-a-name-as-long-as-that-of-a-folder")[
        : request.param
    ]
    folder = tmp_path_factory.mktemp("figures")
    return compare(make_store(folder, sizes=SIZES, quantizers=QUANTIZERS, checkpoints=names))


@pytest.fixture(scope="module")
def drawn(comparison):
    return {one.name: one for draw in groups(comparison) for one in draw()}


def test_no_text_of_a_figure_is_cut(drawn):
    for one in drawn.values():
        with rc_context(RC):
            one.figure.draw_without_rendering()
        width, height = one.figure.bbox.width, one.figure.bbox.height
        titles = [axes.title.get_window_extent() for axes in one.figure.axes]
        for legend in one.figure.legends:
            assert not any(legend.get_window_extent().overlaps(title) for title in titles)
        assert one.figure.get_figwidth() == WIDTH
        for text in _texts(one.figure):
            box = text.get_window_extent()
            inside = box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height
            assert inside, f"{one.name}: {text.get_text()}"


def _texts(figure: Figure):
    for axes in figure.axes:
        found = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        low, high = axes.get_xlim()  # ticks beyond are not drawn
        found += [text for text in axes.get_xticklabels() if low <= text.get_position()[0] <= high]
        found += axes.get_yticklabels()
        yield from (text for text in found if text.get_visible() and text.get_text())
    for legend in figure.legends:
        yield from legend.get_texts()


def test_sizes_and_accuracies_stand_in_the_same_row_in_order_of_size(drawn, comparison):
    size, accuracy = drawn["size"].figure.axes
    labels = [text.get_text() for text in size.get_yticklabels()]
    assert labels == ["gptq-2bit", "hqq-2bit", "gptq-4bit", "rtn-8bit", "bf16"]
    assert [text.get_text() for text in size.texts] == ["2.50", "2.50", "4.50", "8.50", "16.00"]
    lines = {(line.quantizer, line.task): line for line in comparison.lines
             if line.metric == "acc_norm"}  # fmt: skip
    first = comparison.checkpoints[0]
    bars = accuracy.containers[0]
    x, y = bars.lines[0].get_data()
    points = {round(row): value for row, value in zip(y, x, strict=True)}
    for row, label in enumerate(labels):
        values = [lines[label, task].intervals[first].estimate for task in ("arc_easy", "piqa")]
        assert points[row] == pytest.approx(100 * sum(values) / 2)
    ends = bars.lines[2][0].get_segments()
    assert all(end[1][0] - end[0][0] > 1 for end in ends)  # points of accuracy


def test_every_effect_of_a_metric_is_drawn_with_its_interval(drawn, comparison):
    axes = drawn["damage-wikitext-word_perplexity"].figure.axes
    lines = [line for line in comparison.lines if line.metric == "word_perplexity" and line.damages]
    for found, question in zip(axes, ("differences", "damages")[-len(axes) :], strict=True):
        wanted = sorted(e.estimate for line in lines for e in getattr(line, question).values())
        told = sorted(x for bars in found.containers for x in bars.lines[0].get_xdata())
        assert told == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 0.02), (-0.03, 0.1), (-0.4, 0.2), (-0.1, 5.0), (-9.0, 2.0)]
)
def test_ticks_of_an_axis_of_ratios_are_round_and_apart(low, high):
    axes = Figure().subplots()
    axes.set_xlim(low, high)
    figures.show_powers(axes)
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert 2 <= len(ticks) <= 8
    assert min(b - a for a, b in itertools.pairwise(ticks)) >= (high - low) / 7
    assert all(len(f"{math.exp(tick):.4g}".strip("0.")) <= 5 for tick in ticks)
    assert 0.0 in ticks


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0.18, 1.35, "0.2 0.3 0.5 0.7 1"),
        (0.52, 1.07, "0.6 0.7 0.8 0.9 1"),
        (0.94, 2.1, "1 1.5 2"),
        (0.17, 1.98, "0.2 0.5 1"),
        (0.9, 14, "1 2 5 10"),
        (0.85, 230, "1 3 10 30 100"),
        (7e-6, 2.8, "1e−5 0.0001 0.001 0.01 0.1 1"),
        (0.99998, 1.00003, "0.99998 0.99999 1 1.00001 1.00002"),
    ],
)
def test_ticks_of_an_axis_of_ratios_go_in_steps_that_a_reader_expects(low, high, wanted):
    axes = Figure().subplots()
    axes.set_xlim(math.log(low), math.log(high))
    figures.show_powers(axes)
    form = axes.xaxis.get_major_formatter()
    assert " ".join(form(tick) for tick in axes.get_xticks()) == wanted


NAMES = {"BNB": "bnb-4bit", "GPTQ": "gptq-4bit", "Activations": "a8-static-99.99",
         "KV cache": "kv4", "Round to nearest": "w4a8-rtn",
         "Simulated_activations_in_int8": "w8a8"}  # fmt: skip


@pytest.mark.parametrize("several", [1, 3], ids=["short labels", "long labels"])
def test_names_below_scores_are_whole_apart_and_inside_the_figure(comparison, several):
    """Methods of one quantizer each stand close: Activations beside KV cache."""
    names = list(NAMES.items()) if several == 3 else [(name, "m-4bit") for name in NAMES]
    lines = [
        dataclasses.replace(line, method=f"m{index}", title=title,
                            quantizer=label.replace("m-", f"m{index}-"))
        for index, (line, (title, label)) in enumerate(
            zip((x for x in comparison.lines if x.quantized), names, strict=False)
        )
    ]  # fmt: skip
    lines = [dataclasses.replace(line, task="piqa", metric="acc") for line in lines]
    with rc_context(RC):
        [(_, _, figure)] = score_figures(comparison, lines)
        figure.draw_without_rendering()
    axes = figure.axes[0]
    assert [text.get_text().split() for text in axes.texts] == [name.split() for name in NAMES]
    shown = [*axes.texts, *axes.get_xticklabels()]
    boxes = [text.get_window_extent() for text in shown]
    assert all(box.y0 >= 0 and box.x1 <= figure.bbox.width for box in boxes)
    for (one, a), (two, b) in itertools.combinations(zip(boxes, shown, strict=True), 2):
        assert not one.overlaps(two), (a.get_text(), b.get_text())


def test_the_caption_tells_what_is_drawn(tmp_path):
    """Of WikiText no answer changes: the caption says nothing of answers."""
    told = DAMAGE.tasks["arc_easy"].model_copy(update={"flips": {}})
    damage = Damage(tasks={"wikitext": told})
    store = make_store(tmp_path, sizes={"wikitext": 12}, quantizers=QUANTIZERS)
    for cell in store.grid().cells:
        if cell.bits:
            record = store.get(cell)
            store.put(record.model_copy(update={"damage": damage}), store.outcomes(record), None)
    found = {one.name: one for draw in groups(compare(store)) for one in draw()}
    (panel,) = found["distributions-wikitext"].figure.axes
    assert panel.get_title() == "Mean KL divergence (nats a token)"
    assert "answers" not in found["distributions-wikitext"].caption


@pytest.mark.parametrize("peak", [0.04, 0.45, 0.56, 0.7, 0.99, 3.1, 12.0, 75.0, 139.0])
def test_numbers_of_seconds_and_memory_stand_apart(tmp_path, peak):
    store = make_store(tmp_path, sizes={"piqa": 12}, quantizers=QUANTIZERS)
    for cell in store.grid().cells:
        record = store.get(cell)
        stages = [one.model_copy(update={"peak_memory_gib": peak}) for one in record.stages]
        store.put(record.model_copy(update={"stages": tuple(stages)}), store.outcomes(record), None)
    found = {one.name: one for draw in groups(compare(store)) for one in draw()}
    figure = found["stages"].figure
    with rc_context(RC):
        figure.draw_without_rendering()
    shown = []
    for axes in figure.axes:
        low, high = axes.get_xlim()
        ticks = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        shown.append([text for tick, text in ticks if low <= tick <= high])
    assert all(len(one) >= 2 for one in shown)
    boxes = [text.get_window_extent().expanded(1.05, 1.0) for one in shown for text in one]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_a_marker_at_0_is_drawn_whole(tmp_path):
    none = DAMAGE.tasks["arc_easy"].model_copy(
        update={"flips": {"acc": Flips(documents=120, right_to_wrong=0, wrong_to_right=0)}}
    )
    store = make_store(tmp_path, sizes={"arc_easy": 12}, quantizers=("bf16", "gptq-4bit"))
    for cell in store.grid().cells:
        if cell.bits:
            record = store.get(cell).model_copy(update={"damage": Damage(tasks={"arc_easy": none})})
            store.put(record, store.outcomes(record), None)
    found = {one.name: one for draw in groups(compare(store)) for one in draw()}
    changed = found["distributions-arc_easy"].figure.axes[1]
    assert changed.get_title() == "Answers changed (%)"
    assert changed.get_xlim()[0] < 0


def test_the_same_figures_are_drawn_again(tmp_path):
    store = make_store(tmp_path / "one", sizes={"wikitext": 12}, quantizers=QUANTIZERS)
    comparison = compare(store)
    once, again = (
        plates(groups(comparison), tmp_path / name, report.FIGURE_FORMATS) for name in "ab"
    )
    assert [(one.name, one.svg) for one in once] == [(one.name, one.svg) for one in again]
    for one, other in zip(once, again, strict=True):
        for path, same in zip(one.paths, other.paths, strict=True):
            assert path.read_bytes() == same.read_bytes()
