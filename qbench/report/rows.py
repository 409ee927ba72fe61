"""Panels with a row for each quantizer: a point a checkpoint, with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from qbench.comparison.lines import Line
from qbench.report.style import MARKERS, SERIES, cut
from qbench.text.numbers import metric_title

ROW = 0.25  # inches
# What an axis of logarithms may have ticks at: these times powers of ten, and close to 1.
FAR = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
NEAR = (0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998,
        1.002, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2, 1.3)  # fmt: skip


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
    axes.xaxis.set_major_locator(FixedLocator([math.log(one) for one in _round(low, high, most)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{math.exp(value):.4g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def _round(low: float, high: float, most: int) -> list[float]:
    """Round numbers whose logarithms lie from ``low`` to ``high``, at most ``most`` and 1."""
    powers = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    ladders = (
        [*NEAR, *(f * 10.0**p for p in powers for f in FAR)],
        [f * 10.0**p for p in powers for f in (1.0, 2.0, 5.0)],
        [10.0**p for p in powers],
        [10.0**p for p in powers if p % 3 == 0],
    )
    apart = (high - low) / most
    for ladder in ladders:
        kept = [1.0]  # of ratios: no effect
        for one in sorted({*ladder} - {1.0}, key=_digits):
            inside = low <= math.log(one) <= high
            if inside and all(abs(math.log(one / other)) >= apart for other in kept):
                kept.append(one)
        if len(kept) > 2 or ladder is ladders[-1]:
            break
    return sorted(kept)


def _digits(number: float) -> int:
    """How many digits it takes to write."""
    return len(f"{number:.4g}".replace(".", "").strip("0"))
