"""The report's figures. Each function draws one from a Comparison and knows no file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from qbench.comparison.lines import Comparison, Line, redundant
from qbench.report.costs import Found, cost_figures, damage_figures
from qbench.report.style import DASHES, INK, MARKERS, RC, SERIES, fix_empty_labels, legend, panels
from qbench.text.numbers import metric_title

LOG_FROM = 20.0  # a perplexity axis whose ends are this far apart is logarithmic


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
        (section, partial(make, comparison, task, lines))
        for section, make in (("scores", _scores), ("damage", _forest))
        for task, lines in _by_task(comparison)
    ]
    makers.append(("distributions", partial(damage_figures, comparison)))
    makers.append(("costs", partial(cost_figures, comparison)))
    return [partial(_drawn, section, make) for section, make in makers]


def _drawn(section: str, make: Callable[[], Iterator[Found]]) -> list[Drawn]:
    with rc_context(RC):
        drawn = [
            Drawn(name=name, section=section, caption=caption, figure=figure)
            for name, caption, figure in make()
        ]
        for one in drawn:
            fix_empty_labels(one.figure)
    return drawn


def _by_task(comparison: Comparison) -> Iterator[tuple[str, list[Line]]]:
    for task in comparison.grid.tasks:
        yield (
            task,
            [
                line
                for line in comparison.lines
                if line.task == task and not redundant(line, comparison.lines)
            ],
        )


def _scores(
    comparison: Comparison, task: str, lines: Sequence[Line]
) -> Iterator[tuple[str, str, Figure]]:
    """Score against bits, a column of panels for each method (the paper's Figures 3 and 4)."""
    metrics = list(dict.fromkeys(line.metric for line in lines if line.intervals))
    methods = list(dict.fromkeys(line.method for line in lines if line.quantized))
    if not metrics or not methods:
        return
    figure, grid = panels(len(metrics), len(methods), panel=(2.2, 1.6), gap=(0.3, 0.2))
    for row, metric in zip(grid, metrics, strict=True):
        for axes, method in zip(row, methods, strict=True):
            own = [line for line in lines if line.metric == metric]
            _score_panel(axes, comparison, own, method)
            if row[0] is grid[0][0]:
                axes.set_title(next(line.title for line in lines if line.method == method))
            if row[0] is grid[-1][0]:
                axes.set_xlabel("bits")
        row[0].set_ylabel(_axis_title(own[0]))
    legend(figure, *grid[0])
    label = lines[0].label
    caption = (
        f"{label}: score against bits for each method, with 95 % intervals. Horizontal lines: "
        "unquantized."
    )
    yield f"scores-{task}", caption, figure


def _score_panel(axes: Axes, comparison: Comparison, lines: Sequence[Line], method: str) -> None:
    widths = sorted({line.bits for line in lines if line.method == method and line.bits})
    values = []
    for place, checkpoint in enumerate(comparison.checkpoints):
        colour = SERIES[place % len(SERIES)]
        points = []
        for line in lines:
            interval = line.intervals.get(checkpoint)
            if interval is None or line.entry(checkpoint).value is None:
                continue
            scale = 100 if line.percent else 1
            value = line.entry(checkpoint).value * scale
            if not line.quantized and line.quantizer == comparison.unquantized:
                axes.axhline(value, color=colour, linestyle=":", linewidth=1)
                values.append(value)
            elif line.method == method and line.bits:
                points.append(
                    (line.bits, value, value - interval.low * scale, interval.high * scale - value)
                )
        if points:
            x, y, low, high = zip(*sorted(points), strict=True)
            shift = 0.06 * (place - (len(comparison.checkpoints) - 1) / 2)
            x = [widths.index(bits) + shift for bits in x]
            errors = [list(map(_positive, side)) for side in (low, high)]
            axes.errorbar(
                x, y, yerr=errors, color=colour, marker=MARKERS[place % len(MARKERS)],
                linestyle=DASHES[place % len(DASHES)], capsize=2.5, linewidth=1.2,
                label=checkpoint,
            )  # fmt: skip
            values += y
    axes.set_xticks(range(len(widths)), [f"{bits:g}" for bits in widths])
    axes.set_xlim(-0.5, max(len(widths) - 0.5, 0.5))
    if lines and not lines[0].higher_is_better and values and max(values) > LOG_FROM * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def _forest(
    comparison: Comparison, task: str, lines: Sequence[Line]
) -> Iterator[tuple[str, str, Figure]]:
    """Damage of each checkpoint, and their difference, a row for each precision."""
    metrics = list(dict.fromkeys(line.metric for line in lines if line.damages))
    if not metrics:
        return
    two = any(line.differences for line in lines)
    rows = max(sum(line.metric == m and bool(line.damages) for line in lines) for m in metrics)
    figure, grid = panels(
        len(metrics),
        2 if two else 1,
        panel=(3.4, 0.3 + 0.24 * rows),
        left=1.1,
        gap=(0.6, 0.3),
    )
    for row, metric in zip(grid, metrics, strict=True):
        own = [line for line in lines if line.metric == metric and line.damages]
        for place, checkpoint in enumerate(comparison.checkpoints):
            _forest_points(
                row[0], own, "damages", checkpoint, place, len(comparison.checkpoints), checkpoint
            )
        row[0].set_title(f"Damage, {_effect_title(own[0])}")
        if two:
            for place, other in enumerate(comparison.others):
                name = f"{other} − {comparison.baseline}"
                _forest_points(
                    row[1], own, "differences", other, place + 1, len(comparison.others), name
                )
            row[1].set_title("Difference of damages")
        for axes in row:
            axes.axvline(0, color=INK, linewidth=0.8)
            axes.xaxis.set_major_locator(MaxNLocator(6))
            axes.grid(visible=False, axis="y")
        row[0].set_yticks(range(len(own)), [line.quantizer for line in own])
        row[0].set_ylim(len(own) - 0.4, -0.6)
    legend(figure, *grid[0])
    caption = (
        f"{lines[0].label}: damage by quantization (quantized minus unquantized), and the "
        f"difference of the checkpoints' damages, with 95 % intervals paired by document. Filled: "
        "significant at 5 % after Holm."
    )
    yield f"damage-{task}", caption, figure


def _forest_points(
    axes: Axes,
    lines: Sequence[Line],
    kind: str,
    checkpoint: str,
    place: int,
    many: int,
    label: str,
) -> None:
    colour = SERIES[place % len(SERIES)]
    shift = 0.0 if many == 1 else 0.3 * (place / (many - 1) - 0.5)
    if kind == "differences" and many == 1:
        colour = SERIES[2]
    points: dict[bool, list[tuple[float, float, float, float]]] = {True: [], False: []}
    for row, line in enumerate(lines):
        effect = getattr(line, kind).get(checkpoint)
        if effect is not None:
            interval = effect.interval
            scale = 100.0 if line.percent else 1.0
            value = interval.estimate * scale
            ends = value - interval.low * scale, interval.high * scale - value
            points[effect.mark == "‡"].append((value, row + shift, *map(_positive, ends)))
    for sure, found in points.items():
        if found:
            x, y, low, high = zip(*found, strict=True)
            axes.errorbar(
                x, y, xerr=[low, high], color=colour, marker=MARKERS[place % len(MARKERS)],
                linestyle="none", capsize=2, linewidth=1.1,
                markerfacecolor=colour if sure else "none", label=label,
            )  # fmt: skip


def _positive(length: float) -> float:
    return max(0.0, length)  # an end may pass the estimate by rounding


def _effect_title(line: Line) -> str:
    perplexity = any(effect.kind == "log ratio" for effect in line.damages.values())
    name = metric_title(line.metric)
    if perplexity:
        return f"{name} (ln ratio, less is better)"
    unit = "points" if line.percent else "units"
    return f"{name} ({unit}, {'more' if line.higher_is_better else 'less'} is better)"


def _axis_title(line: Line) -> str:
    return f"{metric_title(line.metric)}{' (%)' if line.percent else ''} " + (
        "↑" if line.higher_is_better else "↓"
    )
