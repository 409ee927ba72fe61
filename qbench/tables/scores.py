"""Comparison → tables of scores: Δ, damage, what quantization changed, pairs, groups.

Laid out as the softpick paper's tables 8 to 13: one table a quantization method.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from qbench.comparison.changes import MOST_PAIRED, training_notes
from qbench.comparison.lines import Comparison, Entry, Line, redundant
from qbench.comparison.wording import RATIO_NOTE, effect_text, interval_text, metric_text
from qbench.metrics import is_percentage
from qbench.published import printed
from qbench.records import Damage, Record, TaskDamage
from qbench.store import KEY_DIGITS
from qbench.tables.notes import cache_notes, chance_notes, judged_notes, prompt_notes
from qbench.tables.published import models, printed_cells, printed_notes
from qbench.tables.table import Table
from qbench.text import MINUS, NO_VALUE, metric_title, number, significant, together

if TYPE_CHECKING:
    from qbench.statistics import Effect

INTERVAL = "95 % interval"
NAMES = ("Task", "Metric", "Quantization")
BELOW_NOISE = "≈"
MANY_PAIRS = "Precisions among themselves: qbench tables FOLDER --against QUANTIZER."
NOISE_NOTE = f"{BELOW_NOISE}: no larger than what batches alone moved the unquantized scores by."
MARKS = (
    "Differs from 0 at 5 %: ‡ after Holm's correction over all {kind}, † after "
    "Benjamini–Hochberg's only."
)
DIFFERENCES = " (of differences of damage: over all of them)"
BRACKETS = "Brackets: 95 % intervals, paired by document."
DAMAGE_NOTE = "Damage: quantized minus unquantized, of the same checkpoint."
PRECISION_NOTE = (
    "W, A, KV: bits of weights, activations, KV cache. Simulated: rounded to the format; real: "
    "multiplied in it."
)
COST_NOTE = (
    "KL: divergence from the unquantized model's next-token distributions, nats a token: mean and "
    "99th percentile."
)
FLIPS_NOTE = "Flips: answers from right to wrong / from wrong to right."


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one set of tables is of: the lines of a method and the unquantized ones, over some of
    the checkpoints. ``problems`` stand below the first table."""

    comparison: Comparison
    name: str  # of the method
    checkpoints: tuple[str, ...]
    lines: tuple[Line, ...]
    problems: tuple[str, ...]

    @property
    def others(self) -> tuple[str, ...]:
        return self.checkpoints[1:]

    @property
    def quantized(self) -> list[Line]:
        return [line for line in self.lines if line.quantized]


def parts(comparison: Comparison) -> list[Part]:
    """One a quantization method; one checkpoint alone has one of all. What is wrong with a cell
    stands in the first part that has it."""
    alone = len(comparison.checkpoints) == 1
    made, problems = [], comparison.problems()
    for method in [None] if alone else comparison.methods:
        every = [
            line for line in comparison.lines if method in (None, line.method) or not line.quantized
        ]
        own = {line.quantizer for line in every}
        lines = [line for line in every if not redundant(line, every)]
        hidden = dict.fromkeys(f"{one.task} {one.metric}" for one in every if one not in lines)
        told = together(one for one in problems if _quantizer_of(one) in own)
        problems = [one for one in problems if _quantizer_of(one) not in own]
        if comparison.grid.skipped:
            told.append(f"Left out, without data: {', '.join(comparison.grid.skipped)}.")
        told += prompt_notes(comparison)
        if hidden:
            told.append(
                f"Only in the CSV, since word_perplexity determines them: {', '.join(hidden)}."
            )
        made.append(
            Part(
                comparison=comparison,
                name=next((line.title for line in lines if line.method == method), "Quantization"),
                checkpoints=comparison.checkpoints,
                lines=tuple(lines),
                problems=tuple(told),
            )
        )
    return made


def _quantizer_of(problem: str) -> str:
    return problem.split(":", 1)[0].rsplit("/", 1)[-1]


def tables_of(part: Part, published: str | None) -> list[Table]:
    if len(part.checkpoints) > 2:  # a table for each pair stays readable
        return [table for pair in _with_the_first(part) for table in tables_of(pair, published)]
    damaged = any(line.damages for line in part.lines)
    if len(part.checkpoints) == 1 and damaged and not published:
        return [_one_model(part)]
    made = [_deltas(part, published)]
    if damaged:
        made.append(_damages(part))
    return made


def _with_the_first(part: Part) -> list[Part]:
    """A part for the first and each other checkpoint; a problem stands in the first that shows
    the checkpoint it is about."""
    base, made, problems = part.checkpoints[0], [], list(part.problems)
    for other in part.others:
        pair = (base, other)
        own = [
            problem
            for problem in problems
            if not (named := [n for n in part.checkpoints if problem.startswith(f"{n}/")])
            or named[0] in pair
        ]
        problems = [problem for problem in problems if problem not in own]
        lines = (replace(one, entries=tuple(map(one.entry, pair))) for one in part.lines)
        made.append(replace(part, checkpoints=pair, lines=tuple(lines), problems=tuple(own)))
    return made


def _deltas(part: Part, published: str | None) -> Table:
    """Scores of each checkpoint, and Δ."""
    comparison, others = part.comparison, part.others
    paper = printed(published) if published else {}
    tested = any(line.deltas for line in part.lines)
    against = ", ".join(f"{other} {MINUS} {part.checkpoints[0]}" for other in others)
    head = [*NAMES, *part.checkpoints]
    for _ in others:
        head += ["Δ", INTERVAL] if tested else ["Δ"]
    if paper:
        head += [f"{name}, printed" for name in (*part.checkpoints, *("Δ" for _ in others))]
    rows = []
    for line in part.lines:
        cells = [*line_names(line), *(entry_text(entry, line) for entry in line.entries)]
        for other in others:
            cells.append(_delta_text(comparison, line, other))
            if tested:
                cells.append(interval_text(line.deltas.get(other), percent=line.percent))
        if paper:
            cells += printed_cells(line, others, paper, models(comparison))
        rows.append((*cells, documents_text(line)))
    return Table(
        title=f"{part.name}: Δ = {against}" if against else part.name,
        head=(*head, "Documents"),
        rows=tuple(rows),
        notes=(
            *(printed_notes(part.lines, paper, published) if published else ()),
            *((MARKS.format(kind="Δ of the grid"), BRACKETS) if tested else ()),
            *ratio_notes(effect for line in part.lines for effect in line.deltas.values()),
            *_score_notes(part),
        ),
        words=len(NAMES),
        grouped=True,
        records=_records(part.lines),
    )


def _score_notes(part: Part) -> list[str]:
    comparison, lines = part.comparison, part.lines
    stale = ", ".join(comparison.floors.stale)
    return [
        *([NOISE_NOTE] if comparison.floors.of else []),
        *([f"noise.json has other settings for {stale}: run qbench noise again"] if stale else []),
        *cache_notes(comparison, lines),
        *judged_notes(comparison, lines),
        *part.problems,
        *precision_notes(lines),
        *chance_notes(lines),
        *training_notes(comparison),
    ]


def _records(lines: Iterable[Line]) -> tuple[str, ...]:
    entries = {entry.cell: entry for line in lines for entry in line.entries}.values()
    return tuple(f"{one.cell} {one.key[:KEY_DIGITS]}" for one in entries if one.status == "ok")


def _one_model(part: Part) -> Table:
    """What quantization costs one checkpoint: a row a precision."""
    (checkpoint,) = part.checkpoints
    records = {q: part.comparison.records.get(f"{checkpoint}/{q}") for q in _quantizers(part.lines)}
    order = list(dict.fromkeys((line.task, line.metric) for line in part.lines))
    rows = []
    for line in sorted(part.lines, key=lambda one: order.index((one.task, one.metric))):
        record, effect = records[line.quantizer], line.damages.get(checkpoint)
        rows.append(
            (
                *line_names(line),
                *_size_texts([record], sized=True),
                entry_text(line.entries[0], line),
                *(effect_texts(effect, line) if line.quantized else ("", "")),
                *(_cost_texts([record], line.task, line.metric) if line.quantized else [""] * 4),
                documents_text(line),
            )
        )
    return Table(
        title=f"{part.name}: what it costs {checkpoint}",
        head=(
            *(*NAMES, "Bits a weight", "GiB", "Score", "Damage", INTERVAL),
            *(*COSTS, "Documents"),
        ),
        rows=tuple(rows),
        notes=(
            *(DAMAGE_NOTE, MARKS.format(kind="damages"), BRACKETS, COST_NOTE, FLIPS_NOTE),
            *ratio_notes(effect for line in part.lines for effect in line.damages.values()),
            *([MANY_PAIRS] if len(_quantizers(part.quantized)) > MOST_PAIRED else []),
            *_score_notes(part),
        ),
        words=len(NAMES),
        grouped=True,
        records=_records(part.lines),
    )


def _damages(part: Part) -> Table:
    """What quantization costs each checkpoint, and how much more than the first: the claim."""
    base, others = part.checkpoints[0], part.others
    rows = []
    for line in part.quantized:
        effects = [line.damages.get(checkpoint) for checkpoint in part.checkpoints]
        effects += [line.differences.get(other) for other in others]
        texts = (text for effect in effects for text in effect_texts(effect, line))
        documents = "/".join(sorted({str(effect.documents) for effect in effects if effect}))
        rows.append((*line_names(line), *texts, documents or NO_VALUE))
    claims = [f"{other}’s {MINUS} {base}’s" for other in others]
    columns = [*(f"{checkpoint}’s damage" for checkpoint in part.checkpoints), *claims]
    return Table(
        title=f"{part.name}: damage{', and ' + ', '.join(claims) if claims else ''}",
        head=(*NAMES, *(text for column in columns for text in (column, INTERVAL)), "Documents"),
        rows=tuple(rows),
        notes=(
            *(DAMAGE_NOTE, MARKS.format(kind=f"damages{DIFFERENCES if others else ''}"), BRACKETS),
            *ratio_notes(effect for line in part.lines for effect in line.damages.values()),
            *precision_notes(part.lines),
        ),
        words=len(NAMES),
        grouped=True,
    )


COSTS = ("KL", "KL p99", "Flips", "Same top token")


def costs(part: Part) -> list[Table]:
    """What quantization changed, a row a checkpoint; of several trainings of one kind the means,
    and their flips together."""
    comparison = part.comparison
    told: list[tuple[Line, str, list[Record | None]]] = []
    flipped = _flip_metrics(comparison)
    for line in part.quantized:
        first = next(one for one in part.quantized if one.task == line.task)
        if line.metric != flipped.get(line.task, first.metric):
            continue
        for group, members in comparison.groups.items():
            records = [comparison.records.get(f"{member}/{line.quantizer}") for member in members]
            if all(task_damage(record, line.task) for record in records):
                told.append((line, group, records))
    if not told:
        return []
    sized = any(gib(record) is not None for _, _, records in told for record in records)
    rows = tuple(
        (
            line.label,
            line_names(line)[2],
            group,
            *_size_texts(records, sized=sized),
            *_cost_texts(records, line.task, line.metric),
        )
        for line, group, records in told
    )
    several = " Of trainings of one kind: means, flips added." if comparison.grid.replicates else ""
    names = ", ".join(map(metric_title, dict.fromkeys(flipped.values()))) or "no metric"
    return [
        Table(
            title=f"{part.name}: what quantization changed",
            head=(
                *("Task", "Quantization", "Checkpoint", "Bits a weight"),
                *(*(["GiB"] if sized else []), *COSTS),
            ),
            rows=rows,
            notes=(
                COST_NOTE,
                f"{FLIPS_NOTE[:-1]}, by {names}.{several}",
            ),
            words=3,
            grouped=True,
        )
    ]


def _flip_metrics(comparison: Comparison) -> dict[str, str]:
    """Task → the first of its metrics whose answers are right or wrong."""
    found: dict[str, str] = {}
    for line in comparison.lines:
        for entry in line.entries:
            damage = task_damage(comparison.records.get(entry.cell), line.task)
            if damage and line.metric in damage.flips:
                found.setdefault(line.task, line.metric)
    return found


def task_damage(record: Record | None, task: str) -> TaskDamage | None:
    """What was measured of one task; None where nothing was."""
    measured = record.damage if record else None
    return measured.tasks.get(task) if isinstance(measured, Damage) else None


def _cost_texts(records: Sequence[Record | None], task: str, metric: str) -> list[str]:
    """KL (mean, 99th percentile), flips, top-1 agreement: means, of flips the sum."""
    damages = [task_damage(record, task) for record in records]
    told = [one.distributions for one in damages if one and one.distributions]
    flips = [one.flips[metric] for one in damages if one and metric in one.flips]
    whole = len(told) == len(records)
    lost, gained = (sum(getattr(f, n) for f in flips) for n in ("right_to_wrong", "wrong_to_right"))
    return [
        significant(fmean(one.kl.mean for one in told)) if whole else NO_VALUE,
        significant(fmean(one.kl.p99 for one in told)) if whole else NO_VALUE,
        f"{lost} / {gained}" if len(flips) == len(records) else NO_VALUE,
        f"{100 * fmean(one.top1_agreement for one in told):.1f} %" if whole else NO_VALUE,
    ]


def _size_texts(records: Sequence[Record | None], *, sized: bool) -> list[str]:
    """Bits a weight, and GiB where they are shown."""
    bits = [bits_per_weight(record) if record else None for record in records]
    size = [gib(record) for record in records]
    return [
        NO_VALUE if None in bits else f"{fmean(bits):.2f}",
        *([NO_VALUE if None in size else significant(fmean(size))] if sized else []),
    ]


BITS = {"bfloat16": 16.0, "float16": 16.0, "float32": 32.0, "bf16": 16.0, "fp16": 16.0,
        "fp32": 32.0}  # fmt: skip


def bits_per_weight(record: Record) -> float | None:
    """As stored, of all matrices outside embeddings and LM head where the audit counted them, else
    of the quantized modules; of an unquantized cell that of its dtype."""
    if record.audit and record.audit.size:
        return record.audit.size.bits_per_weight
    if record.quantized:
        return record.audit.bits_per_weight if record.audit else None
    settings = record.key_parts.get("quantizer", {})
    dtype = settings.get("dtype") if isinstance(settings, dict) else None
    return BITS.get(str(dtype), BITS.get(record.quantizer))


def gib(record: Record | None) -> float | None:
    """Of all weights, as they are stored; None in records of earlier versions."""
    return record.audit.size.gib if record and record.audit and record.audit.size else None


def pair_tables(comparison: Comparison) -> list[Table]:
    """One checkpoint's quantized precisions among themselves; nothing where there are no pairs."""
    order = list(dict.fromkeys((one.task, one.metric) for one in comparison.pairs))
    rows = []
    for one in sorted(comparison.pairs, key=lambda one: order.index((one.task, one.metric))):
        effect, shown = one.effect, {"percent": one.percent}
        p = NO_VALUE if effect is None or effect.p_holm is None else f"{effect.p_holm:.2g}"
        name = metric_text(one)
        texts = (effect_text(effect, **shown), interval_text(effect, **shown), p)
        rows.append((one.label, name, one.told, *texts, str(one.documents)))
    if not rows:
        return []
    return [
        Table(
            title="Quantization: precisions among themselves",
            head=("Task", "Metric", "Pair", "Difference", INTERVAL, "p (Holm)", "Documents"),
            rows=tuple(rows),
            notes=(
                "Difference: the first minus the second precision, paired by document.",
                "‡ and p: after Holm's correction over all pairs, † after Benjamini–Hochberg's.",
                *ratio_notes(one.effect for one in comparison.pairs if one.effect),
            ),
            words=3,
            grouped=True,
        )
    ]


def group_tables(comparison: Comparison) -> list[Table]:
    """Scores of groups of tasks such as mmlu, as lm-eval aggregates them."""
    rows = []
    for quantizer in _quantizers(comparison.lines):
        records = [comparison.records.get(f"{name}/{quantizer}") for name in comparison.checkpoints]
        scores = [{(g.group, g.metric): g for g in one.groups} if one else {} for one in records]
        for known in dict.fromkeys(name for of_one in scores for name in of_one):
            like = next(of_one[known] for of_one in scores if known in of_one)
            texts = [_group_text(of_one.get(known)) for of_one in scores]
            name = metric_text(like)
            rows.append((like.label, name, quantizer, *texts, str(like.documents)))
    if not rows:
        return []
    return [
        Table(
            title="Groups of tasks",
            head=("Group", *NAMES[1:], *comparison.checkpoints, "Documents"),
            rows=tuple(sorted(rows, key=lambda row: row[:2])),
            notes=("Means over a group's tasks, as lm-eval weights them.",),
            words=3,
            grouped=True,
        )
    ]


def _group_text(score: Any) -> str:
    if score is None:
        return NO_VALUE
    percent = is_percentage(score.metric)
    text = number(score.value, percent=percent)
    error = "" if score.stderr is None else f" ± {number(score.stderr, percent=percent)}"
    return text + error


def _quantizers(lines: Iterable[Line]) -> list[str]:
    return list(dict.fromkeys(line.quantizer for line in lines))


def line_names(line: Line) -> tuple[str, str, str]:
    """Task, metric with the arrow of what is better, and quantization."""
    quantizer = line.quantizer
    if line.precision.in_parts:
        quantizer += f" ({line.precision.words})"
    return line.label, metric_text(line), quantizer


def effect_texts(effect: Effect | None, line: Line) -> tuple[str, str]:
    """An effect with its mark, and its interval."""
    shown = {"percent": line.percent}
    return effect_text(effect, **shown), interval_text(effect, **shown)


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


def _delta_text(comparison: Comparison, line: Line, checkpoint: str) -> str:
    """Δ as the papers print it, with its marks of significance and of the noise floor."""
    text = number(line.delta(checkpoint), percent=line.percent, signed=True)
    effect = line.deltas.get(checkpoint)
    below = comparison.below_noise(line, checkpoint)
    return text + (effect.mark if effect else "") + (BELOW_NOISE if below else "")


def ratio_notes(effects: Iterable[Effect]) -> list[str]:
    return [RATIO_NOTE] if any(effect.kind == "log ratio" for effect in effects) else []


def precision_notes(lines: Iterable[Line]) -> list[str]:
    return [PRECISION_NOTE] if any(line.precision.in_parts for line in lines) else []


def documents_text(line: Line) -> str:
    """One number where all checkpoints saw as many documents, else one for each."""
    counts = [entry.documents for entry in line.entries]
    known = {count for count in counts if count is not None}
    if len(known) <= 1:
        return str(next(iter(known), NO_VALUE))
    return "/".join(NO_VALUE if count is None else str(count) for count in counts)
