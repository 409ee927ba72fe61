"""Figures of what quantization costs and saves: divergence, flips, size, time, memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from qbench.comparison.lines import Comparison, judge
from qbench.records import Damage, Flips, Record, TaskDamage
from qbench.report import rows
from qbench.report.style import HATCHES, INK, SERIES, cut, legend, panels, room_for

Found = tuple[str, str, Figure]
STAGES = ("load", "quantize", "audit", "evaluate")
DTYPE_BITS = {"bfloat16": 16.0, "float16": 16.0, "float32": 32.0}
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


def sound(comparison: Comparison) -> list[Record]:
    """Records with scores that may be shown, in the grid's order."""
    found = (comparison.records.get(cell.cell) for cell in comparison.grid.cells)
    return [record for record in found if judge(record)[0] == "ok"]


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
        heights = [rows.height(len(labels))] * len(shown)
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
                points.append(rows.Point(row=row, value=value, low=value, high=value))
        many = len(comparison.checkpoints)
        _draw(axes, comparison, points, checkpoint, index=index, many=many)
    rows.finish(axes, labels)
    if log:
        rows.show_powers(axes)
    else:
        axes.set_xlim(left=-0.03 * axes.get_xlim()[1])  # room for the half of a marker at 0


def _draw(
    axes: Axes,
    comparison: Comparison,
    points: Sequence[rows.Point],
    checkpoint: str,
    *,
    index: int,
    many: int,
) -> None:
    """Of one checkpoint; several trainings of one kind look alike."""
    group = comparison.group(checkpoint)
    colour = list(comparison.groups).index(group)
    rows.draw(axes, points, index=index, many=many, label=group, colour=colour)


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
        [rows.height(len(labels))],
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
    rows.finish(accuracy, labels)
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


def _mean(row: int, estimates: Sequence[Estimate | None]) -> rows.Point | None:
    """Of independent tasks; None where one of them has no score."""
    if None in estimates or not estimates:
        return None
    mean = sum(value for value, _ in estimates) / len(estimates)
    reach = NORMAL * math.sqrt(sum(error**2 for _, error in estimates)) / len(estimates)
    return rows.Point(row=row, value=mean, low=mean - reach, high=mean + reach)


def _stages(comparison: Comparison) -> Found | None:
    """Seconds by stage, and the largest memory of any stage."""
    records = [record for record in sound(comparison) if record.stages]
    if not records:
        return None
    names = [cut(record.cell) for record in records]
    figure, grid = panels(
        [rows.height(len(names))],
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


def bits_per_weight(record: Record) -> float | None:
    """As stored; an unquantized cell's is that of its dtype."""
    if record.quantized:
        return record.audit.bits_per_weight if record.audit else None
    settings = record.key_parts.get("quantizer", {})
    dtype = settings.get("dtype") if isinstance(settings, dict) else None
    known = {"bf16": 16.0, "fp16": 16.0, "fp32": 32.0}
    return DTYPE_BITS.get(str(dtype), known.get(record.quantizer))


def _flipped(counts: Flips) -> float:
    return (counts.right_to_wrong + counts.wrong_to_right) / max(1, counts.documents)
