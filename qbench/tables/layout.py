"""A table as text: the same head, rows and notes for Markdown, LaTeX and HTML."""

from __future__ import annotations

from dataclasses import dataclass

from qbench.comparison.compare import Comparison, Entry, Line
from qbench.published import Printed, printed
from qbench.store import KEY_DIGITS
from qbench.tables.table import MINUS, NO_VALUE, Table, arrow, metric_title, number

BELOW_NOISE = "≈"
NOISE_LEGEND = (
    f"{BELOW_NOISE}: no larger than what another batch order and size moved the unquantized "
    "scores by (noise.json)."
)
WORDS = 3  # the first columns hold words, the others numbers
LEGEND = (
    "Δ differs from 0 at 5 %: ‡ after Holm's correction over all Δ of the grid, † after "
    "Benjamini–Hochberg's only. Brackets hold 95 % intervals, paired by document."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Text of one table. ``keys`` names the record that each column's numbers come from."""

    title: str
    method: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    begins_task: tuple[bool, ...]
    notes: tuple[str, ...]
    keys: tuple[str, ...]


def layout(comparison: Comparison, table: Table, *, published: str | None = None) -> Layout:
    """Lay one table out; ``published`` adds what a paper prints for the same cells.

    Raises RecipeError where ``published`` is unknown.
    """
    paper = printed(published) if published else {}
    others = table.checkpoints[1:]
    tested = any(line.deltas for line in (row.line for row in table.rows))
    single = len(others) == 1
    head = ["Task", "Metric", "Quantization", *table.checkpoints]
    for other in others:
        head.append("Δ" if single else f"Δ {other}")
        if tested:
            head.append("95 % interval" if single else f"95 % interval {other}")
    models = _models(comparison)
    if paper:
        head += [f"{checkpoint}, printed" for checkpoint in table.checkpoints]
        head += [f"Δ{'' if single else ' ' + other}, printed" for other in others]
    head.append("Documents")
    rows = []
    for row in table.rows:
        line = row.line
        cells = [
            line.label if row.begins_task else "",
            f"{metric_title(line.metric)} {arrow(line)}",
            line.quantizer,
            *(entry_text(entry, line) for entry in line.entries),
        ]
        for other in others:
            cells.append(delta_text(comparison, line, other))
            if tested:
                cells.append(interval_text(line, other))
        if paper:
            cells += _printed_cells(line, others, paper, models)
        cells.append(documents_text(line))
        rows.append(tuple(cells))
    notes = [*([LEGEND] if tested else []), *noise_notes(comparison), *table.notes]
    if paper:
        notes.insert(0, _printed_note(table, paper, published))
    return Layout(
        title=table.title,
        method=table.method,
        head=tuple(head),
        rows=tuple(rows),
        begins_task=tuple(row.begins_task for row in table.rows),
        notes=tuple(notes),
        keys=tuple(
            f"{entry.cell} {entry.key[:KEY_DIGITS]}"
            for entry in {e.cell: e for row in table.rows for e in row.line.entries}.values()
            if entry.status == "ok"
        ),
    )


def entry_text(entry: Entry, line: Line) -> str:
    """The score with its standard error; ``failed`` or ``— missing`` where there is none."""
    if entry.status == "missing":
        return f"{NO_VALUE} missing"
    if entry.status == "failed":
        return "failed"
    text = number(entry.value, percent=line.percent)
    if entry.stderr is not None:
        text += f" ± {number(entry.stderr, percent=line.percent)}"
    return text


def delta_text(comparison: Comparison, line: Line, checkpoint: str) -> str:
    """Δ as the papers print it, with its marks of significance and of the noise floor."""
    text = number(line.delta(checkpoint), percent=line.percent, signed=True)
    effect = line.deltas.get(checkpoint)
    below = comparison.below_noise(line, checkpoint)
    return text + (effect.mark if effect else "") + (BELOW_NOISE if below else "")


def noise_notes(comparison: Comparison) -> list[str]:
    """What ``≈`` means, where floors are known, and whose are not used."""
    stale = ", ".join(comparison.floors.stale)
    return ([NOISE_LEGEND] if comparison.floors.of else []) + (
        [
            f"noise.json is of other settings than these results for {stale}: not used; run "
            "qbench noise again"
        ]
        if stale
        else []
    )


def interval_text(line: Line, checkpoint: str) -> str:
    effect = line.deltas.get(checkpoint)
    if effect is None:
        return NO_VALUE
    ends = (effect.interval.low, effect.interval.high)
    low, high = (number(end, percent=line.percent, signed=True) for end in ends)
    return f"[{low}, {high}]"


def documents_text(line: Line) -> str:
    """One number where all checkpoints saw as many documents, else one for each."""
    counts = [entry.documents for entry in line.entries]
    known = {count for count in counts if count is not None}
    if len(known) <= 1:
        return str(next(iter(known), NO_VALUE))
    return "/".join(NO_VALUE if count is None else str(count) for count in counts)


def find_printed(line: Line, paper: dict[tuple, Printed]) -> Printed | None:
    """What the paper prints for this line: same task, metric, method and bits."""
    return paper.get((line.task, line.metric, line.method, line.bits))


def standard_errors_away(line: Line, checkpoint: str, value: float) -> float | None:
    """(ours − printed) / our standard error; ``None`` where we have no score or no error."""
    entry, interval = line.entry(checkpoint), line.intervals.get(checkpoint)
    stderr = entry.stderr or (interval.stderr if interval else None)
    if entry.value is None or not stderr:
        return None
    return (entry.value * (100 if line.percent else 1) - value) / (
        stderr * (100 if line.percent else 1)
    )


def _models(comparison: Comparison) -> dict[str, str]:
    """Checkpoint → the paper's name for it, by the normalizer that its records state."""
    normalizers = {record.checkpoint: record.normalizer for record in comparison.records.values()}
    return {name: normalizers.get(name, name) for name in comparison.checkpoints}


def _printed_cells(
    line: Line, others: tuple[str, ...], paper: dict[tuple, Printed], models: dict[str, str]
) -> list[str]:
    found = find_printed(line, paper)
    cells = []
    for entry in line.entries:
        value = found.values.get(models[entry.checkpoint]) if found else None
        away = None
        if value is not None:
            away = standard_errors_away(line, entry.checkpoint, float(value))
        cells.append(_away_text(value, away))
    for other in others:
        pair = (models[line.entries[0].checkpoint], models[other])
        delta = found.delta if found and pair == ("softmax", "softpick") else None
        effect, ours = line.deltas.get(other), line.delta(other)
        away = None
        if delta is not None and ours is not None and effect and effect.interval.stderr:
            scale = 100 if line.percent else 1
            away = (ours * scale - float(delta)) / (effect.interval.stderr * scale)
        cells.append(_away_text(delta, away, signed=True))
    return cells


def _away_text(value: object, away: float | None, *, signed: bool = False) -> str:
    if value is None:
        return NO_VALUE
    text = f"{value:{'+' if signed else ''}}".replace("-", MINUS)
    return text if away is None else f"{text} ({away:+.1f} SE)".replace("-", MINUS)


def _printed_note(table: Table, paper: dict[tuple, Printed], published: str | None) -> str:
    found = [find_printed(row.line, paper) for row in table.rows]
    sources = dict.fromkeys(one.source for one in found if one)
    return (
        f"Printed: {published}, {', '.join(sources)}; in brackets how many of our standard errors "
        "ours lies above the printed value, whose own error is not known."
        if sources
        else f"{published} prints none of these cells."
    )
