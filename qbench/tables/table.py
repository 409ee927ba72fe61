"""The delta table as data: one a method, laid out as the paper's tables 8 to 13, and its notes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from textwrap import shorten
from typing import Any

from qbench.comparison.lines import Comparison, Line, redundant
from qbench.passkey import CHANCE, DIGITS, task_length
from qbench.published import Printed
from qbench.published.check import doubts
from qbench.records import KVAudit, Record, SampleDifference
from qbench.text import MINUS, NO_VALUE, metric_title, together


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of a table, and whether it begins a task."""

    line: Line
    begins_task: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One method's table. ``notes`` stand below it: failures, and what was left out."""

    method: str
    name: str  # of the method
    title: str
    checkpoints: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def delta(comparison: Comparison) -> list[Table]:
    """One table a quantization method; each has the unquantized rows too. One checkpoint alone has
    one table of all. What is wrong with a cell stands below the first table that has it."""
    problems, tables = comparison.problems(), []
    if len(comparison.checkpoints) == 1:
        return [_table(comparison, None, problems)]
    for method in comparison.methods:
        tables.append(_table(comparison, method, problems))
        shown = {line.quantizer for line in _lines(comparison, method)}
        problems = [one for one in problems if _quantizer_of(one) not in shown]
    return tables


def _lines(comparison: Comparison, method: str | None) -> list[Line]:
    """Of one method and unquantized; None: all."""
    return [
        line for line in comparison.lines if method in (None, line.method) or not line.quantized
    ]


def _table(comparison: Comparison, method: str | None, problems: list[str]) -> Table:
    lines = _lines(comparison, method)
    shown = [line for line in lines if not redundant(line, lines)]
    rows = []
    for _, group in groupby(shown, key=lambda line: line.task):
        for number, line in enumerate(group):
            rows.append(Row(line=line, begins_task=number == 0))
    left_out = dict.fromkeys(
        f"{line.task} {line.metric}" for line in lines if redundant(line, lines)
    )
    quantizers = {line.quantizer for line in lines}
    notes = together(note for note in problems if _quantizer_of(note) in quantizers)
    if comparison.grid.skipped:
        notes.append(f"Left out, having no data: {', '.join(comparison.grid.skipped)}.")
    notes += prompt_notes(comparison)
    if left_out:
        notes.append(f"Only in the CSV, being functions of word_perplexity: {', '.join(left_out)}.")
    name = next((line.title for line in lines if line.method == method), "Quantization")
    against = ", ".join(f"{other} {MINUS} {comparison.baseline}" for other in comparison.others)
    return Table(
        method=method or "all",
        name=name,
        title=f"{name}: Δ = {against}" if against else name,
        checkpoints=comparison.checkpoints,
        rows=tuple(rows),
        notes=tuple(notes),
    )


def prompt_notes(comparison: Comparison) -> list[str]:
    """How prompts became conversations, where they did: a line."""
    chats = [
        chat
        for record in comparison.records.values()
        if (chat := (record.key_parts.get("scoring") or {}).get("chat"))
    ]
    if not chats:
        return []
    said = []
    if chats[0].get("apply_chat_template"):
        turns = "turns of their own" if chats[0].get("fewshot_as_multiturn") else "one turn"
        said.append(f"by the model's chat template, few-shot examples as {turns}")
    if instruction := chats[0].get("system_instruction"):
        said.append(f"with the system instruction “{shorten(instruction, 120)}”")
    return [f"Prompts: {', '.join(said)}."]


def pairs(table: Table) -> list[Table]:
    """A table for the baseline and each other checkpoint. A note stands below the first of them
    that shows what it is about."""
    made, notes = [], list(table.notes)
    for other in table.checkpoints[1:]:
        own = [note for note in notes if _is_about(note, table.checkpoints, other)]
        made.append(replace(_pair_of(table, other), notes=tuple(own)))
        notes = [note for note in notes if note not in own]
    return made


def _is_about(note: str, checkpoints: tuple[str, ...], other: str) -> bool:
    """Whether a note is about ``other``, the first checkpoint, or none of them."""
    named = [name for name in checkpoints if note.startswith(f"{name}/")]
    return not named or named[0] in (checkpoints[0], other)


def _pair_of(table: Table, other: str) -> Table:
    base = table.checkpoints[0]
    pair = (base, other)
    rows = tuple(
        replace(row, line=replace(row.line, entries=tuple(map(row.line.entry, pair))))
        for row in table.rows
    )
    return replace(
        table,
        title=f"{table.name}: Δ = {other} {MINUS} {base}",
        checkpoints=pair,
        rows=rows,
    )


def _quantizer_of(problem: str) -> str:
    return problem.split(":", 1)[0].rsplit("/", 1)[-1]


DTYPE_BITS = {"bfloat16": 16.0, "float16": 16.0, "float32": 32.0}


def bits_per_weight(record: Record) -> float | None:
    """As stored; an unquantized cell's is that of its dtype."""
    if record.quantized:
        return record.audit.bits_per_weight if record.audit else None
    settings = record.key_parts.get("quantizer", {})
    dtype = settings.get("dtype") if isinstance(settings, dict) else None
    known = {"bf16": 16.0, "fp16": 16.0, "fp32": 32.0}
    return DTYPE_BITS.get(str(dtype), known.get(record.quantizer))


def find_printed(line: Line, paper: dict[tuple, Printed]) -> Printed | None:
    """What the paper prints for this line: same task, metric, method and bits."""
    return paper.get((line.task, line.base_metric, line.method, line.bits))


def standard_errors_away(line: Line, checkpoint: str, value: float) -> float | None:
    """(ours − printed) / our standard error, of perplexities on the scale of their logarithm.

    ``None`` where we have no score or no error.
    """
    entry, interval = line.entry(checkpoint), line.intervals.get(checkpoint)
    stderr = entry.stderr or (interval.stderr if interval else None)
    if entry.value is None or not stderr:
        return None
    if line.ratio:
        return math.log(entry.value / value) * entry.value / stderr
    return (entry.value - value / _unit(line)) / stderr


def models(comparison: Comparison) -> dict[str, str]:
    """Checkpoint → the paper's name for it, by the normalizer that its records state."""
    normalizers = {record.checkpoint: record.normalizer for record in comparison.records.values()}
    return {name: normalizers.get(name, name) for name in comparison.checkpoints}


def printed_cells(
    line: Line, others: tuple[str, ...], paper: dict[tuple, Printed], models: dict[str, str]
) -> list[str]:
    """A cell a checkpoint, then one a Δ."""
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
        if found and pair == ("softmax", "softpick"):
            away = _delta_away(line, other, found)
            cells.append(_away_text(found.delta, away, signed=True))
        else:
            cells.append(NO_VALUE)
    return cells


def printed_notes(table: Table, paper: dict[tuple, Printed], published: str) -> list[str]:
    """Where the numbers stand, what their brackets mean, and what is wrong with them."""
    found = [find_printed(row.line, paper) for row in table.rows]
    sources = list(dict.fromkeys(one.source for one in found if one))
    if not sources:
        return [f"{published} prints none of these cells."]
    told = (
        f"Printed: {published}, {', '.join(sources)}; in brackets how many of our standard errors "
        "ours lies above the printed value, whose own error is not known."
    )
    return [told, *(f"Beware: {doubt}" for doubt in doubts(sources))]


def _delta_away(line: Line, checkpoint: str, found: Printed) -> float | None:
    effect = line.deltas.get(checkpoint)
    if effect is None or not effect.interval.stderr:
        return None
    if effect.kind == "log ratio":
        printed = math.log(found.values["softpick"] / found.values["softmax"])
    else:
        printed = float(found.delta) / _unit(line)
    return (effect.estimate - printed) / effect.interval.stderr


def _unit(line: Line) -> float:
    return 100.0 if line.percent else 1.0


def _away_text(value: object, away: float | None, *, signed: bool = False) -> str:
    if value is None:
        return NO_VALUE
    text = f"{value:{'+' if signed else ''}}".replace("-", MINUS)
    return text if away is None else f"{text} ({away:+.1f} SE)".replace("-", MINUS)


PART_HEADS = {"weights": "weights", "activations": "activations", "kv": "KV cache"}
TREATMENT = "outliers"


Labels = Mapping[str, Mapping[str, Any]]


def labelled_parts(comparison: Comparison) -> Labels:
    """By quantizer: the settings of each part."""
    return {record.quantizer: _parts(record) for record in comparison.records.values()}


def parts_alone(comparison: Comparison, labels: Labels, line: Line) -> dict[str, Line]:
    """By part: the line of the same metric whose quantizer is that part of ``line``'s and nothing
    else, with equal settings. Empty where ``line`` has one part, or the grid has fewer than two."""
    own = labels.get(line.quantizer, {})
    kinds = [kind for kind in PART_HEADS if kind in own]
    if len(kinds) < 2:
        return {}
    treated = {TREATMENT: own[TREATMENT]} if TREATMENT in own else {}
    found = {}
    for kind in kinds:
        label = next(
            (n for n, parts in labels.items() if parts == {kind: own[kind], **treated}), ""
        )
        for other in comparison.lines:
            if (other.quantizer, other.task, other.metric) == (label, line.task, line.metric):
                found[kind] = other
    return found if len(found) > 1 else {}


def _parts(record: Record) -> Mapping[str, Any]:
    """The settings of what a cell quantizes, by part; of its outlier treatment, too."""
    settings = record.key_parts.get("quantizer")
    if not isinstance(settings, Mapping) or not record.quantized:
        return {}
    if not isinstance(settings.get("weights"), Mapping):
        return {"weights": settings}
    kinds = (*PART_HEADS, TREATMENT)
    parts = {kind: settings[kind] for kind in kinds if settings.get(kind) is not None}
    if record.precision.weights is None:
        del parts["weights"]
    return parts


def cache_notes(comparison: Comparison, table: Table) -> list[str]:
    """One line, where any quantizer of ``table`` has a KV cache of few bits."""
    quantizers = dict.fromkeys(row.line.quantizer for row in table.rows)
    told = {name: _bytes(comparison, table, name) for name in quantizers}
    told = {name: text for name, text in told.items() if text}
    if not told:
        return []
    parts = "; ".join(f"{name} {text}" for name, text in told.items())
    return [
        f"KV cache, bytes a token of all layers, scales and unquantized tokens counted: {parts}."
    ]


def _bytes(comparison: Comparison, table: Table, quantizer: str) -> str:
    """``4,992 of 18,432``: of each checkpoint where they differ."""
    found = [kv_audit(comparison, f"{checkpoint}/{quantizer}") for checkpoint in table.checkpoints]
    texts = [
        f"{one.bytes_per_token:,.0f} of {one.unquantized_bytes_per_token:,.0f} ({one.tokens:,} "
        "tokens)"
        for one in found
        if one is not None
    ]
    return " / ".join(dict.fromkeys(texts))


def kv_audit(comparison: Comparison, cell: str) -> KVAudit | None:
    record = comparison.records.get(cell)
    return record.audit.kv_cache if record and record.audit else None


AT_CHANCE = 0.05  # a score that guessing reaches in so large a share of runs, or larger


def at_chance(metric: str, value: float, documents: int) -> bool:
    """Whether guessing the digits of passkeys gives ``value``, or more, in 5 % of runs or oftener:
    P(X ≥ k) of a binomial distribution. ``metric`` is one of passkey retrieval's."""
    from scipy import stats  # slow to import, and most tables have none of these

    tried = documents * (DIGITS if metric == "acc_digits" else 1)
    return float(stats.binom.sf(round(value * tried) - 1, tried, CHANCE[metric])) > AT_CHANCE


def chance_notes(table: Table) -> list[str]:
    """A line on the scores of ``table`` that are at chance, if there are any."""
    cells: dict[tuple[str, str], dict[str, bool]] = {}
    for line in (row.line for row in table.rows):
        if task_length(line.task) is None or line.metric not in CHANCE:
            continue
        own = cells.setdefault((line.label, metric_title(line.metric)), {})
        for entry in line.entries:
            if entry.value is not None:
                own[entry.cell] = at_chance(line.metric, entry.value, entry.documents or 1)
    found = [
        f"{label} {metric} of {'all' if all(own.values()) else ', '.join(guessed)}"
        for (label, metric), own in cells.items()
        if (guessed := [cell for cell, yes in own.items() if yes])
    ]
    if not found:
        return []
    return [f"At chance, which guessing reaches in one of twenty runs or more: {'; '.join(found)}."]


def judged_notes(comparison: Comparison, table: Table) -> list[str]:
    """One line, where fast scores of ``table`` were judged by their mean difference."""
    entries = {entry.cell: entry for row in table.rows for entry in row.line.entries}
    samples = [sample for cell in entries for sample in _by_bias(comparison, cell)]
    if not samples:
        return []
    widest = max(sample.mean_per_token for sample in samples)
    worst = max(samples, key=lambda sample: abs(sample.bias_per_token or 0.0))
    error = f" ± {worst.bias_stderr:.2g}" if worst.bias_stderr is not None else ""
    bias = f"{worst.bias_per_token:+.2g}".replace("-", MINUS)
    return [
        "Where activations or the KV cache are quantized, rounding moves values by whole steps, so "
        "that two equally right computations differ: fast scores of single requests from exact "
        f"ones by up to {widest:.2g} nats a token in the mean of a task's sample. They were judged "
        f"by their mean difference with its sign, at most {bias}{error}."
    ]


def _by_bias(comparison: Comparison, cell: str) -> list[SampleDifference]:
    record = comparison.records.get(cell)
    difference = record.scoring.difference_from_exact if record and record.scoring else None
    return [sample for sample in difference.samples if sample.by_bias] if difference else []
