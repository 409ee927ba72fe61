"""The report's figures of scores and damage. Each function draws one and knows no file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qbench.comparison.lines import Comparison, Line
from qbench.report import rows
from qbench.report.costs import Found, cost_figures, distribution_figures
from qbench.report.effects import shown
from qbench.report.score_figures import score_figures
from qbench.report.seed_figures import seed_figures
from qbench.report.style import (
    INK,
    RC,
    fix_empty_labels,
    legend,
    panels,
    room_for,
)
from qbench.statistics import Effect
from qbench.text import metric_title


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
        for section, make in (("damage", _damages), ("scores", score_figures))
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
