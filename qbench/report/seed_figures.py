"""Figures over several trainings of each kind: their means with intervals, and each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from matplotlib.axes import Axes

from qbench.comparison.lines import Comparison, Line, SeedLine
from qbench.report import rows
from qbench.report.costs import Found
from qbench.report.style import INK, SERIES, legend, panels, room_for
from qbench.statistics import SeedEffect
from qbench.text import metric_title

TITLES = {
    "differences": "Difference of damages",
    "damages": "Damage",
    "deltas": "Difference of scores",
}
TOLD = {
    "differences": "{other}’s damage minus {base}’s",
    "damages": "quantized minus unquantized",
    "deltas": "{other}’s score minus {base}’s",
}


def seed_figures(comparison: Comparison, lines: Sequence[SeedLine]) -> Iterator[Found]:
    """Of the lines of one task, a figure for each metric: a panel a question, a row a quantizer."""
    for metric in dict.fromkeys(one.line.metric for one in lines):
        own = [one for one in lines if one.line.metric == metric]
        asked = {name: [one for one in own if getattr(one, name)] for name in TITLES}
        asked = {name: found for name, found in asked.items() if found}
        if asked:
            yield _figure(comparison, own[0].line, asked)


def _figure(comparison: Comparison, line: Line, asked: Mapping[str, Sequence[SeedLine]]) -> Found:
    groups = list(comparison.grid.replicates)
    labels = {name: [one.line.quantizer for one in found] for name, found in asked.items()}
    figure, grid = panels(
        [rows.height(len(found)) for found in asked.values()],
        left=room_for([label for found in labels.values() for label in found]),
        between=0.75,
        named=groups,
    )
    for (axes,), (name, found) in zip(grid, asked.items(), strict=True):
        shown = [group for group in groups if any(group in getattr(one, name) for one in found)]
        for index, group in enumerate(shown):
            effects = [getattr(one, name).get(group) for one in found]
            _draw(axes, effects, index, len(shown), group, groups.index(group), line)
        axes.axvline(0, color=INK, linewidth=0.8)
        rows.finish(axes, labels[name])
        if line.ratio:
            rows.show_powers(axes)
        axes.set_title(TITLES[name])
        axes.set_xlabel(rows.unit(line))
    by_name = dict(zip(asked, grid[:, 0], strict=True))
    legend(figure, *(by_name[name] for name in ("damages", *asked) if name in by_name))
    base, *others = groups
    told = ". ".join(
        f"{TITLES[name]}: {TOLD[name].format(other=', '.join(others), base=base)}" for name in asked
    )
    caption = (
        f"{line.label}, {metric_title(line.metric)}, over trainings of each kind. {told}. Markers "
        "with bars: means with 95 % intervals over documents and seeds, filled where significant "
        "at 5 % after Holm; strokes: each training or pair of trainings. Numbers: seeds.csv."
    )
    return f"seeds-{line.task}-{line.metric}", caption, figure


def _draw(
    axes: Axes,
    effects: Sequence[SeedEffect | None],
    index: int,
    many: int,
    group: str,
    colour: int,
    line: Line,
) -> None:
    scale = 100.0 if line.percent else 1.0
    points = [
        rows.Point(
            row=row,
            value=effect.estimate * scale,
            low=effect.low * scale,
            high=effect.high * scale,
            filled=effect.mark == "‡",
        )
        for row, effect in enumerate(effects)
        if effect is not None
    ]
    rows.draw(axes, points, index=index, many=many, label=group, colour=colour)
    for row, effect in enumerate(effects):
        if effect is not None and effect.paired and all(map(math.isfinite, effect.each)):
            axes.plot(
                [one * scale for one in effect.each],
                [row + rows.shift(index, many)] * len(effect.each),
                linestyle="none", marker="|", markersize=6, markeredgewidth=1.3,
                color=SERIES[colour % len(SERIES)], zorder=1,
            )  # fmt: skip
