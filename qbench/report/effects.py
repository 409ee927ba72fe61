"""Tables of scores, differences of damages and damages: points, ratios and other units apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from qbench.comparison.lines import Comparison, Line, redundant
from qbench.comparison.wording import RATIO_NOTE, arrow, detectable_text, effect_text, interval_text
from qbench.published import Printed, printed
from qbench.report.table import Cell, DataTable, build, p_value
from qbench.statistics import Effect
from qbench.store import KEY_DIGITS
from qbench.tables.beside import find_printed
from qbench.tables.layout import delta_text, entry_text, noise_notes
from qbench.text import MINUS, NO_VALUE, metric_title

NAMES = ["Task", "Metric", "Quantizer"]
MARKS = "‡ differs from 0 at 5 % after Holm's correction, † after Benjamini–Hochberg's only."
Kind = tuple[str, str, str]  # name, title, what the numbers are


def shown(comparison: Comparison) -> list[Line]:
    return [line for line in comparison.lines if not redundant(line, comparison.lines)]


def kinds(lines: Iterable[Line]) -> Iterator[tuple[Kind, list[Line]]]:
    """Lines whose effects have one unit, so that a column can be read and sorted as numbers."""
    groups: dict[Kind, list[Line]] = {}
    for line in lines:
        groups.setdefault(_kind(line), []).append(line)
    order = {"points": 0, "ratios": 1}
    yield from sorted(groups.items(), key=lambda item: order.get(item[0][0], 2))


def _kind(line: Line) -> Kind:
    if line.percent:
        return "points", "accuracies", "In percentage points."
    if line.ratio:
        return "ratios", "perplexities", RATIO_NOTE
    return line.metric, metric_title(line.metric), "In the metric's own units."


def scores(comparison: Comparison, published: str | None) -> Iterator[DataTable]:
    paper = printed(published) if published else {}
    head = [*NAMES, "Precision", *comparison.checkpoints]
    for other in comparison.others:
        head += [f"Δ {other}", f"95 % interval {other}", f"p (Holm) {other}"]
    head += [f"Δ printed ({published})"] if paper else []
    head.append("Documents")
    for (kind, title, unit), lines in kinds(shown(comparison)):
        rows = [_score_row(comparison, line, paper) for line in lines]
        asked = [effect for line in lines for effect in line.deltas.values()]
        told = [f"± is the standard error of one score. {_told(asked, unit)}".strip()]
        caption = " ".join(told + noise_notes(comparison))
        yield build(
            f"scores-{kind}", "scores", f"Scores: {title}", caption, head, rows, keys=len(NAMES)
        )


def _score_row(comparison: Comparison, line: Line, paper: Mapping[tuple, Printed]) -> list[Cell]:
    row = [*_names(line), _precision(line)]
    for entry in line.entries:
        title = entry.reason or f"record {entry.key[:KEY_DIGITS]}"
        row.append(Cell(text=entry_text(entry, line), sort=entry.value, title=title))
    for other in comparison.others:
        effect = line.deltas.get(other)
        delta = effect.difference if effect else line.delta(other)
        row.append(Cell(text=delta_text(comparison, line, other), sort=delta))
        row += [_interval(effect, line), p_value(effect.p_holm if effect else None)]
    if paper:
        found = find_printed(line, paper)
        delta = found.delta if found else None
        row.append(
            Cell(
                text=NO_VALUE if delta is None else f"{delta:+}".replace("-", MINUS),
                sort=None if delta is None else float(delta),
                title=found.source if found else "",
            )
        )
    documents = [e.documents for e in line.entries if e.documents is not None]
    row.append(Cell(text=str(min(documents, default=NO_VALUE)), sort=min(documents, default=None)))
    return row


def differences(comparison: Comparison) -> Iterator[DataTable]:
    """Softpick's damage minus softmax's: what the paper's claim is about."""
    several = len(comparison.others) > 1
    base = comparison.baseline
    head = [
        *NAMES,
        "Difference",
        "95 % interval",
        "p (Holm)",
        "Detectable",
        "Precision",
        "Documents",
    ]
    if several:
        head.insert(3, "Checkpoint")
    for (kind, title, unit), lines in kinds(shown(comparison)):
        rows, asked = [], []
        for line in lines:
            for other, effect in line.differences.items():
                asked.append(effect)
                rows.append(
                    [
                        *_names(line),
                        *([Cell(text=other)] if several else []),
                        *_effect(effect, line),
                        p_value(effect.p_holm),
                        _detectable(effect, line),
                        _precision(line),
                        Cell(text=str(effect.documents), sort=effect.documents),
                    ]
                )
        if rows:
            which = "that checkpoint's" if several else f"{comparison.others[0]}'s"
            caption = (
                f"Difference-in-differences: {which} damage by quantization (quantized minus "
                f"unquantized) minus {base}'s. {_told(asked, unit)} Detectable: the smallest "
                "difference that as many documents show with 80 % power."
            )
            heading = f"Difference of damages: {title}"
            name = f"differences-{kind}"
            yield build(name, "damage", heading, caption, head, rows, keys=len(NAMES))


def damages(comparison: Comparison) -> Iterator[DataTable]:
    """Quantized minus unquantized, for each checkpoint."""
    head = list(NAMES)
    for checkpoint in comparison.checkpoints:
        head += [checkpoint, f"95 % interval {checkpoint}", f"p (Holm) {checkpoint}"]
    head.append("Precision")
    for (kind, title, unit), lines in kinds(shown(comparison)):
        rows, asked = [], []
        for line in lines:
            if not line.damages:
                continue
            row = _names(line)
            for checkpoint in comparison.checkpoints:
                effect = line.damages.get(checkpoint)
                row += [*_effect(effect, line), p_value(effect.p_holm if effect else None)]
            asked += line.damages.values()
            rows.append([*row, _precision(line)])
        if rows:
            caption = f"Damage: quantized minus unquantized. {_told(asked, unit)}"
            heading = f"Damage: {title}"
            yield build(f"damages-{kind}", "damage", heading, caption, head, rows, keys=len(NAMES))


def _told(asked: list[Effect], unit: str) -> str:
    """Units, marks, and the tests and intervals that these rows rest on."""
    if not asked:
        return ""
    tests = "; ".join(dict.fromkeys(effect.test for effect in asked))
    methods = "; ".join(dict.fromkeys(effect.method for effect in asked))
    return f"{unit} {MARKS} Tests: {tests}. Intervals: {methods}."


def _names(line: Line) -> list[Cell]:
    return [
        Cell(text=line.label),
        Cell(text=f"{metric_title(line.metric)} {arrow(line)}"),
        Cell(text=line.quantizer),
    ]


def _precision(line: Line) -> Cell:
    """Of all three parts, in the order of their bits."""
    weights, activations, kv_cache = line.precision.order
    text = line.precision.words if line.quantized else "unquantized"
    return Cell(text=text, sort=weights + activations / 1e2 + kv_cache / 1e4)


def _effect(effect: Effect | None, line: Line) -> list[Cell]:
    text = effect_text(effect, percent=line.percent)
    return [Cell(text=text, sort=effect.estimate if effect else None), _interval(effect, line)]


def _interval(effect: Effect | None, line: Line) -> Cell:
    """Sorts by its lower end."""
    if effect is None:
        return Cell(text=NO_VALUE)
    title = f"{effect.method}; {effect.test}; sorts by the lower end"
    text = interval_text(effect, percent=line.percent)
    return Cell(text=text, sort=effect.interval.low, title=title)


def _detectable(effect: Effect, line: Line) -> Cell:
    return Cell(text=detectable_text(effect, percent=line.percent), sort=effect.detectable)
