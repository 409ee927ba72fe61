"""Panels with a row for each quantizer: a point a checkpoint, with its interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from qbench.comparison.lines import Line
from qbench.report.style import MARKERS, SERIES, cut
from qbench.text import metric_title

ROW = 0.25  # inches
# What an axis of logarithms may have ticks at: multiples of these; or these times powers of ten.
STEPS = tuple(base * 10.0**-power for power in range(1, 8) for base in (5, 2, 1))
LADDERS = ((1.0, 1.5, 2.0, 3.0, 5.0, 7.0), (1.0, 2.0, 3.0, 5.0, 7.0), (1.0, 2.0, 5.0), (1.0, 3.0))
POWERS = (1, 2, 3, 5, 10)  # every power of ten, every second, ...
FAR = 10.0  # ratios beyond have no even steps
MANY = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """``low`` and ``high`` are the interval's ends; both ``value`` where there is none."""

    row: int
    value: float
    low: float
    high: float
    filled: bool = True


def unit(line: Line) -> str:
    better = "more" if line.higher_is_better else "less"
    unit = "× (ratio)" if line.ratio else "points" if line.percent else "its own units"
    return f"{metric_title(line.metric)}: {unit}; {better} is better"


def height(rows: int) -> float:
    return 0.2 + ROW * rows


def shift(index: int, many: int) -> float:
    """Of the ``index``-th of ``many`` series within a row."""
    return 0.0 if many == 1 else 0.4 * (index / (many - 1) - 0.5)


def draw(
    axes: Axes, points: Sequence[Point], *, index: int, many: int, label: str, colour: int
) -> None:
    """The points of the ``index``-th of ``many`` series, beside each other in each row."""
    moved = shift(index, many)
    for filled in (True, False):
        found = [point for point in points if point.filled == filled]
        if found:
            ends = [
                [max(0.0, point.value - point.low) for point in found],
                [max(0.0, point.high - point.value) for point in found],
            ]
            axes.errorbar(
                [point.value for point in found],
                [point.row + moved for point in found],
                xerr=ends,
                color=SERIES[colour % len(SERIES)],
                marker=MARKERS[colour % len(MARKERS)],
                markerfacecolor=SERIES[colour % len(SERIES)] if filled else "none",
                linestyle="none",
                capsize=2,
                linewidth=1.1,
                label=label,
            )


def finish(axes: Axes, labels: Sequence[str], *, ticks: int = 5) -> None:
    """Names of the rows, first at the top."""
    axes.set_yticks(range(len(labels)), [cut(label) for label in labels])
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    if axes.get_xscale() == "linear":
        axes.xaxis.set_major_locator(MaxNLocator(ticks))


def show_powers(axes: Axes, *, most: int = 6) -> None:
    """Ticks of an axis of logarithms at round numbers, of which they are the logarithms."""
    low, high = axes.get_xlim()
    ticks = [math.log(one) for one in _round(low, high, most)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _written(math.exp(value))))
    axes.xaxis.set_minor_locator(NullLocator())


def _round(low: float, high: float, most: int) -> list[float]:
    """Round numbers whose logarithms lie from ``low`` to ``high``: of the sets that belong
    together, each with 1 in it, the one with the most that stand apart, at most ``most``; of equal
    ones that which reaches farthest."""
    apart = (high - low) / (most + 1)
    best: list[float] = []
    for ticks in _sets(low, high):
        found = [one for one in ticks if low <= math.log(one) <= high]
        gaps = (math.log(b / a) for a, b in pairwise(found))
        if len(found) <= most and min(gaps, default=apart) >= apart:
            best = max(best, found, key=_reach)
    return best or [1.0]


def _reach(ticks: Sequence[float]) -> tuple[int, float]:
    return len(ticks), ticks[-1] / ticks[0] if ticks else 0.0


def _sets(low: float, high: float) -> Iterator[list[float]]:
    """Those of the most even steps first."""
    first, last = math.exp(low), math.exp(min(high, math.log(FAR)))
    for step in STEPS if high < math.log(FAR) else ():
        if (last - first) / step < MANY:
            several = range(max(1, math.ceil(first / step)), int(last / step) + 1)
            yield [round(many * step, 12) for many in several]
    powers = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    for ladder in LADDERS:
        yield [factor * 10.0**power for power in powers for factor in ladder]
    for every in POWERS:
        yield [10.0**power for power in powers if power % every == 0]


def _written(number: float) -> str:
    """Plainly, from 0.0001 to 1,000,000."""
    return f"{number:.6g}".replace("e-0", "e−").replace("e-", "e−").replace("e+0", "e+")
