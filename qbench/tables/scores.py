"""Build tables of scores with their footnotes: Δ, damage, what quantization costs one model.

Laid out as the softpick paper's tables 8 to 13: one table per quantization method."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from textwrap import shorten
from typing import TYPE_CHECKING

from qbench.comparison.rows import (
    TESTED,
    Comparison,
    Row,
    RowValue,
    bits_per_weight,
    gib,
    trained,
    training_notes,
)
from qbench.comparison.verdict import (
    MOSTLY_SEEDS,
    NO_INTERVAL,
    TIMES,
    bound_text,
    each_text,
    effect_text,
    interval_text,
    mostly_seeds,
)
from qbench.records import ANSWERS, KEY_DIGITS
from qbench.statistics import documents_for_margin, samples_needed
from qbench.statistics.effect import DRAWN_ERRORS
from qbench.text import (
    MINUS,
    NO_VALUE,
    Cells,
    Table,
    from_rows,
    group_by_reason,
    metric_title,
    number,
    significant,
)

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
SHARE = "Seeds’ share"
RATIO_NOTE = f"{TIMES}: perplexities are compared by their ratio, computed on logarithms."
AT_MOST_NOTE = f"{AT_MOST}: a larger damage is excluded at 95 % (one-sided)."


def run_notes(comparison: Comparison, hidden: Sequence[Row]) -> list[str]:
    """Return lines about the run: tasks without data, how prompts became conversations, BOS before
    the scored texts, and the names of the ``hidden`` rows, which repeat word perplexity."""
    notes, records = [], comparison.records.values()
    if comparison.grid.skipped:
        notes.append(f"Left out, without data: {', '.join(comparison.grid.skipped)}.")
    chats = [chat for record in records
             if (chat := (record.key_parts.get("scoring") or {}).get("chat"))]  # fmt: skip
    if chats:
        parts = []
        if chats[0].get("apply_chat_template"):
            turns = "turns of their own" if chats[0].get("fewshot_as_multiturn") else "one turn"
            parts.append(f"by the model's chat template, few-shot examples as {turns}")
        if instruction := chats[0].get("system_instruction"):
            parts.append(f"with the system instruction “{shorten(instruction, 120)}”")
        notes.append(f"Prompts: {', '.join(parts)}.")
    scorings = {record.checkpoint: record.scoring for record in records
                if record.scoring is not None and record.scoring.bos is not None}  # fmt: skip
    with_bos = [name for name, scoring in scorings.items() if scoring.bos]
    names = "" if len(with_bos) == len(scorings) else f" of {', '.join(with_bos)}"
    doubled = dict.fromkeys(task for scoring in scorings.values() for task in scoring.doubled_bos)
    twice = f"; those of {', '.join(doubled)} with two, as in lm-eval" if doubled else ""
    if scorings:
        text = f"Texts{names} begin with BOS{twice}." if with_bos else "Texts begin without BOS."
        notes.append(text)
    if names := dict.fromkeys(f"{row.task} {row.metric}" for row in hidden):
        notes.append(f"Only in the CSV, since word_perplexity determines them: {', '.join(names)}.")
    return notes


def score_notes(lines: MethodLines) -> list[str]:
    """Return the lines below a table of scores: drawn answers, footnotes, precisions, accuracies
    that an unquantized model may have guessed, trainings."""
    rows = {(row.task, row.metric): row for row in lines.rows}
    labels = [
        f"{rows[task, metric].label} {metric_title(metric)} of {checkpoint}"
        for checkpoint, task, metric in sorted(lines.comparison.at_chance)
        if (task, metric) in rows
    ]
    chance = [
        "At chance unquantized, so nothing can be lost and Holm's correction leaves them out: "
        f"{'; '.join(labels)}."
    ] * bool(labels)
    return [
        *drawn_notes(lines.rows),
        *lines.footnotes,
        *precision_notes(lines.rows),
        *chance,
        *training_notes(lines.comparison),
    ]


def seed_notes(
    comparison: Comparison, rows: Sequence[Row], contrasts: tuple[str, ...]
) -> list[str]:
    """Return the lines below a table over seeds of ``contrasts``: ("deltas",), or ("damages",
    "differences"). Lines on how the models were trained come only with ("deltas",)."""
    effects, trainings = effects_of(rows, *contrasts), trained(comparison.records.values())
    notes = [
        "Means over trainings that differ in their seed.",
        "Brackets: 95 % intervals over documents and seeds (Banerjee 1960).",
        "‡ differs from 0 at 5 % after Holm's correction over all of its kind in this folder.",
        f"{SHARE}: the part of the variance of the effect’s mean that comes from the seeds.",
    ]
    if many := sum(map(mostly_seeds, effects)):
        notes.append(
            f"{MOSTLY_SEEDS}: most of the uncertainty comes from the seeds: more trainings are "
            f"needed. Here {many} of {len(effects)}."
        )
    if ratios := ratio_notes(effects):
        means = "Means of perplexities are arithmetic, of their ratios geometric."
        notes.append(f"{ratios[0]} {means}")
    groups = (
        ", ".join(f"{m} (seed {trainings[m].seed})" if m in trainings else m for m in members)
        for members in comparison.grid.replicates.values()
    )
    notes += [*precision_notes(rows), f"Each, in this order: {'; '.join(groups)}."]
    return notes + (training_notes(comparison) if contrasts == ("deltas",) else [])


def effects_of(rows: Iterable[Row], *contrasts: str) -> list[Effect]:
    """Return the effects of these ``contrasts`` ("deltas", "damages", …) in all rows, those without
    an interval left out."""
    return [each for row in rows for name in contrasts for each in row.of(name).values()]


def ratio_notes(effects: Iterable[Effect]) -> list[str]:
    """Return a list with the line that explains ratios if any of ``effects`` is one; else []."""
    return [RATIO_NOTE] if any(effect.kind == "log ratio" for effect in effects) else []


def missing_notes(rows: Iterable[Row], *contrasts: str) -> list[str]:
    """Return a line per reason why effects of these contrasts have no interval."""
    reasons = [
        (f"{row.label} {metric_title(row.metric)} {row.quantizer} of {group}", effect.reason)
        for row in rows
        for (contrast, group), effect in row.effects.items()
        if contrast in contrasts and hasattr(effect, "reason")
    ]
    return [f"{NO_INTERVAL} {line}." for line in group_by_reason(reasons)]


def precision_notes(rows: Iterable[Row]) -> list[str]:
    """Return up to two notes: on precisions such as W4A8, and on weights rounded to a grid:
    symmetric or not, group size, column order."""
    rows = list(rows)
    notes = [PRECISION_NOTE] if any(row.precision.in_parts for row in rows) else []
    schemes = {row.quantizer: row.precision.weights.scheme for row in rows if row.precision.weights}
    named = [f"{quantizer} is {scheme}" for quantizer, scheme in schemes.items()
             if "symmetric" in scheme]  # fmt: skip
    return [*notes, *([f"Weights: {'; '.join(named)}."] if named else [])]


def drawn_notes(rows: Iterable[Row]) -> list[str]:
    """Return a line per metric whose answers are drawn: how much drawing other answers to the same
    prompts changes a damage, and how many prompts or samples would show a loss of 1 %."""
    effects_of: dict[str, list[Effect]] = {}
    for row in rows:
        for effect in row.of("damages").values():
            if effect.drawn > 0:
                effects_of.setdefault(f"{row.label} {metric_title(row.metric)}", []).append(effect)
    lines = []
    for name, effects in effects_of.items():
        widest = max(effects, key=lambda effect: effect.stderr)
        points = 100 * DRAWN_ERRORS * max(effect.drawn for effect in effects)
        unit = "%" if widest.kind == "log ratio" else "points"
        line = (
            f"{name}: drawing other answers to the same prompts alone moves a damage by ± "
            f"{points:.1f} {unit} (3 standard errors): smaller ones are not marked."
        )
        needed = documents_for_margin(widest, HUNDREDTH)
        if not all(effect.significant for effect in effects) and needed:
            line += f" {needed:,} prompts would show that a loss stays within 1 {unit}"
            more = samples_needed(HUNDREDTH, widest.stderr, widest.drawn)
            line += f", or {more:.1f} times as many samples." if more else (
                "; more samples of these would not.")  # fmt: skip
        lines.append(line)
    return lines


INTERVAL = "95 % interval"
NAMES = ("Task", "Metric", "Quantization")
BY_TASK = {"words": len(NAMES), "grouped": True}  # of tables whose rows begin with as many words


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodLines:
    """Hold the content of one set of tables: the rows of a method and the unquantized ones, with a
    column per group: a checkpoint, or with ``seeds`` several trainings. ``footnotes``, on problems
    of cells and on the run, are printed below the first table."""

    comparison: Comparison
    name: str  # of the method
    groups: Mapping[str, tuple[str, ...]]  # name of a column → its checkpoints
    rows: tuple[Row, ...]
    footnotes: tuple[str, ...]
    seeds: bool = False


def by_method(comparison: Comparison) -> list[MethodLines]:
    """Return the content of one set of tables per quantization method; for one checkpoint of one.
    With several trainings of each kind a set is of the means; those of a checkpoint that was
    trained once follow. Of more than two checkpoints there is one for each pair with the first.
    Problems of a cell are in the first set that shows it."""
    made, grid, problems = [], comparison.grid, comparison.problems()
    methods = dict.fromkeys(row.method for row in comparison.lines)
    methods = [
        cell.method
        for cell in grid.cells
        if cell.method in methods and cell.quantized == bool(comparison.quantizers)
    ]
    methods = [None] if len(grid.checkpoints) == 1 or not methods else [*dict.fromkeys(methods)]
    for method in methods:
        every = [
            row
            for row in comparison.lines
            if (method in (None, row.method) or not row.quantized) and row.task != ANSWERS
        ]
        labels = {row.quantizer for row in every}
        seeds = [row for row in comparison.seeds if row.quantizer in labels and not row.redundant]
        if method == methods[-1]:  # precisions that have no rows too
            labels |= {cell.quantizer for cell in grid.cells}
        rows = [row for row in every if not row.redundant]
        shown = [each for each in problems if each[0].quantizer in labels]
        problems = [each for each in problems if each[0].quantizer not in labels]
        notes = run_notes(comparison, [row for row in every if row.redundant])
        name = next((row.title for row in rows if row.method == method), "Quantization")

        def lines(rows, groups, problems, notes, *, seeds=False, name=name):
            reasons = group_by_reason((cell.cell, text) for cell, text in problems)
            return MethodLines(comparison=comparison, name=name, groups=groups, rows=tuple(rows),
                               footnotes=(*reasons, *notes), seeds=seeds)  # fmt: skip

        if seeds:
            made.append(lines(seeds, grid.replicates, shown, notes, seeds=True))
            shown, notes = [], []
        elif len(grid.checkpoints) < 3:
            made.append(lines(rows, {name: (name,) for name in grid.checkpoints}, shown, notes))
            continue
        base, about = grid.checkpoints[0], grid.checkpoints[:1]
        for other in grid.checkpoints[1:]:  # a table for each pair stays readable
            pair, about = {base: (base,), other: (other,)}, {*about, other}
            if not seeds or not pair.keys().isdisjoint(comparison.trained_once):
                of_pair = [each for each in shown if each[0].checkpoint in about]
                made.append(lines((_cut(row, pair) for row in rows), pair, of_pair, notes))
                notes = []
            about = ()
    return made


def _cut(row: Row, checkpoints: Collection[str]) -> Row:
    """Return ``row`` reduced to the entries and effects of ``checkpoints``."""
    names = product(("scores", *TESTED), checkpoints)
    effects = {name: row.effects[name] for name in names if name in row.effects}
    return replace(row, entries={name: row.entries[name] for name in checkpoints}, effects=effects)


def tables_of(method: MethodLines) -> list[Table]:
    """Return the tables of a set: scores with Δ, then damage if it was measured. For one checkpoint
    with damage both are one table."""
    quantized = [row for row in method.rows if row.quantized]
    damaged = bool(effects_of(method.rows, "damages"))
    if method.seeds:
        damages = [row for row in quantized if row.of("damages")]
        return [*_deltas(method), *_damages(method, damages)]
    compared = damaged or any(
        method.comparison.task_damage(entry.cell, row.task)
        for row in quantized
        for entry in row.entries.values()
    )
    if len(method.groups) == 1 and compared:
        return _one_model(method)
    return [*_deltas(method), *_damages(method, quantized if damaged else [])]


def _effect_cells(row: Row, head: str, contrast: str, group: str, each: str = "") -> Cells:
    """Return the cells of an effect and its interval under ``head``; with a head ``each``, over
    seeds, also each training's effect and the seeds' share."""
    effect, percent = row.effects.get((contrast, group)), row.percent
    interval = interval_text(effect, percent=percent)
    cells = [(head, effect_text(effect, percent=percent)), (INTERVAL, interval)]
    if each:
        share = getattr(effect, "of_seeds", None)
        share_text = NO_VALUE if share is None else f"{100 * share:.0f} %"
        cells += [(each, each_text(effect, percent=percent)), (SHARE, share_text)]
    return cells


def _deltas(method: MethodLines) -> list[Table]:
    """Return the table of scores of each checkpoint (or mean of a group), and Δ."""
    seeds, (base, *others) = method.seeds, method.groups
    deltas = effects_of(method.rows, "deltas")
    rows = []
    for row in method.rows:
        cells = _names(row)
        for group, members in method.groups.items():
            if seeds:
                cells.append((group, number(row.mean(group), percent=row.percent)))
                values = (row.entries[member].value for member in members)
                texts = (number(value, percent=row.percent) for value in values)
                cells.append((f"{group}, each", ", ".join(texts)))
            else:
                cells.append((group, entry_text(row.entries[group], row)))
        for other in others:
            head = f"Δ {other}" if seeds and len(others) > 1 else "Δ"
            of_delta = _effect_cells(row, head, "deltas", other, f"{head}, each" * seeds)
            if not seeds:  # as the papers print it, of perplexities too
                text = number(row.delta(other), percent=row.percent, signed=True)
                mark = getattr(row.effects.get(("deltas", other)), "mark", "")
                of_delta = [(head, text + mark), *(of_delta[1:] if deltas else [])]
            cells += of_delta
        counts = _counts(effects_of([row], "deltas", "scores")) if seeds else documents_text(row)
        rows.append([*cells, ("Documents", counts)])
    against = ", ".join(f"{other} {MINUS} {base}" for other in others)
    title, delta = method.name, f"Δ = {against}" if against else ""
    if seeds:
        counts = ", ".join(f"{len(of)} of {group}" for group, of in method.groups.items())
        title = f"{title} over seeds ({counts})"
        notes = [*seed_notes(method.comparison, method.rows, ("deltas",)), *method.footnotes]
    else:
        notes = [
            *([MARKS.format(kind="Δ"), BRACKETS] if deltas else []),
            *ratio_notes(deltas),
            *missing_notes(method.rows, "deltas"),
            *score_notes(method),
        ]
    return from_rows(
        rows,
        title=f"{title}: {delta}" if delta else title,
        notes=notes,
        records=() if seeds else _records(method.rows),
        **BY_TASK,
    )


def _damages(method: MethodLines, damaged: Sequence[Row]) -> list[Table]:
    """Return the table of the damage of each checkpoint (or group of trainings), and of its
    difference from the first's."""
    base, *others = groups = [*method.groups]
    claims = {other: f"{other}’s {MINUS} {base}’s" for other in others}
    rows = []
    for row in damaged:
        cells = _names(row)
        for group in groups:
            cells += _effect_cells(row, f"{group}’s damage", "damages", group)
        for other, claim in claims.items():
            cells += _effect_cells(row, claim, "differences", other, "each" if method.seeds else "")
        effects = [row.effect("damages", group) for group in groups]
        effects += [row.effect("differences", other) for other in others]
        rows.append([*cells, ("Documents", _counts(effects))])
    if method.seeds:
        notes = seed_notes(method.comparison, damaged, ("damages", "differences"))
    else:
        kind = "damages (differences: over all differences of damage)" if others else "damages"
        notes = [
            *(DAMAGE_NOTE, MARKS.format(kind=kind), BRACKETS),
            *ratio_notes(effects_of(method.rows, "damages")),
            *missing_notes(damaged, "damages", "differences"),
            *precision_notes(method.rows),
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


def _records(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return ``cell key`` of each scored cell of ``rows``."""
    entries = {entry.cell: entry for row in rows for entry in row.entries.values()}.values()
    return tuple(f"{e.cell} {e.key[:KEY_DIGITS]}" for e in entries if e.status == "ok")


def _one_model(method: MethodLines) -> list[Table]:
    """Return the table of the damage of one checkpoint: a row per precision."""
    (checkpoint,), comparison = method.groups, method.comparison
    order, rows = [(row.task, row.metric) for row in method.rows], []
    for row in sorted(method.rows, key=lambda row: order.index((row.task, row.metric))):
        cell, effect = f"{checkpoint}/{row.quantizer}", row.effects.get(("damages", checkpoint))
        record, damage = comparison.records.get(cell), comparison.task_damage(cell, row.task)
        bits, size = bits_per_weight(record), gib(record)
        measured = damage.distributions if damage else None
        flips = damage.flips.get(row.metric) if damage else None
        lost = {
            "Damage": effect_text(effect, percent=row.percent),
            INTERVAL: interval_text(effect, percent=row.percent),
            AT_MOST: bound_text(effect, percent=row.percent),
            "KL": significant(measured.kl.mean) if measured else NO_VALUE,
            "KL p99": significant(measured.kl.p99) if measured else NO_VALUE,
            "Flips": f"{flips.right_to_wrong} / {flips.wrong_to_right}" if flips else NO_VALUE,
            "Same top token": f"{100 * measured.top1_agreement:.1f} %" if measured else NO_VALUE,
        }
        rows.append(
            {
                **dict(_names(row)),
                "Bits per weight": NO_VALUE if bits is None else f"{bits:.2f}",
                "GiB": NO_VALUE if size is None else significant(size),
                "Score": entry_text(row.entries[checkpoint], row),
                **(lost if row.quantized else dict.fromkeys(lost, "")),
                "Documents": documents_text(row),
            }
        )
    return from_rows(
        rows,
        title=f"{method.name}: what it costs {checkpoint}",
        notes=(
            *(DAMAGE_NOTE, MARKS.format(kind="damages"), BRACKETS, AT_MOST_NOTE),
            *COST_NOTES,
            *ratio_notes(effects_of(method.rows, "damages")),
            *missing_notes(method.rows, "damages"),
            *score_notes(method),
        ),
        **BY_TASK,
        records=_records(method.rows),
    )


def _names(line: Row) -> Cells:
    """Return the cells task, metric (with an arrow towards better: ``Acc ↑``) and quantization."""
    metric, quantizer = line.metric, line.quantizer
    if metric != NO_VALUE:
        metric = f"{metric_title(metric)} {'↑' if line.higher_is_better else '↓'}"
    if line.precision.in_parts:
        quantizer += f" ({line.precision.words})"
    return list(zip(NAMES, (line.label, metric, quantizer), strict=True))


def entry_text(entry: RowValue, line: Row) -> str:
    """Return a score with its standard error, if it has one, as text; ``failed`` or ``— missing``
    if there is no score."""
    if entry.status == "missing":
        return f"{NO_VALUE} missing"
    if entry.status == "failed":
        return "failed"
    error = "" if entry.stderr is None else f" ± {number(entry.stderr, percent=line.percent)}"
    return number(entry.value, percent=line.percent) + error


def documents_text(line: Row) -> str:
    """Return how many documents were scored, as text: one number if all checkpoints agree, else one
    each; a dash if it is not known."""
    counts = [entry.documents for entry in line.entries.values()]
    numbers = {count for count in counts if count is not None}
    if len(numbers) <= 1:
        return str(next(iter(numbers), NO_VALUE))
    return "/".join(NO_VALUE if count is None else str(count) for count in counts)


def against_table(comparison: Comparison) -> list[Table]:
    """Return a list with the table of the losses of each precision compared with
    ``comparison.against``, by score; [] if no other precision has scores."""
    rows = []
    for row in comparison.seeds or comparison.lines:
        if not row.redundant and (effects := row.of("against").values()):
            cells = _names(row)
            for group in comparison.groups:
                cells += _effect_cells(row, group, "against", group)
            rows.append([*cells, ("Documents", _counts(effects))])
    notes = [
        f"What is lost against {comparison.against}, paired by document; above 0, or above × 1, "
        "the row's precision is worse.",
        MARKS.format(kind="losses"),
        *ratio_notes(effects_of(comparison.lines, "against")),
    ]
    return from_rows(rows, title=f"Against {comparison.against}", notes=notes, **BY_TASK)
