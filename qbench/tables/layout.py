"""Tables as text: the same head, rows and notes for Markdown, LaTeX and HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader

from qbench.comparison.changes import training_notes
from qbench.comparison.lines import Comparison, Entry, Line
from qbench.comparison.wording import RATIO_NOTE, arrow, effect_text, interval_text
from qbench.published import printed
from qbench.records import Damage, Record
from qbench.store import KEY_DIGITS
from qbench.tables.table import (
    PART_HEADS,
    Table,
    bits_per_weight,
    cache_notes,
    chance_notes,
    judged_notes,
    labelled_parts,
    models,
    pairs,
    parts_alone,
    printed_cells,
    printed_notes,
)
from qbench.text import MINUS, NO_VALUE, for_markdown, metric_title, number, significant, table

if TYPE_CHECKING:
    from qbench.statistics import Effect

BELOW_NOISE = "≈"
NOISE_LEGEND = (
    f"{BELOW_NOISE}: no larger than what another batch order and size moved the unquantized "
    "scores by (noise.json)."
)
INTERVAL = "95 % interval"  # how heads of columns with intervals begin
WORDS = 3  # the first columns hold words, the others numbers
LEGEND = (
    "Δ differs from 0 at 5 %: ‡ after Holm's correction over all Δ of the grid, † after "
    "Benjamini–Hochberg's only. Brackets hold 95 % intervals, paired by document."
)
DAMAGE_LEGEND = (
    "Damage: quantized minus unquantized, of the same checkpoint. It differs from 0 at 5 %: ‡ "
    "after Holm's correction over all damages{differences}, † after Benjamini–Hochberg's only. "
    "Brackets hold 95 % intervals, paired by document."
)
PRECISION_LEGEND = (
    "In brackets: bits of weights (W), activations (A) and the KV cache (KV), 16 where they are "
    "not quantized. Simulated: activations rounded to the format, multiplied in a wider one; real: "
    "multiplied in the format."
)
PAIRS_LEGEND = (
    "Difference: the first minus the second precision, paired by document. ‡ and p (Holm): "
    "corrected over all pairs. † after Benjamini–Hochberg's only."
)
DISTANCES = ("KL", "KL p99", "Flips", "Same top token")
DIFFERENCES = " (of differences of damage: over all of them)"


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


def layouts(comparison: Comparison, table: Table, *, published: str | None = None) -> list[Layout]:
    """The delta table, and below it that of damage where there is any.

    ``published`` adds what a paper prints for the same cells. Raises RecipeError where it is
    unknown.
    """
    several = len(table.checkpoints) > 2 and not comparison.grid.replicates
    if several:  # a table for each pair stays readable
        found = pairs(table)
        return [one for pair in found for one in layouts(comparison, pair, published=published)]
    one = len(comparison.checkpoints) == 1 and not published
    if one and any(row.line.damages for row in table.rows):
        return [_alone(comparison, table)]
    made = [_delta(comparison, table, published)]
    if any(row.line.damages for row in table.rows):
        made.append(_damage(comparison, table))
    below = (_predictions(comparison, table), _by_part(comparison, table))
    return [*made, *(one for one in below if one is not None)]


def _delta(comparison: Comparison, table: Table, published: str | None) -> Layout:
    paper = printed(published) if published else {}
    others = table.checkpoints[1:]
    tested = any(row.line.deltas for row in table.rows)
    single = len(others) == 1
    head = ["Task", "Metric", "Quantization", *table.checkpoints]
    for other in others:
        head.append("Δ" if single else f"Δ {other}")
        if tested:
            head.append(INTERVAL if single else f"{INTERVAL} {other}")
    if paper:
        head += [f"{checkpoint}, printed" for checkpoint in table.checkpoints]
        head += [f"Δ{'' if single else ' ' + other}, printed" for other in others]
    head.append("Documents")
    rows = []
    for row in table.rows:
        line = row.line
        cells = [*line_names(line, begins_task=row.begins_task)]
        cells += [entry_text(entry, line) for entry in line.entries]
        for other in others:
            cells.append(delta_text(comparison, line, other))
            if tested:
                cells.append(interval_text(line.deltas.get(other), percent=line.percent))
        if paper:
            cells += printed_cells(line, others, paper, models(comparison))
        cells.append(documents_text(line))
        rows.append(tuple(cells))
    notes = [*([LEGEND] if tested else []), *_ratio_notes(table, "deltas")]
    notes += [
        *noise_notes(comparison),
        *cache_notes(comparison, table),
        *judged_notes(comparison, table),
        *table.notes,
    ]
    notes += [*_precision_notes(table), *chance_notes(table), *training_notes(comparison)]
    if paper:
        notes[:0] = printed_notes(table, paper, published)
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


def _alone(comparison: Comparison, table: Table) -> Layout:
    """What quantization costs one checkpoint: a row a precision, all in one table."""
    (checkpoint,) = table.checkpoints
    rows, begins = [], []
    order = list(dict.fromkeys((row.line.task, row.line.metric) for row in table.rows))
    lines = sorted(
        (row.line for row in table.rows), key=lambda line: order.index((line.task, line.metric))
    )
    for line, before in zip(lines, [None, *lines], strict=False):
        begins.append(before is None or line.task != before.task)
        record = comparison.records.get(f"{checkpoint}/{line.quantizer}")
        bits = bits_per_weight(record) if record else None
        rows.append(
            (
                *line_names(line, begins_task=begins[-1]),
                NO_VALUE if bits is None else f"{bits:.2f}",
                size_text(record),
                entry_text(line.entries[0], line),
                *_cost(line, line.damages.get(checkpoint), record),
                documents_text(line),
            )
        )
    delta = _delta(comparison, table, None)
    return Layout(
        title=f"{table.name}: what it costs {checkpoint}",
        method=table.method,
        head=(
            *("Task", "Metric", "Quantization", "Bits a weight", "GiB", "Score", "Damage"),
            *(INTERVAL, *DISTANCES, "Documents"),
        ),
        rows=tuple(rows),
        begins_task=tuple(begins),
        notes=(
            DAMAGE_LEGEND.format(differences=""),
            KL_NOTE,
            *_ratio_notes(table, "damages"),
            *delta.notes,
        ),
        keys=delta.keys,
    )


def _cost(line: Line, effect: Effect | None, record: Record | None) -> tuple[str, ...]:
    """Damage with its interval, then ``DISTANCES``; nothing of an unquantized cell."""
    if not line.quantized:
        return ("",) * (2 + len(DISTANCES))
    return (
        effect_text(effect, percent=line.percent),
        interval_text(effect, percent=line.percent),
        *_distances(line, record),
    )


def _distances(line: Line, record: Record | None) -> tuple[str, ...]:
    """KL (mean, 99th percentile), flips, top-1 agreement."""
    found = None
    if record is not None and isinstance(record.damage, Damage):
        found = record.damage.tasks.get(line.task)
    told = found.distributions if found else None
    flips = found.flips.get(line.metric) if found else None
    return (
        significant(told.kl.mean) if told else NO_VALUE,
        significant(told.kl.p99) if told else NO_VALUE,
        f"{flips.right_to_wrong} / {flips.wrong_to_right}" if flips else NO_VALUE,
        f"{100 * told.top1_agreement:.1f} %" if told else NO_VALUE,
    )


def _damage(comparison: Comparison, table: Table) -> Layout:
    """What quantization costs each checkpoint, and how much more than the baseline: the claim."""
    base, others = table.checkpoints[0], table.checkpoints[1:]
    head = ["Task", "Metric", "Quantization"]
    for checkpoint in table.checkpoints:
        head += [f"{checkpoint}’s damage", INTERVAL]
    for other in others:
        head += [f"{other}’s {MINUS} {base}’s", INTERVAL]
    head.append("Documents")
    rows, begins, last = [], [], None
    for line in (row.line for row in table.rows if row.line.quantized):
        begins.append(line.task != last)
        last = line.task
        cells = line_names(line, begins_task=begins[-1])
        effects = [line.damages.get(checkpoint) for checkpoint in table.checkpoints]
        effects += [line.differences.get(other) for other in others]
        for effect in effects:
            cells.append(effect_text(effect, percent=line.percent))
            cells.append(interval_text(effect, percent=line.percent))
        documents = {str(effect.documents) for effect in effects if effect}
        rows.append((*cells, "/".join(sorted(documents)) or NO_VALUE))
    claim = ", ".join(f"{other}’s {MINUS} {base}’s" for other in others)
    legend = DAMAGE_LEGEND.format(differences=DIFFERENCES if others else "")
    return Layout(
        title=f"{table.name}: damage{', and ' + claim if claim else ''}",
        method=table.method,
        head=tuple(head),
        rows=tuple(rows),
        begins_task=tuple(begins),
        notes=(legend, *_ratio_notes(table, "damages"), *_precision_notes(table)),
        keys=(),
    )


def _predictions(comparison: Comparison, table: Table) -> Layout | None:
    """How far quantized predictions are from the unquantized ones, by checkpoint; None where no
    record says so."""
    rows, begins, last = [], [], None
    for line in (row.line for row in table.rows if row.line.quantized):
        records = [comparison.records.get(f"{one}/{line.quantizer}") for one in table.checkpoints]
        found = [_distances(line, record) for record in records]
        if all(text == NO_VALUE for texts in found for text in texts):
            continue
        begins.append(line.task != last)
        last = line.task
        bits = [bits_per_weight(record) if record else None for record in records]
        texts = dict.fromkeys(NO_VALUE if one is None else f"{one:.2f}" for one in bits)
        cells = [*line_names(line, begins_task=begins[-1]), " / ".join(texts)]
        rows.append((*cells, *(text for of in found for text in of)))
    if not rows:
        return None
    names = (f"{checkpoint}: {what}" for checkpoint in table.checkpoints for what in DISTANCES)
    return Layout(
        title=f"{table.name}: predictions against the unquantized model's",
        method=table.method,
        head=("Task", "Metric", "Quantization", "Bits a weight", *names),
        rows=tuple(rows),
        begins_task=tuple(begins),
        notes=(KL_NOTE,),
        keys=(),
    )


def pair_layout(comparison: Comparison) -> Layout | None:
    """One checkpoint's quantized precisions among themselves; None where there are no pairs."""
    rows, begins, last = [], [], None
    order = list(dict.fromkeys((one.task, one.metric) for one in comparison.pairs))
    for one in sorted(comparison.pairs, key=lambda one: order.index((one.task, one.metric))):
        begins.append(one.task != last)
        last = one.task
        effect = one.effect
        rows.append(
            (
                one.label if begins[-1] else "",
                f"{metric_title(one.metric)} {'↑' if one.higher_is_better else '↓'}",
                one.told,
                effect_text(effect, percent=one.percent),
                interval_text(effect, percent=one.percent),
                NO_VALUE if effect is None or effect.p_holm is None else f"{effect.p_holm:.2g}",
                str(one.documents),
            )
        )
    if not rows:
        return None
    ratios = any(one.effect and one.effect.kind == "log ratio" for one in comparison.pairs)
    return Layout(
        title="Quantization: precisions among themselves",
        method="pairs",
        head=("Task", "Metric", "Pair", "Difference", INTERVAL, "p (Holm)", "Documents"),
        rows=tuple(rows),
        begins_task=tuple(begins),
        notes=(PAIRS_LEGEND, *([RATIO_NOTE] if ratios else [])),
        keys=(),
    )


def size_text(record: Record | None) -> str:
    """GiB of all weights as stored."""
    size = record.audit.size if record is not None and record.audit is not None else None
    return NO_VALUE if size is None else significant(size.gib)


def _by_part(comparison: Comparison, table: Table) -> Layout | None:
    """The damage of each part alone beside that of all together; None where no cell has several
    parts whose own cells the grid has too."""
    labels = labelled_parts(comparison)
    found = [(row.line, parts_alone(comparison, labels, row.line)) for row in table.rows]
    rows, begins, last = [], [], None
    kinds = [kind for kind in PART_HEADS if any(kind in alone for _, alone in found)]
    for line, alone in found:
        if not alone:
            continue
        begins.append(line.task != last)
        last = line.task
        cells = line_names(line, begins_task=begins[-1])
        for checkpoint in table.checkpoints:
            for one in (*(alone.get(kind) for kind in kinds), line):
                effect = one.damages.get(checkpoint) if one else None
                cells.append(effect_text(effect, percent=line.percent))
        rows.append(tuple(cells))
    if not rows:
        return None
    columns = [*(PART_HEADS[kind] for kind in kinds), "together"]
    return Layout(
        title=f"{table.name}: damage by part",
        method=table.method,
        head=(
            *("Task", "Metric", "Quantization"),
            *(f"{checkpoint}: {column}" for checkpoint in table.checkpoints for column in columns),
        ),
        rows=tuple(rows),
        begins_task=tuple(begins),
        notes=(
            "Damage of the cells that quantize one of these parts alone, with the same settings, "
            "and of the cell that quantizes them together.",
            *_ratio_notes(table, "damages"),
            *_precision_notes(table),
        ),
        keys=(),
    )


def line_names(line: Line, *, begins_task: bool) -> list[str]:
    return [
        line.label if begins_task else "",
        f"{metric_title(line.metric)} {arrow(line)}",
        f"{line.quantizer} ({line.precision.words})" if line.precision.in_parts else line.quantizer,
    ]


def _precision_notes(table: Table) -> list[str]:
    return precision_notes(row.line for row in table.rows)


def precision_notes(lines: Iterable[Line]) -> list[str]:
    return [PRECISION_LEGEND] if any(line.precision.in_parts for line in lines) else []


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


def _ratio_notes(table: Table, question: str) -> list[str]:
    effects = (effect for row in table.rows for effect in getattr(row.line, question).values())
    return [RATIO_NOTE] if any(effect.kind == "log ratio" for effect in effects) else []


def documents_text(line: Line) -> str:
    """One number where all checkpoints saw as many documents, else one for each."""
    counts = [entry.documents for entry in line.entries]
    known = {count for count in counts if count is not None}
    if len(known) <= 1:
        return str(next(iter(known), NO_VALUE))
    return "/".join(NO_VALUE if count is None else str(count) for count in counts)


KL_NOTE = (
    "KL: divergence of the quantized from the unquantized model's next-token distributions, nats a "
    "token: mean and 99th percentile. Flips: answers from right to wrong / from wrong to right."
)


def markdown(tables: Sequence[Layout]) -> str:
    """The tables one below the other, with their notes."""
    return "\n\n".join(_one(layout) for layout in tables) + "\n"


def _one(layout: Layout) -> str:
    align = "l" * WORDS + "r" * (len(layout.head) - WORDS)
    notes = list(layout.notes)
    if layout.keys:
        notes.append(f"Records: {'; '.join(layout.keys)}.")
    parts = [
        f"### {for_markdown(layout.title)}",
        table(layout.head, layout.rows, align=align),
        "\n".join(f"- {for_markdown(note)}" for note in notes),
    ]
    return "\n\n".join(part for part in parts if part)


def page(tables: Sequence[Layout], *, title: str) -> str:
    """A page with every table, readable without style sheet, script or network."""
    templates = Environment(loader=PackageLoader("qbench.tables"), autoescape=True)
    return templates.get_template("tables.html").render(tables=tables, title=title, words=WORDS)
