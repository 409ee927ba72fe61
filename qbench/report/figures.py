"""Figures of scores, damage, divergence, costs, seeds: a function each that knows no file."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from textwrap import wrap

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from qbench.comparison.lines import Comparison, Line, SeedLine
from qbench.files import write_atomically
from qbench.records import Damage, Flips, Record, TaskDamage
from qbench.report.style import (
    DASHES,
    HATCHES,
    INK,
    MARKERS,
    RC,
    SERIES,
    WIDTH,
    cut,
    fix_empty_labels,
    legend,
    panels,
    room_for,
    svg,
)
from qbench.report.tables import STAGES, shown, sound
from qbench.statistics import Effect, SeedEffect
from qbench.tables.table import bits_per_weight
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


Found = tuple[str, str, Figure]
NORMAL = 1.96  # standard errors either side: 95 %
KL = (
    "Kullback–Leibler divergence of the quantized from the unquantized model's next-token "
    "distribution over the whole vocabulary, mean over scored tokens"
)
FLIPS = (
    "answers that quantization turned from right to wrong or from wrong to right, in per cent of "
    "the documents: equal accuracy can hide many"
)
ZERO = 1e-6  # nats: where a divergence of 0 stands on a logarithmic axis


def _damage(record: Record) -> Mapping[str, TaskDamage]:
    """By task; empty where none was measured."""
    return record.damage.tasks if isinstance(record.damage, Damage) else {}


def distribution_figures(comparison: Comparison) -> Iterator[Found]:
    """KL divergence and flips of each task, where records have measured them."""
    records = [record for record in sound(comparison) if _damage(record)]
    labels = list(dict.fromkeys(record.quantizer for record in records))
    for task in comparison.grid.tasks:
        parts = {
            (record.checkpoint, record.quantizer): part
            for record in records
            if (part := _damage(record).get(task)) is not None
        }
        divergence = {
            cell: max(part.distributions.kl.mean, ZERO)
            for cell, part in parts.items()
            if part.distributions is not None
        }
        flips = {
            cell: 100 * _flipped(next(iter(part.flips.values())))
            for cell, part in parts.items()
            if part.flips
        }
        shown = [
            (values, title, log)
            for values, title, log in (
                (divergence, "Mean KL divergence (nats a token)", True),
                (flips, "Answers changed (%)", False),
            )
            if values
        ]
        if not shown:
            continue
        heights = [height(len(labels))] * len(shown)
        figure, grid = panels(heights, left=room_for(labels), named=list(comparison.groups))
        for (axes,), (values, title, log) in zip(grid, shown, strict=True):
            _measured(axes, comparison, values, labels, log=log)
            axes.set_title(title)
        legend(figure, *grid[:, 0])
        told = [words for values, words in ((divergence, KL), (flips, FLIPS)) if values]
        yield f"distributions-{task}", f"{task}: {'; and '.join(told)}.", figure


def _measured(
    axes: Axes,
    comparison: Comparison,
    values: Mapping[tuple[str, str], float],
    labels: Sequence[str],
    *,
    log: bool,
) -> None:
    for index, checkpoint in enumerate(comparison.checkpoints):
        points = []
        for row, label in enumerate(labels):
            value = values.get((checkpoint, label))
            if value is not None:
                value = math.log(value) if log else value
                points.append(Point(row=row, value=value, low=value, high=value))
        many = len(comparison.checkpoints)
        _draw(axes, comparison, points, checkpoint, index=index, many=many)
    finish(axes, labels)
    if log:
        show_powers(axes)
    else:
        axes.set_xlim(left=-0.03 * axes.get_xlim()[1])  # room for the half of a marker at 0


def _draw(
    axes: Axes,
    comparison: Comparison,
    points: Sequence[Point],
    checkpoint: str,
    *,
    index: int,
    many: int,
) -> None:
    """Of one checkpoint; several trainings of one kind look alike."""
    group = comparison.group(checkpoint)
    colour = list(comparison.groups).index(group)
    draw(axes, points, index=index, many=many, label=group, colour=colour)


def cost_figures(comparison: Comparison) -> Iterator[Found]:
    """Size against accuracy; time and memory."""
    for found in (_size(comparison), _stages(comparison)):
        if found is not None:
            yield found


def _size(comparison: Comparison) -> Found | None:
    """Mean accuracy over tasks, quantizers ordered by bits a weight as stored."""
    tasks = _accuracies(comparison)
    sizes: dict[str, float] = {}
    for record in sound(comparison):
        if bits := bits_per_weight(record):
            sizes[record.quantizer] = max(bits, sizes.get(record.quantizer, 0.0))
    labels = sorted(sizes, key=lambda label: sizes[label])
    series = {
        checkpoint: [
            point
            for row, label in enumerate(labels)
            if (point := _mean(row, [lines.get((label, checkpoint)) for lines in tasks.values()]))
        ]
        for checkpoint in comparison.checkpoints
    }
    if not tasks or not any(series.values()):
        return None
    figure, grid = panels(
        [height(len(labels))],
        left=room_for(labels),
        columns=(1.0, 2.2),
        share=True,
        named=list(comparison.groups),
    )
    size, accuracy = grid[0]
    size.barh(range(len(labels)), [sizes[label] for label in labels], color=SERIES[4], height=0.6)
    for row, label in enumerate(labels):
        size.annotate(
            f"{sizes[label]:.2f}", (sizes[label], row), textcoords="offset points",
            xytext=(3, 0), va="center", fontsize=7, color=INK,
        )  # fmt: skip
    size.set_xlim(0, 1.45 * max(sizes.values()))
    size.set_xlabel("bits a weight")
    for index, (checkpoint, points) in enumerate(series.items()):
        many = len(comparison.checkpoints)
        _draw(accuracy, comparison, points, checkpoint, index=index, many=many)
    accuracy.set_xlabel("mean accuracy (%)")
    accuracy.tick_params(labelleft=False)
    finish(accuracy, labels)
    size.set_yticks(range(len(labels)), map(cut, labels))
    size.grid(visible=False)
    size.xaxis.set_major_locator(NullLocator())
    legend(figure, accuracy)
    caption = (
        f"Size against accuracy: the mean over {', '.join(tasks)} with 95 % intervals (of the "
        "documents; tasks are fixed), against what a quantized weight takes on disk, scales and "
        "zeros counted, as the audit measured it."
    )
    return "size", caption, figure


Estimate = tuple[float, float]  # value and standard error, in per cent


def _accuracies(comparison: Comparison) -> dict[str, dict[tuple[str, str], Estimate]]:
    """Task → (quantizer, checkpoint) → its accuracy, the normalized one where there are two."""
    found: dict[str, dict[tuple[str, str], Estimate]] = {}
    for metric in ("acc", "acc_norm"):
        fresh: dict[str, dict[tuple[str, str], Estimate]] = {}
        for line in comparison.lines:
            if line.metric == metric:
                for checkpoint, interval in line.intervals.items():
                    own = fresh.setdefault(line.label, {})
                    estimate = 100 * interval.estimate, 100 * interval.stderr
                    own[line.quantizer, checkpoint] = estimate
        found |= fresh
    return found


def _mean(row: int, estimates: Sequence[Estimate | None]) -> Point | None:
    """Of independent tasks; None where one of them has no score."""
    if None in estimates or not estimates:
        return None
    mean = sum(value for value, _ in estimates) / len(estimates)
    reach = NORMAL * math.sqrt(sum(error**2 for _, error in estimates)) / len(estimates)
    return Point(row=row, value=mean, low=mean - reach, high=mean + reach)


def _stages(comparison: Comparison) -> Found | None:
    """Seconds by stage, and the largest memory of any stage."""
    records = [record for record in sound(comparison) if record.stages]
    if not records:
        return None
    names = [cut(record.cell) for record in records]
    figure, grid = panels(
        [height(len(names))],
        left=room_for(names),
        columns=(2.0, 1.0),
        share=True,
        named=STAGES,
    )
    time, memory = grid[0]
    positions = range(len(names))
    start = [0.0] * len(records)
    for index, stage in enumerate(STAGES):
        seconds = [
            sum(step.seconds for step in record.stages if step.name == stage) for record in records
        ]
        time.barh(
            positions, seconds, left=start, color=SERIES[index], hatch=HATCHES[index], label=stage,
            height=0.7,
        )  # fmt: skip
        start = [before + more for before, more in zip(start, seconds, strict=True)]
    peaks = [max(step.peak_memory_gib for step in record.stages) for record in records]
    memory.barh(positions, peaks, color=SERIES[4], height=0.7)
    memory.tick_params(labelleft=False)
    time.set_yticks(positions, names)
    time.set_ylim(len(records) - 0.4, -0.6)
    time.set_xlabel("seconds")
    memory.set_xlabel("memory (GiB)")
    for axes, ticks in ((time, 4), (memory, 2)):
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(ticks))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    legend(figure, time)
    return "stages", "Time by stage, and peak memory of the largest, for each cell.", figure


def _flipped(counts: Flips) -> float:
    return (counts.right_to_wrong + counts.wrong_to_right) / max(1, counts.documents)


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
        [height(len(found)) for found in asked.values()],
        left=room_for([label for found in labels.values() for label in found]),
        between=0.75,
        named=groups,
    )
    for (axes,), (name, found) in zip(grid, asked.items(), strict=True):
        shown = [group for group in groups if any(group in getattr(one, name) for one in found)]
        for index, group in enumerate(shown):
            effects = [getattr(one, name).get(group) for one in found]
            _draw_seed_figures(axes, effects, index, len(shown), group, groups.index(group), line)
        axes.axvline(0, color=INK, linewidth=0.8)
        finish(axes, labels[name])
        if line.ratio:
            show_powers(axes)
        axes.set_title(TITLES[name])
        axes.set_xlabel(unit(line))
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


def _draw_seed_figures(
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
        Point(
            row=row,
            value=effect.estimate * scale,
            low=effect.low * scale,
            high=effect.high * scale,
            filled=effect.mark == "‡",
        )
        for row, effect in enumerate(effects)
        if effect is not None
    ]
    draw(axes, points, index=index, many=many, label=group, colour=colour)
    for row, effect in enumerate(effects):
        if effect is not None and effect.paired and all(map(math.isfinite, effect.each)):
            axes.plot(
                [one * scale for one in effect.each],
                [row + shift(index, many)] * len(effect.each),
                linestyle="none", marker="|", markersize=6, markeredgewidth=1.3,
                color=SERIES[colour % len(SERIES)], zorder=1,
            )  # fmt: skip


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
            [height(len(own))] * (2 if two else 1),
            left=room_for(labels),
            between=0.75,
            named=comparison.checkpoints,
        )
        if two:
            _effects(grid[0][0], comparison, own, "differences")
            grid[0][0].set_title("Difference of damages")
            grid[0][0].set_xlabel(unit(own[0]))
        _effects(grid[-1][0], comparison, own, "damages")
        grid[-1][0].set_title("Damage")
        grid[-1][0].set_xlabel(unit(own[0]))
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
        draw(axes, found, index=index, many=len(names), label=checkpoint, colour=colour)
    axes.axvline(0, color=INK, linewidth=0.8)
    finish(axes, [line.quantizer for line in lines])
    if lines[0].ratio:
        show_powers(axes)


def _point(row: int, effect: Effect, *, percent: bool) -> Point:
    scale = 100.0 if percent else 1.0
    interval = effect.interval
    return Point(
        row=row,
        value=interval.estimate * scale,
        low=interval.low * scale,
        high=interval.high * scale,
        filled=effect.mark == "‡",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plate:
    """A figure that was drawn, and the files that it was written to."""

    name: str
    section: str
    caption: str
    svg: str = field(repr=False)
    paths: tuple[Path, ...]


def plates(
    makers: Iterable[Callable[[], list[Drawn]]], folder: Path, formats: Sequence[str]
) -> list[Plate]:
    """Draw the figures and write ``folder/<name>.<format>``."""
    found = []
    for draw in makers:
        for one in draw():
            text = svg(one.figure, name=one.name)
            found.append(
                Plate(
                    name=one.name,
                    section=one.section,
                    caption=one.caption,
                    svg=text,
                    paths=tuple(_write(one, text, folder, format) for format in formats),
                )
            )
    return found


def _write(one: Drawn, text: str, folder: Path, format: str) -> Path:
    path = folder / f"{one.name}.{format}"
    if format == "svg":
        write_atomically(path, text.encode())
    else:
        payload = io.BytesIO()
        metadata = {"CreationDate": None} if format == "pdf" else None
        one.figure.savefig(payload, format=format, metadata=metadata)
        write_atomically(path, payload.getvalue())
    return path
