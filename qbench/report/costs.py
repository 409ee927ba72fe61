"""Figures of what quantization costs and saves: divergence, flips, size, time, memory."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qbench.comparison.lines import Comparison, judge
from qbench.record import Damage, Flips, Record, TaskDamage
from qbench.report.style import HATCHES, MARKERS, SERIES, legend, panels

Found = tuple[str, str, Figure]
Box = tuple[float, float, float, float]  # left, bottom, right, top
STAGES = ("load", "quantize", "audit", "evaluate")
DTYPE_BITS = {"bfloat16": 16.0, "float16": 16.0, "float32": 32.0}


def sound(comparison: Comparison) -> list[Record]:
    """Records with scores that may be shown, in the grid's order."""
    found = (comparison.records.get(cell.cell) for cell in comparison.grid.cells)
    return [record for record in found if judge(record)[0] == "ok"]


def _damage(record: Record) -> dict[str, TaskDamage]:
    """By task; empty where none was measured."""
    return record.damage.tasks if isinstance(record.damage, Damage) else {}


def damage_figures(comparison: Comparison) -> Iterator[Found]:
    """KL divergence and flips, where records have measured them."""
    records = [record for record in sound(comparison) if _damage(record)]
    labels = list(dict.fromkeys(record.quantizer for record in records))
    tasks = [t for t in comparison.grid.tasks if any(t in _damage(r) for r in records)]
    divergence = {
        (r.checkpoint, r.quantizer, task): part.distributions.kl.mean
        for r in records
        for task, part in _damage(r).items()
        if part.distributions is not None
    }
    flips = {
        (r.checkpoint, r.quantizer, task): 100 * _flipped(next(iter(part.flips.values())))
        for r in records
        for task, part in _damage(r).items()
        if part.flips
    }
    if divergence:
        figure = _dots(comparison, divergence, labels, tasks, "mean KL (nats a token)", log=True)
        yield (
            "kl",
            "Kullback–Leibler divergence of the quantized from the unquantized next-token "
            "distribution, mean over scored tokens. Less is closer.",
            figure,
        )
    if flips:
        figure = _dots(comparison, flips, labels, tasks, "answers changed (%)", log=False)
        yield (
            "flips",
            "Flips: answers that quantization turned from right to wrong or from wrong to right, "
            "in per cent of the documents. Equal accuracy can hide many.",
            figure,
        )


def cost_figures(comparison: Comparison) -> Iterator[Found]:
    """Size against accuracy; time and memory."""
    for found in (_size(comparison), _stages(comparison)):
        if found is not None:
            yield found


def _size(comparison: Comparison) -> Found | None:
    """Mean accuracy over tasks against bits a weight as stored."""
    points: dict[str, list[tuple[float, float, str]]] = {}
    tasks: set[tuple[str, ...]] = set()
    for record in sound(comparison):
        bits, accuracy = bits_per_weight(record), _accuracies(record)
        if bits and accuracy:
            tasks.add(tuple(accuracy))
            mean = 100 * fmean(accuracy.values())
            points.setdefault(record.checkpoint, []).append((bits, mean, record.quantizer))
    if not points or len(tasks) != 1:
        return None
    figure, grid = panels(1, 1, panel=(5.6, 3.2))
    axes = grid[0][0]
    found: list[tuple[float, float, str, int]] = []
    for place, checkpoint in enumerate(comparison.checkpoints):
        own = sorted(points.get(checkpoint, []))
        if own:
            x, y, _ = zip(*own, strict=True)
            colour = SERIES[place % len(SERIES)]
            axes.plot(
                x, y, linestyle="none", marker=MARKERS[place % len(MARKERS)], color=colour,
                label=checkpoint,
            )  # fmt: skip
            found += [(*one, place) for one in _merged(own)]
    axes.set_xscale("log", base=2)
    axes.set_xticks([2, 3, 4, 8, 16, 32], ["2", "3", "4", "8", "16", "32"])
    axes.set_xlabel("bits a weight as stored, scales and zeros counted")
    axes.set_ylabel("mean accuracy (%)")
    axes.margins(x=0.1, y=0.14)
    label_points(axes, found, [point[:2] for own in points.values() for point in own])
    legend(figure, axes)
    shown = ", ".join(next(iter(tasks)))
    return (
        "size",
        f"Size against accuracy: the mean over {shown} against what a quantized weight takes on "
        "disk, as the audit measured it.",
        figure,
    )


def _stages(comparison: Comparison) -> Found | None:
    """Seconds by stage, and the largest memory of any stage."""
    records = [record for record in sound(comparison) if record.stages]
    if not records:
        return None
    figure, grid = panels(1, 2, panel=(3.3, 0.3 + 0.24 * len(records)), left=1.5, widths=(2.0, 1.0))
    time, memory = grid[0]
    names = [record.cell for record in records]
    start = [0.0] * len(records)
    for place, stage in enumerate(STAGES):
        seconds = [
            sum(step.seconds for step in record.stages if step.name == stage) for record in records
        ]
        time.barh(
            names, seconds, left=start, color=SERIES[place], hatch=HATCHES[place], label=stage,
            height=0.7,
        )  # fmt: skip
        start = [before + more for before, more in zip(start, seconds, strict=True)]
    memory.barh(
        names,
        [max(step.peak_memory_gib for step in record.stages) for record in records],
        color=SERIES[4],
        height=0.7,
    )
    time.set_ylim(len(records) - 0.4, -0.6)
    time.set_xlabel("seconds")
    memory.set_xlabel("peak memory (GiB)")
    for axes in (time, memory):
        axes.grid(visible=False, axis="y")
    legend(figure, time)
    return "stages", "Time by stage, and peak memory of the largest, for each cell.", figure


def _merged(points: list[tuple[float, float, str]]) -> Iterator[tuple[float, float, str]]:
    """Labels of neighbours as one, each name on a line, so that none covers another."""
    spread = max(value for _, value, _ in points) - min(value for _, value, _ in points)
    left = sorted(points)
    while left:
        bits, value, _ = left[0]
        near = [
            point
            for point in left
            if point[0] < bits * 1.25 and abs(point[1] - value) <= 0.08 * spread
        ]
        left = [point for point in left if point not in near]
        names = [name for _, _, name in sorted(near, key=lambda point: -point[1])]
        yield near[0][0], fmean(point[1] for point in near), "\n".join(names)


def label_points(
    axes: Axes,
    labels: list[tuple[float, float, str, int]],
    points: list[tuple[float, float]],
) -> None:
    """Name the points, the first checkpoint's below and others' above, each so far from its point
    that it covers neither another point nor another name."""
    axes.autoscale_view()
    scale = 72 / axes.figure.dpi  # lengths below are in points (1/72 inch)

    def place_of(bits: float, value: float) -> tuple[float, float]:
        x, y = axes.transData.transform((bits, value)) * scale
        return float(x), float(y)

    marker, size, line = 2.5, 7.0, 8.6
    taken = [
        (x - marker, y - marker, x + marker, y + marker)
        for x, y in (place_of(*point) for point in points)
    ]
    for bits, value, text, checkpoint in labels:
        x, y = place_of(bits, value)
        half = 0.31 * size * max(map(len, text.split("\n")))  # of the width, about
        tall = line * (text.count("\n") + 1)
        way = 1 if checkpoint % 2 else -1
        for step in range(40):
            offset = way * (5 + step * line / 4)
            low = y + offset - (tall if way < 0 else 0)
            box = (x - half, low, x + half, low + tall)
            if not any(_cover(box, other) for other in taken):
                break
        taken.append(box)
        axes.annotate(
            text, (bits, value), textcoords="offset points", fontsize=size,
            color=SERIES[checkpoint % len(SERIES)], xytext=(0, offset), ha="center",
            va="bottom" if way > 0 else "top",
        )  # fmt: skip


def _cover(box: Box, other: Box) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


def bits_per_weight(record: Record) -> float | None:
    """As stored; an unquantized cell's is that of its dtype."""
    if record.quantized:
        return record.audit.bits_per_weight if record.audit else None
    settings = record.key_parts.get("quantizer", {})
    dtype = settings.get("dtype") if isinstance(settings, dict) else None
    known = {"bf16": 16.0, "fp16": 16.0, "fp32": 32.0}
    return DTYPE_BITS.get(str(dtype), known.get(record.quantizer))


def _accuracies(record: Record) -> dict[str, float]:
    """Each task's accuracy, the normalized one where there are two."""
    found: dict[str, float] = {}
    for score in record.scores:
        if score.metric == "acc_norm" or (score.metric == "acc" and score.task not in found):
            found[score.task] = score.value
    return found


def _flipped(counts: Flips) -> float:
    return (counts.right_to_wrong + counts.wrong_to_right) / max(1, counts.documents)


def _dots(
    comparison: Comparison,
    values: dict[tuple[str, str, str], float],
    labels: list[str],
    tasks: list[str],
    title: str,
    *,
    log: bool,
) -> Figure:
    tasks = [task for task in tasks if any(key[2] == task for key in values)]
    labels = [label for label in labels if any(key[1] == label for key in values)]
    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)
    figure, grid = panels(
        rows, columns, panel=(2.2, 0.3 + 0.22 * len(labels)), left=1.1, gap=(0.5, 0.2)
    )
    flat = grid.ravel()
    for axes, task in zip(flat, tasks, strict=False):
        _dot_panel(axes, comparison, values, labels, task, log=log)
    for axes in flat[len(tasks) :]:
        axes.remove()
    figure.supxlabel(title, fontsize=9, y=0.06 / figure.get_figheight(), va="bottom")
    legend(figure, *flat[: len(tasks)])
    return figure


def _dot_panel(
    axes: Axes,
    comparison: Comparison,
    values: dict[tuple[str, str, str], float],
    labels: list[str],
    task: str,
    *,
    log: bool,
) -> None:
    for place, checkpoint in enumerate(comparison.checkpoints):
        points = [
            (values[checkpoint, label, task], row)
            for row, label in enumerate(labels)
            if (checkpoint, label, task) in values
        ]
        x = [max(value, 1e-6) if log else value for value, _ in points]
        axes.plot(
            x, [row + 0.12 * (place * 2 - 1) for _, row in points], linestyle="none",
            marker=MARKERS[place % len(MARKERS)], color=SERIES[place % len(SERIES)],
            label=checkpoint,
        )  # fmt: skip
    axes.set_title(task)
    if log:
        axes.set_xscale("log")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
