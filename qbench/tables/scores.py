"""Build tables of scores: Δ, damage, what quantization changed, pairs, groups.

Laid out as the softpick paper's tables 8 to 13: one table per quantization method.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from qbench.comparison.chance import kept
from qbench.comparison.changes import MOST_PAIRED
from qbench.comparison.rows import Comparison, Row, RowValue, bits_per_weight, gib, redundant
from qbench.comparison.trainings import training_notes
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
from qbench.metrics import is_percentage
from qbench.records import (
    ANSWERS,
    KEY_DIGITS,
    GridCell,
    GroupScore,
    Record,
    TaskDamage,
)
from qbench.tables.notes import (
    bos_notes,
    cache_notes,
    chance_notes,
    judged_notes,
    prompt_notes,
    single_notes,
)
from qbench.tables.published import printed_cells, printed_notes
from qbench.tables.table import Cells, Table, from_rows
from qbench.text import MINUS, NO_VALUE, group_by_reason, metric_title, number, significant

if TYPE_CHECKING:
    from qbench.statistics import Effect, SeedEffect

INTERVAL = "95 % interval"
AT_MOST = "At most"
KEPT = "Kept"
KEPT_NOTE = f"{KEPT}: accuracy above chance, as a share of the unquantized model's."
AT_MOST_NOTE = f"{AT_MOST}: a larger damage is excluded at 95 % (one-sided)."
NAMES = ("Task", "Metric", "Quantization")
BY_TASK = {"words": len(NAMES), "grouped": True}  # of tables whose rows begin with as many words
MANY_PAIRS = "Precisions among themselves: qbench tables FOLDER --against QUANTIZER."
MARKS = "‡ differs from 0 at 5 % after Holm's correction over all {kind} of this folder."
DAMAGES = "damages (differences: over all differences of damage)"
BRACKETS = "Brackets: 95 % intervals, paired by document."
DAMAGE_NOTE = (
    "Damage: what quantization loses against the same checkpoint unquantized; above 0, or above "
    "× 1, is worse."
)
PRECISION_NOTE = (
    "W, A, KV: bits of weights, activations, KV cache. Simulated: rounded to the format; real: "
    "multiplied in it."
)
COST_NOTE = (
    "KL: divergence from the unquantized model's next-token distributions, nats per token: mean "
    "and 99th percentile."
)
FLIPS_NOTE = "Flips: answers from right to wrong / from wrong to right."


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodLines:
    """Hold what one set of tables shows: the rows of a method and the unquantized ones, over
    some of the checkpoints.

    ``problems`` of cells and ``notes`` stand below the first table.
    """

    comparison: Comparison
    name: str  # of the method
    checkpoints: tuple[str, ...]
    lines: tuple[Row, ...]
    problems: tuple[tuple[GridCell, str], ...]
    notes: tuple[str, ...]

    @property
    def footnotes(self) -> list[str]:
        return [*group_by_reason((cell.cell, text) for cell, text in self.problems), *self.notes]

    @property
    def others(self) -> tuple[str, ...]:
        return self.checkpoints[1:]

    @property
    def quantized(self) -> list[Row]:
        return [line for line in self.lines if line.quantized]

    @property
    def seeds(self) -> list[Row]:
        """The same over several trainings of each kind, where the grid has them."""
        quantizers = {line.quantizer for line in self.lines}
        return [
            line
            for line in self.comparison.seeds
            if line.quantizer in quantizers and not redundant(line, self.comparison.lines)
        ]


def by_method(comparison: Comparison) -> list[MethodLines]:
    """Return a set of tables per quantization method; one set in all for one checkpoint.

    Problems of a cell stand in the first set that shows it.
    """
    alone = len(comparison.checkpoints) == 1
    made, problems = [], comparison.problems()
    ran = {line.method for line in comparison.lines}
    methods = [method for method in comparison.methods if method in ran]
    methods = [None] if alone or not methods else methods
    for method in methods:
        every = [
            line
            for line in comparison.lines
            if (method in (None, line.method) or not line.quantized) and line.task != ANSWERS
        ]
        own = {line.quantizer for line in every}
        if method == methods[-1]:  # precisions that have no rows too
            own |= {cell.quantizer for cell in comparison.grid.cells}
        lines = [line for line in every if not redundant(line, every)]
        hidden = dict.fromkeys(f"{one.task} {one.metric}" for one in every if one not in lines)
        notes = []
        if comparison.grid.skipped:
            notes.append(f"Left out, without data: {', '.join(comparison.grid.skipped)}.")
        notes += [*prompt_notes(comparison), *bos_notes(comparison)]
        if hidden:
            notes.append(
                f"Only in the CSV, since word_perplexity determines them: {', '.join(hidden)}."
            )
        made.append(
            MethodLines(
                comparison=comparison,
                name=next((line.title for line in lines if line.method == method), "Quantization"),
                checkpoints=comparison.checkpoints,
                lines=tuple(lines),
                problems=tuple(one for one in problems if one[0].quantizer in own),
                notes=tuple(notes),
            )
        )
        problems = [one for one in problems if one[0].quantizer not in own]
    return made


def tables_of(method: MethodLines, published: str | None) -> list[Table]:
    """Return the tables of scores with Δ and of damage.

    With several trainings of each kind they are of the means; those of a checkpoint that was
    trained once follow.
    """
    if method.seeds:
        quantized = [line for line in method.seeds if line.quantized and line.damages]
        found = [*_deltas_over_seeds(method), *_damages(method, quantized)]
        single = replace(method.comparison, seeds=())
        for pair in _with_the_first(replace(method, comparison=single, problems=(), notes=())):
            if not {*single.trained_once}.isdisjoint(pair.checkpoints):
                found += tables_of(pair, published)
        return found
    if len(method.checkpoints) > 2:  # a table for each pair stays readable
        return [table for pair in _with_the_first(method) for table in tables_of(pair, published)]
    damaged = any(line.damages for line in method.lines)
    if len(method.checkpoints) == 1 and (damaged or costs(method)) and not published:
        return _one_model(method)
    return [*_deltas(method, published), *_damages(method, method.quantized if damaged else [])]


def _with_the_first(method: MethodLines) -> list[MethodLines]:
    """Return a set for the first and each other checkpoint; a note stands in the first set that
    it is about."""
    made: list[MethodLines] = []
    base, *others = method.checkpoints
    for other in others:
        about = (other,) if made else (base, other)
        made.append(
            replace(
                method,
                checkpoints=(base, other),
                lines=tuple(
                    replace(one, entries=(one.entry(base), one.entry(other)))
                    for one in method.lines
                ),
                problems=tuple(one for one in method.problems if one[0].checkpoint in about),
                notes=() if made else method.notes,
            )
        )
    return made


def missing_notes(rows: Iterable[Row], contrasts: Sequence[str]) -> list[str]:
    """Say why effects have no interval: a line per reason."""
    found = [
        (f"{row.label} {metric_title(row.metric)} {row.quantizer} of {group}", one.reason)
        for row in rows
        for (contrast, group), one in row.missing.items()
        if contrast in contrasts
    ]
    return [f"{NO_INTERVAL} {line}." for line in group_by_reason(found)]


def _effect_cells(line: Row, head: str, contrast: str, group: str, each: str = "") -> Cells:
    """Return an effect and its interval; with a head for ``each``, over seeds, that of every
    training and the seeds' share."""
    effect, percent = line.effect(contrast, group), line.percent
    cells = [
        (head, effect_text(effect, percent=percent)),
        (INTERVAL, interval_text(effect, percent=percent)),
    ]
    if each:
        cells += [(each, each_text(effect, percent=percent)), (SHARE, share_text(effect))]
    return cells


def _deltas(method: MethodLines, published: str | None) -> list[Table]:
    """Return the table of each checkpoint's scores and Δ."""
    comparison, others = method.comparison, method.others
    tested = any(line.deltas for line in method.lines)
    rows = []
    for line in method.lines:
        row = _names(line)
        row += [(name, entry_text(line.entry(name), line)) for name in method.checkpoints]
        for other in others:
            row.append(("Δ", _delta_text(line, other)))
            if tested:
                row += _effect_cells(line, "Δ", "deltas", other)[1:]
        if published:
            row += printed_cells(comparison, line, method.checkpoints, published)
        rows.append([*row, ("Documents", documents_text(line))])
    notes = printed_notes(comparison, method.lines, published) if published else []
    if tested:
        notes += [MARKS.format(kind="Δ"), BRACKETS]
    against = ", ".join(f"{other} {MINUS} {method.checkpoints[0]}" for other in others)
    return from_rows(
        rows,
        title=f"{method.name}: Δ = {against}" if against else method.name,
        notes=[
            *notes,
            *ratio_notes(effect for line in method.lines for effect in line.deltas.values()),
            *missing_notes(method.lines, ("deltas",)),
            *_score_notes(method),
        ],
        records=_records(method.lines),
        **BY_TASK,
    )


def _deltas_over_seeds(method: MethodLines) -> list[Table]:
    """Return the table of the means of each group, every training's score, and Δ."""
    comparison, groups = method.comparison, method.comparison.grid.replicates
    base, *others = groups
    rows = []
    for line in method.seeds:
        row = _names(line)
        for group, members in groups.items():
            row.append((group, number(line.means.get(group), percent=line.percent)))
            row.append((f"{group}, each", values_text(line, members)))
        for group in others:
            name = "Δ" if len(others) == 1 else f"Δ {group}"
            row += _effect_cells(line, name, "deltas", group, f"{name}, each")
        documents = _counts([*line.deltas.values(), *line.scores.values()])
        rows.append([*row, ("Documents", documents)])
    against = ", ".join(f"{group} {MINUS} {base}" for group in others)
    counts = ", ".join(f"{len(members)} of {group}" for group, members in groups.items())
    return from_rows(
        rows,
        title=f"{method.name} over seeds ({counts}){': Δ = ' + against if against else ''}",
        notes=[
            *_seed_notes(comparison, method.seeds, ("deltas",)),
            *training_notes(comparison),
            *method.footnotes,
        ],
        **BY_TASK,
    )


def _damages(method: MethodLines, lines: Sequence[Row]) -> list[Table]:
    """Return the table of what quantization costs each checkpoint or group of trainings, and how
    much more than the first."""
    base, *others = groups = (
        method.comparison.grid.replicates if method.seeds else method.checkpoints
    )
    each = "each" if method.seeds else ""
    claims = {other: f"{other}’s {MINUS} {base}’s" for other in others}
    rows = []
    for line in lines:
        row = _names(line)
        for group in groups:
            row += _effect_cells(line, f"{group}’s damage", "damages", group)
        for other, claim in claims.items():
            row += _effect_cells(line, claim, "differences", other, each)
        effects = [line.damages.get(group) for group in groups]
        effects += [line.differences.get(other) for other in others]
        rows.append([*row, ("Documents", _counts(effects))])
    if method.seeds:
        notes = _seed_notes(method.comparison, lines, ("damages", "differences"))
    else:
        notes = [
            *(DAMAGE_NOTE, MARKS.format(kind=DAMAGES if others else "damages"), BRACKETS),
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


def _counts(effects: Iterable[Effect | SeedEffect | None]) -> str:
    """Return how many documents the effects of a row rest on, each number once."""
    return "/".join(sorted({str(effect.documents) for effect in effects if effect})) or NO_VALUE


def _seed_notes(
    comparison: Comparison, lines: Sequence[Row], contrasts: tuple[str, ...]
) -> list[str]:
    effects = [e for line in lines for name in contrasts for e in getattr(line, name).values()]
    notes = [*SEED_NOTES, SHARE_NOTE]
    if many := sum(map(mostly_seeds, effects)):
        notes.append(f"{SEEDS_NOTE} Here {many} of {len(effects)}.")
    if ratio_notes(effects):
        notes.append(RATIOS_NOTE)
    return [*notes, *precision_notes(lines), order_note(comparison)]


def _score_notes(method: MethodLines) -> list[str]:
    comparison, lines = method.comparison, method.lines
    return [
        *cache_notes(comparison, lines),
        *judged_notes(comparison, lines),
        *method.footnotes,
        *precision_notes(lines),
        *chance_notes(comparison, lines),
        *single_notes(lines),
        *training_notes(comparison),
    ]


def _records(lines: Iterable[Row]) -> tuple[str, ...]:
    entries = {entry.cell: entry for line in lines for entry in line.entries}.values()
    return tuple(f"{one.cell} {one.key[:KEY_DIGITS]}" for one in entries if one.status == "ok")


def _one_model(method: MethodLines) -> list[Table]:
    """Return the table of what quantization costs one checkpoint: a row per precision."""
    (checkpoint,) = method.checkpoints
    records = {
        q: method.comparison.records.get(f"{checkpoint}/{q}") for q in _quantizers(method.lines)
    }
    order = list(dict.fromkeys((line.task, line.metric) for line in method.lines))
    rows = []
    for line in sorted(method.lines, key=lambda one: order.index((one.task, one.metric))):
        record, effect = records[line.quantizer], line.effect("damages", checkpoint)
        cell = f"{checkpoint}/{line.quantizer}"
        costs = _cost_texts([method.comparison.task_damage(cell, line.task)], line.metric)
        rows.append(
            {
                **dict(_names(line)),
                **_size_texts([record]),
                "Score": entry_text(line.entries[0], line),
                "Damage": effect_text(effect, percent=line.percent) if line.quantized else "",
                INTERVAL: interval_text(effect, percent=line.percent) if line.quantized else "",
                AT_MOST: bound_text(effect, percent=line.percent) if line.quantized else "",
                KEPT: kept_text(method.comparison, line, checkpoint),
                **(costs if line.quantized else dict.fromkeys(costs, "")),
                "Documents": documents_text(line),
            }
        )
    return from_rows(
        rows,
        title=f"{method.name}: what it costs {checkpoint}",
        notes=(
            *(DAMAGE_NOTE, MARKS.format(kind="damages"), BRACKETS, AT_MOST_NOTE),
            *([KEPT_NOTE] if method.comparison.chance else []),
            *(COST_NOTE, FLIPS_NOTE),
            *ratio_notes(effect for line in method.lines for effect in line.damages.values()),
            *missing_notes(method.lines, ("damages",)),
            *([MANY_PAIRS] if len(_quantizers(method.quantized)) > MOST_PAIRED else []),
            *_score_notes(method),
        ),
        **BY_TASK,
        records=_records(method.lines),
    )


def costs(method: MethodLines) -> list[Table]:
    """Return the table of what quantization changed, a row per checkpoint; of several trainings
    of one kind the means, and their flips together."""
    comparison = method.comparison
    told: list[tuple[Row, str, list[Record], list[TaskDamage]]] = []
    flipped = _flip_metrics(comparison)
    for line in method.quantized:
        first = next(one for one in method.quantized if one.task == line.task)
        if line.metric != flipped.get(line.task, first.metric):
            continue
        alone = {name: (name,) for name in comparison.trained_once}
        for group, members in {**comparison.groups, **alone}.items():
            cells = [f"{member}/{line.quantizer}" for member in members]
            damages = [comparison.task_damage(cell, line.task) for cell in cells]
            if all(damages):
                records = [comparison.records[cell] for cell in cells]
                told.append((line, group, records, damages))
    rows = [
        {
            "Task": line.label,
            "Quantization": line_names(line)[2],
            "Checkpoint": group,
            **_size_texts(records),
            **_cost_texts(damages, line.metric),
        }
        for line, group, records, damages in told
    ]
    if all(row["GiB"] == NO_VALUE for row in rows):
        rows = [{name: text for name, text in row.items() if name != "GiB"} for row in rows]
    several = " Of trainings of one kind: means, flips added." if comparison.grid.replicates else ""
    names = ", ".join(map(metric_title, dict.fromkeys(flipped.values()))) or "no metric"
    return from_rows(
        rows,
        title=f"{method.name}: what quantization changed",
        notes=(COST_NOTE, f"{FLIPS_NOTE[:-1]}, by {names}.{several}"),
        **BY_TASK,
    )


def kept_text(comparison: Comparison, row: Row, checkpoint: str) -> str:
    share = kept(comparison, row, checkpoint) if row.quantized else None
    return "" if share is None else f"{100 * share:.0f} %"


def _flip_metrics(comparison: Comparison) -> dict[str, str]:
    """Return task → the first of its metrics whose answers are right or wrong."""
    found: dict[str, str] = {}
    for line in comparison.lines:
        for entry in line.entries:
            damage = comparison.task_damage(entry.cell, line.task)
            if damage and line.metric in damage.flips:
                found.setdefault(line.task, line.metric)
    return found


def _cost_texts(damages: Sequence[TaskDamage | None], metric: str) -> dict[str, str]:
    """Return KL (mean, 99th percentile) and top-1 agreement as means, flips as the sum."""
    told = [one.distributions for one in damages if one and one.distributions]
    flips = [one.flips[metric] for one in damages if one and metric in one.flips]
    whole = len(told) == len(damages)
    lost, gained = (sum(getattr(f, n) for f in flips) for n in ("right_to_wrong", "wrong_to_right"))
    same = fmean(one.top1_agreement for one in told) if whole else None
    return {
        "KL": significant(fmean(one.kl.mean for one in told)) if whole else NO_VALUE,
        "KL p99": significant(fmean(one.kl.p99 for one in told)) if whole else NO_VALUE,
        "Flips": f"{lost} / {gained}" if len(flips) == len(damages) else NO_VALUE,
        "Same top token": NO_VALUE if same is None else f"{100 * same:.1f} %",
    }


def _size_texts(records: Sequence[Record | None]) -> dict[str, str]:
    """Return bits per weight and GiB, means."""
    bits = [bits_per_weight(record) for record in records]
    size = [gib(record) for record in records]
    return {
        "Bits per weight": NO_VALUE if None in bits else f"{fmean(bits):.2f}",
        "GiB": NO_VALUE if None in size else significant(fmean(size)),
    }


def pair_tables(comparison: Comparison) -> list[Table]:
    """Return one checkpoint's quantized precisions among themselves, if any pair differs or was
    asked for; nothing if there are no pairs."""
    if not any(getattr(one.effect, "significant", False) for one in comparison.pairs):
        return []
    rows = []
    for one in comparison.pairs:
        effect = one.effect
        p_holm = getattr(effect, "p_holm", None)
        rows.append(
            {
                "Task": one.label,
                "Metric": metric_text(one),
                "Pair": one.told,
                "Loss": effect_text(effect, percent=one.percent),
                INTERVAL: interval_text(effect, percent=one.percent),
                "p (Holm)": NO_VALUE if p_holm is None else f"{p_holm:.2g}",
                "Documents": str(one.documents),
            }
        )
    tested = [one.effect for one in comparison.pairs if hasattr(one.effect, "interval")]
    return from_rows(
        rows,
        title="Quantization: precisions among themselves",
        notes=(
            "Loss: what the first precision loses against the second, paired by document; above "
            "0, or above × 1, the first is worse.",
            f"‡ and p: after Holm's correction over all {len(tested)} pairs.",
            *ratio_notes(tested),
        ),
        **BY_TASK,
    )


def group_tables(comparison: Comparison) -> list[Table]:
    """Return the table of groups of tasks that have no row of their own, since their tasks count
    alike."""
    rows = []
    for quantizer in _quantizers(comparison.lines):
        records = [comparison.records.get(f"{name}/{quantizer}") for name in comparison.checkpoints]
        scores = [
            {(g.group, g.metric): g for g in one.other_groups} if one else {} for one in records
        ]
        for known in dict.fromkeys(name for of_one in scores for name in of_one):
            like = next(of_one[known] for of_one in scores if known in of_one)
            percent = is_percentage(like.metric)
            texts = [_score_text(of_one.get(known), percent=percent) for of_one in scores]
            names = (like.label, metric_text(like), quantizer)
            rows.append(
                [
                    *zip(("Group", *NAMES[1:]), names, strict=True),
                    *zip(comparison.checkpoints, texts, strict=True),
                    ("Documents", str(like.documents)),
                ]
            )
    rows = sorted(rows, key=lambda row: row[:2])
    notes = ("Means over a group's tasks, as lm-eval weights them.",)
    return from_rows(rows, title="Groups of tasks", notes=notes, **BY_TASK)


def _score_text(score: RowValue | GroupScore | None, *, percent: bool) -> str:
    """Return a score with its standard error."""
    if score is None:
        return NO_VALUE
    error = "" if score.stderr is None else f" ± {number(score.stderr, percent=percent)}"
    return number(score.value, percent=percent) + error


def _quantizers(lines: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(line.quantizer for line in lines))


def line_names(line: Row) -> tuple[str, str, str]:
    """Return task, metric with the arrow of what is better, and quantization."""
    quantizer = line.quantizer
    if line.precision.in_parts:
        quantizer += f" ({line.precision.words})"
    return line.label, metric_text(line), quantizer


def _names(line: Row) -> Cells:
    return list(zip(NAMES, line_names(line), strict=True))


def entry_text(entry: RowValue, line: Row) -> str:
    """Return the score with its standard error; ``failed`` or ``— missing`` if there is none."""
    if entry.status == "missing":
        return f"{NO_VALUE} missing"
    if entry.status == "failed":
        return "failed"
    return _score_text(entry, percent=line.percent)


def _delta_text(line: Row, checkpoint: str) -> str:
    """Return Δ as the papers print it, with its mark of significance."""
    text = number(line.delta(checkpoint), percent=line.percent, signed=True)
    effect = line.deltas.get(checkpoint)
    return text + (effect.mark if effect else "")


def ratio_notes(effects: Iterable[Effect]) -> list[str]:
    return [RATIO_NOTE] if any(effect.kind == "log ratio" for effect in effects) else []


def precision_notes(lines: Iterable[Row]) -> list[str]:
    """Return a note on precisions such as W4A8, and one with the scheme of weights that are
    rounded to a grid: symmetric or not, group size, column order."""
    lines = list(lines)
    notes = [PRECISION_NOTE] if any(line.precision.in_parts for line in lines) else []
    schemes = {
        line.quantizer: line.precision.weights.scheme for line in lines if line.precision.weights
    }
    named = [f"{quantizer} is {scheme}" for quantizer, scheme in schemes.items()
             if "symmetric" in scheme]  # fmt: skip
    return [*notes, *([f"Weights: {'; '.join(named)}."] if named else [])]


def documents_text(line: Row) -> str:
    """Return how many documents the checkpoints scored: one number if they agree, else one for
    each."""
    counts = [entry.documents for entry in line.entries]
    known = {count for count in counts if count is not None}
    if len(known) <= 1:
        return str(next(iter(known), NO_VALUE))
    return "/".join(NO_VALUE if count is None else str(count) for count in counts)
