"""Build tables of scores with their footnotes: Δ, damage, what quantization costs one model.

Laid out as the softpick paper's tables 8 to 13: one table per quantization method.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import TYPE_CHECKING

from qbench.comparison.rows import (
    Comparison,
    Row,
    RowValue,
    bits_per_weight,
    gib,
    training_notes,
)
from qbench.comparison.wording import (
    NO_INTERVAL,
    RATIO_NOTE,
    RATIOS_NOTE,
    SEED_NOTES,
    SEEDS_NOTE,
    SHARE,
    SHARE_NOTE,
    bound_text,
    each_text,
    effect_text,
    interval_text,
    metric_text,
    mostly_seeds,
    order_note,
    share_text,
    values_text,
)
from qbench.records import (
    ANSWERS,
    KEY_DIGITS,
    GridCell,
    Record,
    TaskDamage,
)
from qbench.statistics import documents_for_margin, samples_needed
from qbench.statistics.effect import DRAWN_ERRORS
from qbench.tables.table import Cells, Table, from_rows
from qbench.text import MINUS, NO_VALUE, group_by_reason, metric_title, number, significant

if TYPE_CHECKING:
    from qbench.statistics import Effect


HUNDREDTH = 0.01
AT_MOST = "At most"
MARKS = "‡ differs from 0 at 5 % after Holm's correction over all {kind} of this folder."
BRACKETS = "Brackets: 95 % intervals, paired by document."
DAMAGE_NOTE = (
    "Damage: what quantization loses against the same checkpoint unquantized; above 0, or above "
    "× 1, is worse."
)
PRECISION_NOTE = (
    "W, A, KV: bits of weights, activations, KV cache. Simulated: rounded to the format; real: "
    "multiplied in it."
)
COST_NOTES = (
    "KL: divergence from the unquantized model's next-token distributions, nats per token: mean "
    "and 99th percentile.",
    "Flips: answers from right to wrong / from wrong to right.",
)
AT_MOST_NOTE = f"{AT_MOST}: a larger damage is excluded at 95 % (one-sided)."


def run_notes(comparison: Comparison, hidden: Sequence[Row]) -> list[str]:
    """Return lines about the run: tasks without data, prompts, BOS, and the ``hidden`` rows, which
    repeat word perplexity."""
    notes = []
    if comparison.grid.skipped:
        notes.append(f"Left out, without data: {', '.join(comparison.grid.skipped)}.")
    notes += [*prompt_notes(comparison), *bos_notes(comparison)]
    if names := dict.fromkeys(f"{row.task} {row.metric}" for row in hidden):
        notes.append(f"Only in the CSV, since word_perplexity determines them: {', '.join(names)}.")
    return notes


def score_notes(comparison: Comparison, rows: Sequence[Row], footnotes: Sequence[str]) -> list[str]:
    """Return the lines below a table of scores: drawn answers, ``footnotes``,
    precisions, tasks at chance, trainings."""
    return [
        *drawn_notes(rows),
        *footnotes,
        *precision_notes(rows),
        *chance_notes(comparison, rows),
        *training_notes(comparison),
    ]


def seed_notes(
    comparison: Comparison, rows: Sequence[Row], contrasts: tuple[str, ...]
) -> list[str]:
    """Return the lines below a table over seeds."""
    effects = [e for row in rows for name in contrasts for e in getattr(row, name).values()]
    notes = [*SEED_NOTES, SHARE_NOTE]
    if many := sum(map(mostly_seeds, effects)):
        notes.append(f"{SEEDS_NOTE} Here {many} of {len(effects)}.")
    if ratio_notes(effects):
        notes.append(RATIOS_NOTE)
    notes += [*precision_notes(rows), order_note(comparison)]
    return notes + (training_notes(comparison) if contrasts == ("deltas",) else [])


def ratio_notes(effects: Iterable[Effect]) -> list[str]:
    """Return the line that explains ratios, if any of ``effects`` is one."""
    return [RATIO_NOTE] if any(effect.kind == "log ratio" for effect in effects) else []


def missing_notes(rows: Iterable[Row], contrasts: Sequence[str]) -> list[str]:
    """Return a line per reason why effects have no interval."""
    reasons = [
        (f"{row.label} {metric_title(row.metric)} {row.quantizer} of {group}", missing.reason)
        for row in rows
        for (contrast, group), missing in row.missing.items()
        if contrast in contrasts
    ]
    return [f"{NO_INTERVAL} {line}." for line in group_by_reason(reasons)]


def precision_notes(rows: Iterable[Row]) -> list[str]:
    """Return a note on precisions such as W4A8, and one on weights rounded to a grid: symmetric or
    not, group size, column order."""
    rows = list(rows)
    notes = [PRECISION_NOTE] if any(row.precision.in_parts for row in rows) else []
    schemes = {row.quantizer: row.precision.weights.scheme for row in rows if row.precision.weights}
    named = [f"{quantizer} is {scheme}" for quantizer, scheme in schemes.items()
             if "symmetric" in scheme]  # fmt: skip
    return [*notes, *([f"Weights: {'; '.join(named)}."] if named else [])]


def scale_notes(comparison: Comparison) -> list[str]:
    """Return a line that names precisions whose scales are stored in float32."""
    wide = {
        record.quantizer: None
        for record in comparison.records.values()
        if record.precision.weights and "float32 scales" in record.precision.weights.scheme
    }
    if not wide:
        return []
    return [
        f"Bits of {', '.join(wide)}: scales and zeros are stored in the model’s dtype, here "
        "float32, 64 bits per group of weights; bfloat16 needs half."
    ]


def prompt_notes(comparison: Comparison) -> list[str]:
    """Return a line on how prompts became conversations; an empty list if they did not."""
    chats = [
        chat
        for record in comparison.records.values()
        if (chat := (record.key_parts.get("scoring") or {}).get("chat"))
    ]
    if not chats:
        return []
    parts = []
    if chats[0].get("apply_chat_template"):
        turns = "turns of their own" if chats[0].get("fewshot_as_multiturn") else "one turn"
        parts.append(f"by the model's chat template, few-shot examples as {turns}")
    if instruction := chats[0].get("system_instruction"):
        parts.append(f"with the system instruction “{shorten(instruction, 120)}”")
    return [f"Prompts: {', '.join(parts)}."]


def bos_notes(comparison: Comparison) -> list[str]:
    """Return a line on BOS before the scored texts; an empty list for earlier records."""
    reports = {
        record.checkpoint: record.scoring
        for record in comparison.records.values()
        if record.scoring is not None and record.scoring.bos is not None
    }
    with_bos = [name for name, report in reports.items() if report.bos]
    if not reports:
        return []
    if not with_bos:
        return ["Texts begin without BOS."]
    names = "" if len(with_bos) == len(reports) else f" of {', '.join(with_bos)}"
    doubled = dict.fromkeys(task for report in reports.values() for task in report.doubled_bos)
    twice = f"; those of {', '.join(doubled)} with two, as in lm-eval" if doubled else ""
    return [f"Texts{names} begin with BOS{twice}."]


def chance_notes(comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    """Return a line on accuracies of ``rows`` that an unquantized model may have guessed."""
    tasks = {(row.task, row.metric): row for row in rows}
    labels = [
        f"{tasks[task, metric].label} {metric_title(metric)} of {checkpoint}"
        for checkpoint, task, metric in sorted(comparison.at_chance)
        if (task, metric) in tasks
    ]
    if not labels:
        return []
    return [
        f"At chance unquantized, so nothing can be lost and Holm's correction leaves them out: "
        f"{'; '.join(labels)}."
    ]


def drawn_notes(rows: Iterable[Row]) -> list[str]:
    """Return a line per metric whose answers are drawn: how much drawing other answers to the same
    prompts changes a damage, and how many prompts or samples would show a loss of a hundredth."""
    effects_of: dict[str, list[Effect]] = {}
    for row in rows:
        for effect in row.damages.values():
            if effect.drawn > 0:
                effects_of.setdefault(f"{row.label} {metric_title(row.metric)}", []).append(effect)
    lines = []
    for name, effects in effects_of.items():
        widest = max(effects, key=lambda effect: effect.interval.stderr)
        points = 100 * DRAWN_ERRORS * max(effect.drawn for effect in effects)
        unit = "%" if widest.kind == "log ratio" else "points"
        line = (
            f"{name}: drawing other answers to the same prompts alone moves a damage by ± "
            f"{points:.1f} {unit} (3 standard errors): smaller ones are not marked."
        )
        needed = documents_for_margin(widest, HUNDREDTH)
        if not all(effect.significant for effect in effects) and needed:
            line += f" {needed:,} prompts would show that a loss stays within 1 {unit}"
            more = samples_needed(HUNDREDTH, widest.interval.stderr, widest.drawn)
            line += f", or {more:.1f} times as many samples." if more else (
                "; more samples of these would not.")  # fmt: skip
        lines.append(line)
    return lines


INTERVAL = "95 % interval"
NAMES = ("Task", "Metric", "Quantization")
BY_TASK = {"words": len(NAMES), "grouped": True}  # of tables whose rows begin with as many words


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodLines:
    """Hold the content of one set of tables: the rows of a method and the unquantized ones, over
    some of the checkpoints.

    ``problems`` of cells and ``notes`` are printed below the first table.
    """

    comparison: Comparison
    name: str  # of the method
    checkpoints: tuple[str, ...]
    lines: tuple[Row, ...]
    problems: tuple[tuple[GridCell, str], ...]
    notes: tuple[str, ...]

    @property
    def footnotes(self) -> list[str]:
        """Return the problems, grouped by reason, and the notes."""
        return [*group_by_reason((cell.cell, text) for cell, text in self.problems), *self.notes]

    @property
    def quantized(self) -> list[Row]:
        """Return the quantized rows."""
        return [line for line in self.lines if line.quantized]

    @property
    def seeds(self) -> list[Row]:
        """Return the rows over several trainings of each kind, if the grid has them."""
        if not self.comparison.seeds:
            return []
        quantizers = {line.quantizer for line in self.lines}
        rows = (row for row in self.comparison.seeds if row.quantizer in quantizers)
        return [row for row in rows if not self.comparison.redundant(row)]

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Return the name of each column → its checkpoints: several trainings, or one."""
        if self.seeds:
            return dict(self.comparison.grid.replicates)
        return {name: (name,) for name in self.checkpoints}


def by_method(comparison: Comparison) -> list[MethodLines]:
    """Return one set of tables per quantization method; a single set for one checkpoint.

    Problems of a cell are in the first set that shows it.
    """
    made, problems = [], comparison.problems()
    ran = {line.method for line in comparison.lines}
    methods = [method for method in comparison.methods if method in ran]
    methods = [None] if len(comparison.checkpoints) == 1 or not methods else methods
    for method in methods:
        every = [
            line
            for line in comparison.lines
            if (method in (None, line.method) or not line.quantized) and line.task != ANSWERS
        ]
        labels = {line.quantizer for line in every}
        if method == methods[-1]:  # precisions that have no rows too
            labels |= {cell.quantizer for cell in comparison.grid.cells}
        lines = [line for line in every if not comparison.redundant(line)]
        left_out = [line for line in every if comparison.redundant(line)]
        made.append(
            MethodLines(
                comparison=comparison,
                name=next((line.title for line in lines if line.method == method), "Quantization"),
                checkpoints=comparison.checkpoints,
                lines=tuple(lines),
                problems=tuple(each for each in problems if each[0].quantizer in labels),
                notes=tuple(run_notes(comparison, left_out)),
            )
        )
        problems = [each for each in problems if each[0].quantizer not in labels]
    return made


def tables_of(method: MethodLines) -> list[Table]:
    """Return the tables of scores with Δ and of damage.

    With several trainings of each kind they are of the means; those of a checkpoint that was
    trained once follow.
    """
    if method.seeds:
        quantized = [line for line in method.seeds if line.quantized and line.damages]
        tables = [*_deltas(method), *_damages(method, quantized)]
        single = replace(method.comparison, seeds=())
        for pair in _with_the_first(replace(method, comparison=single, problems=(), notes=())):
            if not {*single.trained_once}.isdisjoint(pair.checkpoints):
                tables += tables_of(pair)
        return tables
    if len(method.checkpoints) > 2:  # a table for each pair stays readable
        return [table for pair in _with_the_first(method) for table in tables_of(pair)]
    damaged = any(line.damages for line in method.lines)
    compared = damaged or any(
        method.comparison.task_damage(entry.cell, line.task)
        for line in method.quantized
        for entry in line.entries
    )
    if len(method.checkpoints) == 1 and compared:
        return _one_model(method)
    return [*_deltas(method), *_damages(method, method.quantized if damaged else [])]


def _with_the_first(method: MethodLines) -> list[MethodLines]:
    """Return a set per checkpoint but the first, each beside the first; a note is in the first set
    that it is about."""
    made: list[MethodLines] = []
    base, *others = method.checkpoints
    for other in others:
        about = (other,) if made else (base, other)
        pairs = (replace(line, entries=(line.entry(base), line.entry(other)))
                 for line in method.lines)  # fmt: skip
        made.append(
            replace(
                method,
                checkpoints=(base, other),
                lines=tuple(pairs),
                problems=tuple(each for each in method.problems if each[0].checkpoint in about),
                notes=() if made else method.notes,
            )
        )
    return made


def _effect_cells(line: Row, head: str, contrast: str, group: str, each: str = "") -> Cells:
    """Return the cells of an effect and its interval under ``head``; with a head ``each``, over
    seeds, also each training's effect and the seeds' share."""
    effect, percent = line.effect(contrast, group), line.percent
    cells = [
        (head, effect_text(effect, percent=percent)),
        (INTERVAL, interval_text(effect, percent=percent)),
    ]
    if each:
        cells += [(each, each_text(effect, percent=percent)), (SHARE, share_text(effect))]
    return cells


def _deltas(method: MethodLines) -> list[Table]:
    """Return the table of scores of each checkpoint (or mean of a group), and Δ."""
    comparison, seeds = method.comparison, bool(method.seeds)
    lines = method.seeds or method.lines
    base, *others = method.groups
    tested = any(line.deltas for line in lines)
    rows = []
    for line in lines:
        row = _names(line)
        for group, members in method.groups.items():
            if seeds:
                row.append((group, number(line.means.get(group), percent=line.percent)))
                row.append((f"{group}, each", values_text(line, members)))
            else:
                row.append((group, entry_text(line.entry(group), line)))
        for other in others:
            head = f"Δ {other}" if seeds and len(others) > 1 else "Δ"
            cells = _effect_cells(line, head, "deltas", other, f"{head}, each" * seeds)
            if not seeds:  # as the papers print it, of perplexities too
                cells = [(head, _delta_text(line, other)), *(cells[1:] if tested else [])]
            row += cells
        effects = [*line.deltas.values(), *line.scores.values()]
        rows.append([*row, ("Documents", _counts(effects) if seeds else documents_text(line))])
    against = ", ".join(f"{other} {MINUS} {base}" for other in others)
    title, delta = method.name, f"Δ = {against}" if against else ""
    if seeds:
        counts = ", ".join(f"{len(of)} of {group}" for group, of in method.groups.items())
        title = f"{title} over seeds ({counts})"
        notes = [*seed_notes(comparison, lines, ("deltas",)), *method.footnotes]
    else:
        notes = [
            *([MARKS.format(kind="Δ"), BRACKETS] if tested else []),
            *ratio_notes(effect for line in lines for effect in line.deltas.values()),
            *missing_notes(lines, ("deltas",)),
            *score_notes(comparison, lines, method.footnotes),
        ]
    return from_rows(
        rows,
        title=f"{title}: {delta}" if delta else title,
        notes=notes,
        records=() if seeds else _records(lines),
        **BY_TASK,
    )


def _damages(method: MethodLines, lines: Sequence[Row]) -> list[Table]:
    """Return the table of the damage of each checkpoint (or group of trainings), and of its
    difference from the first's."""
    base, *others = groups = [*method.groups]
    claims = {other: f"{other}’s {MINUS} {base}’s" for other in others}
    rows = []
    for line in lines:
        row = _names(line)
        for group in groups:
            row += _effect_cells(line, f"{group}’s damage", "damages", group)
        for other, claim in claims.items():
            row += _effect_cells(line, claim, "differences", other, "each" if method.seeds else "")
        effects = [line.damages.get(group) for group in groups]
        effects += [line.differences.get(other) for other in others]
        rows.append([*row, ("Documents", _counts(effects))])
    if method.seeds:
        notes = seed_notes(method.comparison, lines, ("damages", "differences"))
    else:
        kind = "damages (differences: over all differences of damage)" if others else "damages"
        notes = [
            *(DAMAGE_NOTE, MARKS.format(kind=kind), BRACKETS),
            *ratio_notes(effect for line in method.lines for effect in line.damages.values()),
            *missing_notes(lines, ("damages", "differences")),
            *precision_notes(method.lines),
        ]
    name = f"{method.name} over seeds" if method.seeds else method.name
    return from_rows(
        rows,
        title=f"{name}: damage{', and ' if claims else ''}{', '.join(claims.values())}",
        notes=notes,
        **BY_TASK,
    )


def _counts(effects: Iterable[Effect | None]) -> str:
    """Return the numbers of documents behind the effects of a row, joined by ``/``."""
    return "/".join(sorted({str(effect.documents) for effect in effects if effect})) or NO_VALUE


def _records(lines: Iterable[Row]) -> tuple[str, ...]:
    """Return ``cell key`` of each scored cell of ``lines``."""
    entries = {entry.cell: entry for line in lines for entry in line.entries}.values()
    return tuple(f"{e.cell} {e.key[:KEY_DIGITS]}" for e in entries if e.status == "ok")


def _one_model(method: MethodLines) -> list[Table]:
    """Return the table of the damage of one checkpoint: a row per precision."""
    (checkpoint,) = method.checkpoints
    comparison, order = method.comparison, [(line.task, line.metric) for line in method.lines]
    rows = []
    for line in sorted(method.lines, key=lambda line: order.index((line.task, line.metric))):
        cell, effect = f"{checkpoint}/{line.quantizer}", line.effect("damages", checkpoint)
        lost = {
            "Damage": effect_text(effect, percent=line.percent),
            INTERVAL: interval_text(effect, percent=line.percent),
            AT_MOST: bound_text(effect, percent=line.percent),
            **_cost_texts(comparison.task_damage(cell, line.task), line.metric),
        }
        rows.append(
            {
                **dict(_names(line)),
                **_size_texts(comparison.records.get(cell)),
                "Score": entry_text(line.entries[0], line),
                **(lost if line.quantized else dict.fromkeys(lost, "")),
                "Documents": documents_text(line),
            }
        )
    return from_rows(
        rows,
        title=f"{method.name}: what it costs {checkpoint}",
        notes=(
            *(DAMAGE_NOTE, MARKS.format(kind="damages"), BRACKETS, AT_MOST_NOTE),
            *COST_NOTES,
            *ratio_notes(effect for line in method.lines for effect in line.damages.values()),
            *missing_notes(method.lines, ("damages",)),
            *score_notes(comparison, method.lines, method.footnotes),
        ),
        **BY_TASK,
        records=_records(method.lines),
    )


def _cost_texts(damage: TaskDamage | None, metric: str) -> dict[str, str]:
    """Return the cells KL (mean, 99th percentile), flips and top-1 agreement."""
    measured = damage.distributions if damage else None
    flips = damage.flips.get(metric) if damage else None
    return {
        "KL": significant(measured.kl.mean) if measured else NO_VALUE,
        "KL p99": significant(measured.kl.p99) if measured else NO_VALUE,
        "Flips": f"{flips.right_to_wrong} / {flips.wrong_to_right}" if flips else NO_VALUE,
        "Same top token": f"{100 * measured.top1_agreement:.1f} %" if measured else NO_VALUE,
    }


def _size_texts(record: Record | None) -> dict[str, str]:
    """Return the cells bits per weight and GiB."""
    bits, size = bits_per_weight(record), gib(record)
    return {
        "Bits per weight": NO_VALUE if bits is None else f"{bits:.2f}",
        "GiB": NO_VALUE if size is None else significant(size),
    }


def _names(line: Row) -> Cells:
    """Return the cells task, metric (with an arrow towards better) and quantization."""
    quantizer = line.quantizer
    if line.precision.in_parts:
        quantizer += f" ({line.precision.words})"
    return list(zip(NAMES, (line.label, metric_text(line), quantizer), strict=True))


def entry_text(entry: RowValue, line: Row) -> str:
    """Return a score with its standard error; ``failed`` or ``— missing`` without one."""
    if entry.status == "missing":
        return f"{NO_VALUE} missing"
    if entry.status == "failed":
        return "failed"
    error = "" if entry.stderr is None else f" ± {number(entry.stderr, percent=line.percent)}"
    return number(entry.value, percent=line.percent) + error


def _delta_text(line: Row, checkpoint: str) -> str:
    """Return Δ as the papers print it, with its mark of significance."""
    text = number(line.delta(checkpoint), percent=line.percent, signed=True)
    effect = line.deltas.get(checkpoint)
    return text + (effect.mark if effect else "")


def documents_text(line: Row) -> str:
    """Return how many documents were scored: one number if all checkpoints agree, else one each."""
    counts = [entry.documents for entry in line.entries]
    numbers = {count for count in counts if count is not None}
    if len(numbers) <= 1:
        return str(next(iter(numbers), NO_VALUE))
    return "/".join(NO_VALUE if count is None else str(count) for count in counts)


def against_table(comparison: Comparison) -> list[Table]:
    """Return the table of the losses of each precision compared with ``comparison.against``, by
    score; an empty list if that is None."""
    rows = []
    for line in comparison.seeds or comparison.lines:
        if line.against and not comparison.redundant(line):
            row = _names(line)
            for group in comparison.groups:
                row += _effect_cells(line, group, "against", group)
            rows.append([*row, ("Documents", _counts(line.against.values()))])
    effects = [each for line in comparison.lines for each in line.against.values()]
    notes = [
        f"What is lost against {comparison.against}, paired by document; above 0, or above × 1, "
        "the row's precision is worse.",
        MARKS.format(kind="losses"),
        *ratio_notes(effects),
    ]
    return from_rows(rows, title=f"Against {comparison.against}", notes=notes, **BY_TASK)
