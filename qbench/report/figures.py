"""The report's figures of scores and damage. Each function draws one and knows no file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import wrap

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from qbench.comparison.lines import Comparison, Line
from qbench.comparison.statistics import Effect
from qbench.report import rows
from qbench.report.costs import Found, cost_figures, distribution_figures
from qbench.report.effects import shown
from qbench.report.seed_figures import seed_figures
from qbench.report.style import (
    DASHES,
    INK,
    MARKERS,
    RC,
    SERIES,
    fix_empty_labels,
    legend,
    panels,
    room_for,
)
from qbench.text.numbers import metric_title

LOG_FROM = 20.0  # a perplexity axis whose ends are this far apart is logarithmic
SMALL = 7.5  # points: a method's name below an axis
LETTER = 0.058  # inches of such a letter
MOST_NAMES = 120  # below an axis; of more every second is left out, or every third, ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawn:
    """A figure with its file name, its section, and its caption, which is also read aloud."""

    name: str
    section: str
    caption: str
    figure: Figure


def groups(comparison: Comparison) -> list[Callable[[], list[Drawn]]]:
    """What draws the figures that the records have something to show for, a few at a time."""
    makers = [
        (section, partial(make, comparison, lines))
        for section, make in (("damage", _damages), ("scores", _scores))
        for lines in _by_task(comparison)
        if not comparison.seeds  # their means are drawn, not each against the first
    ]
    for task in comparison.grid.tasks:
        own = [one for one in comparison.seeds if one.line in shown(comparison)]
        lines = [one for one in own if one.line.task == task]
        makers.append(("seeds", partial(seed_figures, comparison, lines)))
    makers.append(("distributions", partial(distribution_figures, comparison)))
    makers.append(("costs", partial(cost_figures, comparison)))
    return [partial(drawn, section, make) for section, make in makers]


def drawn(section: str, make: Callable[[], Iterator[Found]]) -> list[Drawn]:
    """What ``make`` draws, in the report's style."""
    with rc_context(RC):
        found = [
            Drawn(name=_file_name(name), section=section, caption=caption, figure=figure)
            for name, caption, figure in make()
        ]
        for one in found:
            fix_empty_labels(one.figure)
    return found


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")


def _by_task(comparison: Comparison) -> Iterator[list[Line]]:
    lines = shown(comparison)
    for task in comparison.grid.tasks:
        yield [line for line in lines if line.task == task]


def _scores(comparison: Comparison, lines: Sequence[Line]) -> Iterator[Found]:
    """Score against bits, method beside method, a panel for each metric."""
    metrics = list(dict.fromkeys(line.metric for line in lines if line.intervals))
    quantizers = list(dict.fromkeys(line.quantizer for line in lines if line.quantized))
    if not metrics or not quantizers:
        return
    figure, grid = panels(
        [1.7] * len(metrics), left=0.62, between=0.85, named=comparison.checkpoints
    )
    for (axes,), metric in zip(grid, metrics, strict=True):
        _score_panel(axes, comparison, [line for line in lines if line.metric == metric])
    legend(figure, *grid[:, 0])
    parts = any(line.precision.in_parts for line in lines)
    against = "precision (weights, activations, KV cache)" if parts else "the bits of a weight"
    caption = (
        f"{lines[0].label}: score against {against} for each method, with 95 % intervals. Dotted: "
        "unquantized."
    )
    yield f"scores-{lines[0].task}", caption, figure


def _score_panel(axes: Axes, comparison: Comparison, lines: Sequence[Line]) -> None:
    quantized = [line for line in lines if line.quantized]
    methods = list(dict.fromkeys(line.method for line in quantized))
    ordered = sorted(quantized, key=lambda line: (methods.index(line.method), line.precision.order))
    where = {
        line.quantizer: index + methods.index(line.method) * 0.6
        for index, line in enumerate(ordered)
    }
    values = []
    for index, checkpoint in enumerate(comparison.checkpoints):
        for method in methods:
            own = [line for line in ordered if line.method == method]
            values += _score_points(axes, comparison, own, where, index, checkpoint)
        for line in lines:
            score = line.entry(checkpoint).value
            if line.quantizer == comparison.unquantized and score is not None:
                score *= 100 if line.percent else 1
                axes.axhline(score, color=SERIES[index % len(SERIES)], linestyle=":", linewidth=1.2)
                values.append(score)
    _name_bits(axes, ordered, where)
    axes.set_title(_axis_title(lines[0]))
    if not lines[0].higher_is_better and values and max(values) > LOG_FROM * min(values) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def _score_points(
    axes: Axes,
    comparison: Comparison,
    lines: Sequence[Line],
    where: dict[str, float],
    index: int,
    checkpoint: str,
) -> list[float]:
    """One method's points of one checkpoint, joined; returns the values."""
    shift = 0.12 * (index - (len(comparison.checkpoints) - 1) / 2)
    x, y, below, above = [], [], [], []
    for line in lines:
        interval, value = line.intervals.get(checkpoint), line.entry(checkpoint).value
        if interval is not None and value is not None:
            scale = 100 if line.percent else 1
            x.append(where[line.quantizer] + shift)
            y.append(value * scale)
            below.append(max(0.0, (value - interval.low) * scale))
            above.append(max(0.0, (interval.high - value) * scale))
    if x:
        axes.errorbar(
            x, y, yerr=[below, above], color=SERIES[index % len(SERIES)], label=checkpoint,
            marker=MARKERS[index % len(MARKERS)], linestyle=DASHES[index % len(DASHES)],
            capsize=2.5, linewidth=1.2,
        )  # fmt: skip
    return y


def _name_bits(axes: Axes, lines: Sequence[Line], where: dict[str, float]) -> None:
    """Bits below each point, and the method below its bits."""
    short = [line.quantizer.removeprefix(f"{line.method}-").replace("bit", "") for line in lines]
    ticks = [where[line.quantizer] for line in lines]
    step = -(-len(lines) // MOST_NAMES)
    turned = {"rotation": 25, "ha": "right"} if max(map(len, short)) > 4 else {}
    axes.set_xticks(ticks[::step], short[::step], **turned)
    axes.set_xlim(-0.6, max(ticks) + 0.6)
    axes.grid(visible=False, axis="x")
    _name_methods(axes, lines, where, below=-0.3 if turned else -0.15)


def _name_methods(
    axes: Axes, lines: Sequence[Line], where: dict[str, float], *, below: float
) -> None:
    """In the middle of a method's points; a line lower where the one before reaches so far."""
    low, high = axes.get_xlim()
    letter = LETTER * (high - low) / axes.get_window_extent().width * axes.figure.dpi
    reached, lowest = low, 0
    for method in dict.fromkeys(line.method for line in lines):
        own = [where[line.quantizer] for line in lines if line.method == method]
        title = next(line.title for line in lines if line.method == method)
        words = wrap(title, max(8, 4 * len(own)), break_long_words=False)
        half = letter * max(map(len, words)) / 2
        middle = (own[0] + own[-1]) / 2
        lower = lowest if middle - half < reached else 0
        axes.annotate(
            "\n".join(words), (middle, below), xycoords=axes.get_xaxis_transform(),
            xytext=(0, -1.2 * SMALL * lower), textcoords="offset points",
            ha="center", va="top", fontsize=SMALL,
        )  # fmt: skip
        reached, lowest = middle + half, len(words) if not lower else 0


def _damages(comparison: Comparison, lines: Sequence[Line]) -> Iterator[Found]:
    """The difference of damages above the damages that it is of, a figure for each metric."""
    metrics = list(dict.fromkeys(line.metric for line in lines if line.damages))
    for metric in metrics:
        own = [line for line in lines if line.metric == metric and line.damages]
        labels = [line.quantizer for line in own]
        two = any(line.differences for line in own)
        figure, grid = panels(
            [rows.height(len(own))] * (2 if two else 1),
            left=room_for(labels),
            between=0.75,
            named=comparison.checkpoints,
        )
        if two:
            _effects(grid[0][0], comparison, own, "differences")
            grid[0][0].set_title("Difference of damages")
            grid[0][0].set_xlabel(rows.unit(own[0]))
        _effects(grid[-1][0], comparison, own, "damages")
        grid[-1][0].set_title("Damage")
        grid[-1][0].set_xlabel(rows.unit(own[0]))
        legend(figure, *grid[::-1, 0])
        above = (
            f"Above, damage minus {comparison.baseline}'s; below, damage by quantization "
            "(quantized minus unquantized)"
            if two
            else "Damage by quantization (quantized minus unquantized)"
        )
        caption = (
            f"{own[0].label}, {metric_title(metric)}. {above}, with 95 % intervals paired by "
            "document. Filled: significant at 5 % after Holm."
        )
        yield f"damage-{own[0].task}-{metric}", caption, figure


def _effects(axes: Axes, comparison: Comparison, lines: Sequence[Line], question: str) -> None:
    names = comparison.others if question == "differences" else comparison.checkpoints
    for index, checkpoint in enumerate(names):
        found = [
            _point(row, effect, percent=line.percent)
            for row, line in enumerate(lines)
            if (effect := getattr(line, question).get(checkpoint)) is not None
        ]
        colour = comparison.checkpoints.index(checkpoint)
        rows.draw(axes, found, index=index, many=len(names), label=checkpoint, colour=colour)
    axes.axvline(0, color=INK, linewidth=0.8)
    rows.finish(axes, [line.quantizer for line in lines])
    if lines[0].ratio:
        rows.show_powers(axes)


def _point(row: int, effect: Effect, *, percent: bool) -> rows.Point:
    scale = 100.0 if percent else 1.0
    interval = effect.interval
    return rows.Point(
        row=row,
        value=interval.estimate * scale,
        low=interval.low * scale,
        high=interval.high * scale,
        filled=effect.mark == "‡",
    )


def _axis_title(line: Line) -> str:
    return f"{metric_title(line.metric)}{' (%)' if line.percent else ''} " + (
        "↑" if line.higher_is_better else "↓"
    )
