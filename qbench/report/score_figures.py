"""Figures of scores against precision, method beside method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from qbench.comparison.lines import Comparison, Line
from qbench.report.costs import Found
from qbench.report.style import DASHES, MARKERS, SERIES, WIDTH, cut, legend, panels
from qbench.text import metric_title

LOG_FROM = 20.0  # a perplexity axis whose ends are this far apart is logarithmic
LEFT, RIGHT = 0.62, 0.14  # inches beside a panel
BROAD = WIDTH - LEFT - RIGHT
SHORT = 4  # letters of labels that lie; longer ones stand
LETTER, SMALL_LETTER = 0.072, 0.058  # inches, of a label and of a method's name
STANDING = 0.14  # inches that a label which stands takes, and its neighbour leaves
SMALL = 7.5  # points of a method's name
LINE = 1.25 * SMALL / 72  # inches
TITLE = 0.36  # inches of the title of the panel below


@dataclass(frozen=True, kw_only=True, slots=True)
class Name:
    """A method's below its points: at ``middle``, ``lower`` lines below the first."""

    lines: tuple[str, ...]
    middle: float
    lower: int


def score_figures(comparison: Comparison, lines: Sequence[Line]) -> Iterator[Found]:
    """Score against bits, method beside method, a panel for each metric."""
    metrics = list(dict.fromkeys(line.metric for line in lines if line.intervals))
    quantized = [line for line in lines if line.quantized]
    if not metrics or not quantized:
        return
    by_metric = {metric: [line for line in lines if line.metric == metric] for metric in metrics}
    below = max(_below(_ordered(own)) for own in by_metric.values())
    figure, grid = panels(
        [1.7] * len(metrics), left=LEFT, right=RIGHT, between=below + TITLE, bottom=below + 0.1,
        named=comparison.checkpoints,
    )  # fmt: skip
    for (axes,), own in zip(grid, by_metric.values(), strict=True):
        _panel(axes, comparison, own)
    legend(figure, *grid[:, 0])
    parts = any(line.precision.in_parts for line in lines)
    against = "precision (weights, activations, KV cache)" if parts else "the bits of a weight"
    caption = (
        f"{lines[0].label}: score against {against} for each method, with 95 % intervals. Dotted: "
        "unquantized."
    )
    yield f"scores-{lines[0].task}", caption, figure


def _ordered(lines: Sequence[Line]) -> list[Line]:
    """Quantized ones, method after method, each by its bits."""
    quantized = [line for line in lines if line.quantized]
    methods = list(dict.fromkeys(line.method for line in quantized))
    return sorted(quantized, key=lambda line: (methods.index(line.method), line.precision.order))


def _places(ordered: Sequence[Line]) -> dict[str, float]:
    """Quantizer → where it stands; methods are a little apart."""
    methods = list(dict.fromkeys(line.method for line in ordered))
    return {
        line.quantizer: index + methods.index(line.method) * 0.6
        for index, line in enumerate(ordered)
    }


def _panel(axes: Axes, comparison: Comparison, lines: Sequence[Line]) -> None:
    ordered = _ordered(lines)
    where = _places(ordered)
    values = []
    for index, checkpoint in enumerate(comparison.checkpoints):
        for method in dict.fromkeys(line.method for line in ordered):
            own = [line for line in ordered if line.method == method]
            values += _points(axes, comparison, own, where, index, checkpoint)
        for line in lines:
            score = line.entry(checkpoint).value
            if line.quantizer == comparison.unquantized and score is not None:
                score *= 100 if line.percent else 1
                axes.axhline(score, color=SERIES[index % len(SERIES)], linestyle=":", linewidth=1.2)
                values.append(score)
    name_points(axes, ordered)
    axes.set_title(_title(lines[0]))
    if not lines[0].higher_is_better and values and max(values) > LOG_FROM * min(values) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def _points(
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


def name_points(axes: Axes, ordered: Sequence[Line]) -> None:
    """Bits below each point, and the method below its bits."""
    where, short = _places(ordered), [_short(line) for line in ordered]
    ticks = [where[line.quantizer] for line in ordered]
    stands = _stand(ordered)
    apart = STANDING if stands else LETTER * (max(map(len, short)) + 1)
    step = max(1, -int(-len(ordered) * apart // BROAD))  # of more every second, every third, ...
    axes.set_xticks(ticks[::step], short[::step], rotation=90 if stands else 0)
    axes.set_xlim(-0.6, max(ticks) + 0.6)
    axes.grid(visible=False, axis="x")
    for name in _names(ordered):
        axes.annotate(
            "\n".join(name.lines), (name.middle, 0), xycoords=axes.get_xaxis_transform(),
            xytext=(0, -72 * (_labels(ordered) + name.lower * LINE)), textcoords="offset points",
            ha="center", va="top", fontsize=SMALL,
        )  # fmt: skip


def _short(line: Line) -> str:
    return cut(line.quantizer.removeprefix(f"{line.method}-").replace("bit", ""))


def _stand(ordered: Sequence[Line]) -> bool:
    return max(len(_short(line)) for line in ordered) > SHORT


def _labels(ordered: Sequence[Line]) -> float:
    """Inches that the labels below an axis take."""
    return 0.12 + LETTER * max(len(_short(line)) for line in ordered) if _stand(ordered) else 0.24


def _below(ordered: Sequence[Line]) -> float:
    """Inches that everything below an axis takes."""
    deepest = max(name.lower + len(name.lines) for name in _names(ordered))
    return _labels(ordered) + deepest * LINE


def _names(ordered: Sequence[Line]) -> list[Name]:
    """In the middle of a method's points, or as far to the right as there is room; below those
    before that it would overlap."""
    where = _places(ordered)
    inch = (max(where.values()) + 1.2) / BROAD
    end = max(where.values()) + 0.6 + RIGHT * inch
    found: list[Name] = []
    taken: list[tuple[float, int, int]] = []  # right end, first line, line after the last
    for method in dict.fromkeys(line.method for line in ordered):
        own = [line for line in ordered if line.method == method]
        places = [where[line.quantizer] for line in own]
        lines = tuple(wrap(own[0].title, max(8, 4 * len(own)), break_long_words=False))
        half = SMALL_LETTER * inch * max(map(len, lines)) / 2
        middle = min((places[0] + places[-1]) / 2, end - half)
        beside = [(first, last) for right, first, last in taken if right > middle - half]
        above = all(first >= len(lines) for first, _ in beside)
        lower = 0 if above else max(last for _, last in beside)
        found.append(Name(lines=lines, middle=middle, lower=lower))
        taken.append((middle + half, lower, lower + len(lines)))
    return found


def _title(line: Line) -> str:
    return f"{metric_title(line.metric)}{' (%)' if line.percent else ''} " + (
        "↑" if line.higher_is_better else "↓"
    )
