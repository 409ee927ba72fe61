"""The report's tables: scores, damage, seeds, divergence, audit, costs, settings, provenance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qbench.comparison.changes import training_notes
from qbench.comparison.explain import flat
from qbench.comparison.lines import Comparison, Line, SeedLine, judge, redundant
from qbench.comparison.wording import (
    LEGEND,
    RATIO_NOTE,
    RATIOS_LEGEND,
    SEEDS_LEGEND,
    SHARE,
    SHARE_LEGEND,
    arrow,
    detectable_text,
    each_text,
    effect_text,
    ends_text,
    interval_text,
    mean_text,
    mostly_seeds,
    order_note,
    values_text,
)
from qbench.published import Printed, printed
from qbench.records import Audit, Damage, KVModuleAudit, Leak, Record, Unavailable
from qbench.statistics import Effect, SeedEffect
from qbench.store import KEY_DIGITS
from qbench.tables.layout import delta_text, entry_text, noise_notes
from qbench.tables.table import bits_per_weight, find_printed
from qbench.text import MINUS, NO_VALUE, metric_title, number

DIGITS = 12  # of a digest that are shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Text to show, and a number to sort by where the text is one."""

    text: str
    sort: float | None = None
    title: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataTable:
    """One sortable, filterable table.

    The first ``keys`` columns say what a row is of, and stay in sight while the others are
    scrolled. ``numeric`` says which columns hold numbers.
    """

    name: str
    section: str
    title: str
    caption: str
    keys: int
    head: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[Cell, ...], ...]


def build(
    name: str,
    section: str,
    title: str,
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    keys: int,
) -> DataTable:
    """Columns in which no row has anything are left out."""
    kept = [
        index
        for index in range(len(head))
        if index < keys or any(row[index].text not in ("", NO_VALUE) for row in rows)
    ]
    return DataTable(
        name=name,
        section=section,
        title=title,
        caption=caption,
        keys=keys,
        head=tuple(head[index] for index in kept),
        numeric=tuple(any(row[index].sort is not None for row in rows) for index in kept),
        rows=tuple(tuple(row[index] for index in kept) for row in rows),
    )


def plain(value: float | None, form: str) -> Cell:
    """A number in the format ``form``, with a real minus."""
    if value is None:
        return Cell(text=NO_VALUE)
    text = form.format(value).replace("-", "−").replace("%", "\u00a0%")
    return Cell(text=text, sort=float(value))


def p_value(value: float | None) -> Cell:
    if value is None:
        return Cell(text=NO_VALUE)
    return Cell(text="< 0.0001" if value < 1e-4 else f"{value:.4f}", sort=value)


def short(text: str) -> str:
    """A digest by its first digits; any other text as it is."""
    digest = len(text) == 64 and all(digit in "0123456789abcdef" for digit in text)
    return f"{text[:DIGITS]}…" if digest else text


NAMES = ["Task", "Metric", "Quantizer"]
MARKS = "‡ differs from 0 at 5 % after Holm's correction, † after Benjamini–Hochberg's only."
Kind = tuple[str, str, str]  # name, title, what the numbers are


STAGES = ("load", "quantize", "audit", "evaluate")


def sound(comparison: Comparison) -> list[Record]:
    """Records with scores that may be shown, in the grid's order."""
    found = (comparison.records.get(cell.cell) for cell in comparison.grid.cells)
    return [record for record in found if judge(record)[0] == "ok"]


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


NAMES_SEEDS = ["Task", "Metric", "Quantizer"]
TITLES = {
    "differences": "Difference of damages over seeds",
    "damages": "Damage over seeds",
    "deltas": "Scores over seeds",
}


def seed_tables(comparison: Comparison) -> Iterator[DataTable]:
    """The differences of damages first, which the claim is about."""
    lines = _shown(comparison)
    base, *others = comparison.grid.replicates
    claims = {
        "differences": [(group, f"{group}’s {MINUS} {base}’s") for group in others],
        "damages": [(group, group) for group in (base, *others)],
        "deltas": [(group, f"Δ {group} {MINUS} {base}") for group in others],
    }
    for question, groups in claims.items():
        head = list(NAMES_SEEDS)
        if question == "deltas":
            head += [part for group in (base, *others) for part in (group, f"{group}, each")]
        for _, title in groups:
            head += [title, "95 % interval", "each", "p (Holm)", SHARE]
        rows = [_row(one, question, groups) for one in lines if getattr(one, question)]
        if rows:
            told = [LEGEND, SEEDS_LEGEND, SHARE_LEGEND, RATIOS_LEGEND, order_note(comparison)]
            told += training_notes(comparison)
            yield build(
                f"seeds-{question}", "seeds", TITLES[question], " ".join(told), head, rows,
                keys=len(NAMES_SEEDS),
            )  # fmt: skip


def seed_summary(comparison: Comparison) -> list[str]:
    """One sentence a question, then what the uncertainty comes of, then what is missing."""
    base, *others = comparison.grid.replicates
    lines = _shown(comparison)
    sentences = [
        "Several trainings: "
        + ", ".join(f"{len(m)} of {group}" for group, m in comparison.grid.replicates.items())
        + "."
    ]
    asked: list[SeedEffect] = []
    for group in others:
        found = [(one, one.differences[group]) for one in lines if group in one.differences]
        asked += [effect for _, effect in found]
        if found:
            less, surely_less = _count(found, 1)
            more, surely_more = _count(found, -1)
            sentences.append(
                f"Quantization costs {group} less than {base} in {less} of {len(found)} "
                f"comparisons ({surely_less} significantly), more in {more} ({surely_more} "
                "significantly), by the mean over trainings of the difference of their damages."
            )
    if asked:
        mostly = sum(mostly_seeds(effect) for effect in asked)
        sentences.append(
            f"In {mostly} of {len(asked)} of these comparisons seeds, not documents, are the "
            "larger part of the uncertainty."
        )
        sentences.append(
            "Significant: at 5 % after Holm's correction over all comparisons of that question."
        )
    problems = comparison.problems()
    if problems:
        cells = len(comparison.grid.cells)
        sentences.append(f"{len(problems)} of {cells} cells have no sound score: see below.")
    return sentences


def _shown(comparison: Comparison) -> list[SeedLine]:
    return [one for one in comparison.seeds if not redundant(one.line, comparison.lines)]


def _row(one: SeedLine, question: str, groups: list[tuple[str, str]]) -> list[Cell]:
    line = one.line
    row = [
        Cell(text=line.label),
        Cell(text=f"{metric_title(line.metric)} {arrow(line)}"),
        Cell(text=line.quantizer),
    ]
    if question == "deltas":
        for group, values in one.values.items():
            mean = one.means.get(group)
            row.append(Cell(text=number(mean, percent=line.percent), sort=mean))
            row.append(Cell(text=values_text(values, percent=line.percent)))
    for group, _ in groups:
        effect = getattr(one, question).get(group)
        if effect is None:
            row += [Cell(text=NO_VALUE)] * 5
            continue
        row += [
            Cell(text=mean_text(effect, percent=line.percent), sort=effect.estimate),
            Cell(text=ends_text(effect, percent=line.percent), sort=effect.low),
            Cell(text=each_text(effect, percent=line.percent)),
            p_value(effect.p_holm),
            plain(effect.of_seeds, "{:.0%}"),
        ]
    return row


def _count(found: list[tuple[SeedLine, SeedEffect]], sign: int) -> tuple[int, int]:
    """How many effects are better (``sign`` 1) or worse (−1), and how many of them surely."""
    good = [
        effect.mark == "‡"
        for one, effect in found
        if sign * effect.estimate * (1 if one.line.higher_is_better else -1) > 0
    ]
    return len(good), sum(good)


def inputs(comparison: Comparison) -> Iterator[DataTable]:
    head = ["Cell", "Format", "Products", "Levels", "Clipped", "Error", "Largest in a layer",
            "Weight error", "Left out"]  # fmt: skip
    rows = []
    for record in sound(comparison):
        found = record.audit.activations if record.audit else None
        part = record.precision.activations
        if record.audit is None or found is None or part is None:
            continue
        worst = max(found.modules, key=lambda one: one.error, default=None)
        weights = record.audit.weight_error if record.precision.weights else None
        rows.append(
            [
                Cell(text=record.cell),
                Cell(text=part.scheme),
                Cell(text={None: NO_VALUE, True: "simulated", False: "real"}[part.simulated]),
                plain(found.levels, "{:d}"),
                plain(found.clipped, "{:.3%}"),
                plain(found.error, "{:.4f}"),
                Cell(text=f"{worst.error:.4f}", sort=worst.error, title=worst.name)
                if worst
                else Cell(text=NO_VALUE),
                plain(weights, "{:.4f}"),
                Cell(text=", ".join(found.left_out)),
            ]
        )
    if rows:
        caption = (
            "What products with weight matrices took in on a probe text, measured where they take "
            "it. Error: ‖x′ − x‖ / ‖x‖, beside the weights' ‖W′ − W‖ / ‖W‖. Levels: most distinct "
            "values under one scale. Clipped: share of values beyond what their scale allows."
        )
        yield build("activations", "audit", "Activations", caption, head, rows, keys=1)


def independence(comparison: Comparison) -> Iterator[DataTable]:
    head = ["Cell", "Moved by the last token", "Rounding", "Moved by batch-mates", "Rounding of it",
            "Declared"]  # fmt: skip
    rows = []
    for record in sound(comparison):
        found = record.audit
        if found is None or found.causality is None or found.batch_mates is None:
            continue
        future, mates = found.causality, found.batch_mates
        declared = [
            word
            for word, leak in (("sees the future", future), ("mixes batches", mates))
            if leak.declared
        ]
        rows.append(
            [
                Cell(text=record.cell),
                *_leak(future),
                *_leak(mates),
                Cell(text=", ".join(declared)),
            ]
        )
    if rows:
        caption = (
            "Largest change of a logit: of earlier tokens when the last token changed, and of one "
            "row when the others of its batch changed. More than rounding fails a cell, unless its "
            "settings declare it, as one scale for a whole batch must."
        )
        title = "What a token's logits depend on"
        yield build("independence", "audit", title, caption, head, rows, keys=1)


def _leak(leak: Leak) -> tuple[Cell, Cell]:
    return plain(leak.moved, "{:.3g}"), plain(leak.tolerance, "{:.2g}")


def kv_caches(comparison: Comparison) -> Iterator[DataTable]:
    head = ["Cell", "Format", "Bytes a token", "Unquantized", "Bits a value", "Levels",
            "Key error", "Key error, worst layer", "Value error", "Value error, worst layer",
            "Clipped"]  # fmt: skip
    rows = []
    for record in sound(comparison):
        found = record.audit.kv_cache if record.audit else None
        part = record.precision.kv_cache
        if found is None or part is None:
            continue
        simulated = ", simulated" if part.simulated else ""
        keys = max(found.modules, key=lambda one: one.key_error, default=None)
        values = max(found.modules, key=lambda one: one.value_error, default=None)
        rows.append(
            [
                Cell(text=record.cell),
                Cell(text=f"{part.scheme}{simulated}"),
                plain(found.bytes_per_token, "{:,.0f}"),
                plain(found.unquantized_bytes_per_token, "{:,.0f}"),
                plain(found.bits_per_value, "{:.2f}"),
                plain(found.levels, "{:d}"),
                plain(found.key_error, "{:.4f}"),
                _named(keys, keys.key_error if keys else None),
                plain(found.value_error, "{:.4f}"),
                _named(values, values.value_error if values else None),
                plain(found.clipped, "{:.2%}"),
            ]
        )
    if rows:
        caption = (
            "What attention read of its keys and values while a probe ran, and the memory of one "
            "sequence as long as the checkpoint's context, all layers together: scales, and tokens "
            "that stay unquantized, are counted. Errors: ‖K′ − K‖ / ‖K‖ over quantized tokens. "
            "Levels: most distinct values that share a scale."
        )
        yield build("kv-cache", "audit", "KV cache", caption, head, rows, keys=1)


def _named(module: KVModuleAudit | None, error: float | None) -> Cell:
    cell = plain(error, "{:.4f}")
    return Cell(text=cell.text, sort=cell.sort, title=module.name if module else "")


NAMED = 4
KL_NOTE = (
    "KL: Kullback–Leibler divergence of the quantized from the unquantized model's next-token "
    "distribution, over the whole vocabulary, in nats a scored token"
)


def divergence(comparison: Comparison) -> Iterator[DataTable]:
    head = ["Task", "Cell", "Mean KL", "Median KL", "KL p99", "Same top token", "Right to wrong",
            "Wrong to right", "Right answer, nats", "Tokens"]  # fmt: skip
    rows = []
    for record in sound(comparison):
        if not isinstance(record.damage, Damage):
            continue
        for task, part in record.damage.tasks.items():
            told = part.distributions
            flips = next(iter(part.flips.values()), None)
            rows.append(
                [
                    Cell(text=task),
                    Cell(text=record.cell),
                    plain(told and told.kl.mean, "{:.4g}"),
                    plain(told and told.kl.median, "{:.4g}"),
                    plain(told and told.kl.p99, "{:.4g}"),
                    plain(told and told.top1_agreement, "{:.1%}"),
                    plain(flips and flips.right_to_wrong, "{:d}"),
                    plain(flips and flips.wrong_to_right, "{:d}"),
                    plain(part.correct_answer and part.correct_answer.value, "{:+.4f}"),
                    plain(told and told.tokens, "{:d}"),
                ]
            )
    if rows:
        caption = (
            f"{KL_NOTE}. Same top token: share of tokens whose likeliest prediction stayed. Right "
            "to wrong, wrong to right: answers that quantization turned. Right answer: change of "
            "its log-likelihood."
        )
        title = "Changed distributions and answers"
        yield build("divergence", "distributions", title, caption, head, rows, keys=2)


def _left_out(found: Audit) -> str:
    """Names of what was not quantized, each with the reason where the record has it."""
    why = found.left_out_because
    return ", ".join(f"{name} ({why[name]})" if name in why else name for name in found.left_out)


def divergence_notes(comparison: Comparison) -> list[str]:
    """Why quantized cells have no divergence, one line a reason."""
    reasons: dict[str, list[str]] = {}
    quantized = [record for record in sound(comparison) if record.quantized]
    for record in quantized:
        if isinstance(record.damage, Damage):
            continue
        reason = (
            record.damage.reason
            if isinstance(record.damage, Unavailable)
            else "it was not asked for (evaluation.damage)"
        )
        reasons.setdefault(reason, []).append(record.cell)
    every = len(quantized)
    return [
        f"No divergence for {'any cell' if len(cells) == every else _some(cells)}: {why}"
        for why, cells in reasons.items()
    ]


def _some(cells: Sequence[str]) -> str:
    shown = ", ".join(cells[:NAMED])
    return shown if len(cells) <= NAMED else f"{shown} and {len(cells) - NAMED} more cells"


def stages(comparison: Comparison) -> Iterator[DataTable]:
    head = [
        "Cell",
        *(f"{stage}, s" for stage in STAGES),
        "Together, s",
        "Peak memory, GiB",
        "Notes",
    ]
    rows = []
    for record in comparison.records.values():
        if not record.stages:
            continue
        seconds = {stage.name: stage.seconds for stage in record.stages}
        rows.append(
            [
                Cell(text=record.cell),
                *(plain(seconds.get(stage), "{:.1f}") for stage in STAGES),
                plain(sum(seconds.values()), "{:.1f}"),
                plain(max(stage.peak_memory_gib for stage in record.stages), "{:.2f}"),
                Cell(text="; ".join(s.detail for s in record.stages if s.detail)),
            ]
        )
    if rows:
        caption = "Wall time of each stage; memory of the largest."
        yield build("stages", "costs", "Time and memory", caption, head, rows, keys=1)


def audit(comparison: Comparison) -> Iterator[DataTable]:
    head = ["Cell", "Status", "Bits a weight", "Coverage", "Weight error", "Largest in a layer",
            "Levels", "Logits moved", "Left out", "Why"]  # fmt: skip
    rows = []
    for cell in comparison.grid.cells:
        record = comparison.records.get(cell.cell)
        status, reason = judge(record)
        found = record.audit if record else None
        if status == "ok" and found is None and cell.quantized:
            status, reason = "not audited", "nothing shows that it was quantized"
        worst = max(found.modules, key=lambda one: one.weight_error) if _layers(found) else None
        rows.append(
            [
                Cell(text=cell.cell),
                Cell(text=status),
                plain(bits_per_weight(record) if record else None, "{:.2f}"),
                plain(found and found.coverage, "{:.1%}"),
                plain(found and found.weight_error, "{:.4f}"),
                Cell(text=f"{worst.weight_error:.4f}", sort=worst.weight_error, title=worst.name)
                if worst
                else Cell(text=NO_VALUE),
                plain((found and found.levels) or None, "{:d}"),
                plain(found and found.logits_moved, "{:.3g}"),
                Cell(text=_left_out(found) if found else ""),
                Cell(text=reason),
            ]
        )
    caption = (
        "Proof that each cell was quantized as it says, measured before it was scored. Weight "
        "error: ‖W′ − W‖ / ‖W‖. Coverage: share of the weights of all matrices but the embeddings "
        "and the LM head. Levels: most distinct values in a group. Bits: as stored, scales and "
        "zeros counted."
    )
    yield build("audit", "audit", "Audit of every cell", caption, head, rows, keys=1)


def _layers(found: object) -> bool:
    return found is not None and bool(found.modules)


def provenance(comparison: Comparison) -> Iterator[DataTable]:
    head = ["Cell", "Record", "Normalizer/kernel", "Hardware", "Python", "qbench", "Revision",
            "Finished"]  # fmt: skip
    rows = [
        [
            Cell(text=record.cell),
            Cell(text=record.key[:KEY_DIGITS], title=record.key),
            Cell(text=record.attention),
            Cell(text=f"{record.environment.hardware} ({record.environment.device})"),
            Cell(text=record.environment.python),
            Cell(text=record.environment.qbench),
            Cell(text=(record.environment.git_revision or NO_VALUE)[:10]),
            Cell(text=f"{record.finished:%Y-%m-%d %H:%M}"),
        ]
        for record in comparison.records.values()
    ]
    if rows:
        caption = "Where every record comes from. A record's name is the beginning of its key."
        yield build("provenance", "provenance", "Records", caption, head, rows, keys=1)


# Parts of a key that have a table of their own, or follow from the others.
APART = ("quantizer", "calibration", "damage against")
PLAIN = {"None": "none", "True": "yes", "False": "no"}  # of a key's parts, which are Python's
# Of a quantizer's settings, in columns of their own
SAID = ("name", "method", "bits", "num_bits", "title")


def headline(comparison: Comparison) -> list[str]:
    """Normalizers, dtype, scoring and machine, in a few words each."""
    records = [record for record in comparison.records.values() if record.status == "ok"]
    if not records:
        return []
    told = [
        ("Normalizer and kernel", _each(records, lambda r: r.attention)),
        ("Computed in", _each(records, _dtype)),
        ("Scoring", _each(records, lambda r: r.scoring.mode if r.scoring else "")),
        (
            "Machine",
            _each(records, lambda r: f"{r.environment.hardware} ({r.environment.device})"),
        ),
    ]
    return [f"{name}: {', '.join(values)}" for name, values in told if values]


def _each(records: Sequence[Record], of: Callable[[Record], str]) -> list[str]:
    return [value for value in dict.fromkeys(map(of, records)) if value]


def _dtype(record: Record) -> str:
    settings = _mapping(record.key_parts.get("quantizer"))
    return str(settings.get("compute_dtype") or settings.get("dtype") or "")


def quantizers(comparison: Comparison) -> Iterator[DataTable]:
    """One row a quantizer; a second one where checkpoints have it with other settings."""
    head = ["Quantizer", "Method", "Precision", "Settings", "Calibration", "Cells"]
    found: dict[tuple[str, ...], list[str]] = {}
    for record in comparison.records.values():
        settings = _mapping(record.key_parts.get("quantizer"))
        row = (
            record.quantizer,
            record.title,
            record.precision.name if record.quantized else "unquantized",
            _listed({name: value for name, value in settings.items() if name not in SAID}),
            _calibration(_mapping(record.key_parts.get("calibration"))),
        )
        found.setdefault(row, []).append(record.cell)
    every = len(comparison.checkpoints)
    rows = [
        [*(Cell(text=text) for text in row), Cell(text="" if len(on) == every else ", ".join(on))]
        for row, on in found.items()
    ]
    if rows:
        caption = "Every setting of each quantizer, and the text that it was calibrated on."
        yield build("quantizers", "settings", "Quantizers", caption, head, rows, keys=1)


def settings(comparison: Comparison) -> Iterator[DataTable]:
    """Every other part of the cells' keys: a row a value."""
    found: dict[str, dict[str, list[str]]] = {}
    for record in comparison.records.values():
        for part, value in flat(record.key_parts):
            if part.split(".")[0] not in APART:
                found.setdefault(part, {}).setdefault(value, []).append(record.cell)
    whole = len(comparison.records)
    rows = [
        [
            Cell(text=part),
            Cell(text=PLAIN.get(value, short(value)), title=value if value != short(value) else ""),
            Cell(text=_which(cells, comparison, whole)),
        ]
        for part, values in found.items()
        for value, cells in values.items()
    ]
    if rows:
        caption = (
            "What the key of a record is made of, quantizers aside: tasks (digests of definition "
            "and data), few-shot examples, scoring, attention, versions, weights. A change of any "
            "is a new record."
        )
        head = ["Setting", "Value", "In"]
        yield build("settings", "settings", "Everything else", caption, head, rows, keys=1)


def _which(cells: Sequence[str], comparison: Comparison, whole: int) -> str:
    """Cells in few words: all, those of a checkpoint, or by name."""
    if len(cells) == whole:
        return "all cells"
    named = set(cells)
    for checkpoint in comparison.checkpoints:
        own = {name for name, r in comparison.records.items() if r.checkpoint == checkpoint}
        if named == own:
            return f"{checkpoint}/*"
    labels = dict.fromkeys(cell.rpartition("/")[2] for cell in cells)
    full = {n for n, r in comparison.records.items() if r.quantizer in labels}
    return ", ".join(f"*/{label}" for label in labels) if named == full else ", ".join(cells)


def _calibration(parts: Mapping[str, object]) -> str:
    if not parts:
        return ""
    told = []
    if "samples" in parts and "length" in parts:
        told.append(f"{parts['samples']} × {parts['length']:,} tokens")
    rest = {name: value for name, value in parts.items() if name not in ("samples", "length")}
    return ", ".join([*told, *([_listed(rest)] if rest else [])])


def _listed(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in settings.items()) or NO_VALUE


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return f"({_listed(value)})"
    return "none" if value is None else short(str(value))


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def data_tables(comparison: Comparison, *, published: str | None = None) -> list[DataTable]:
    """All tables that have rows: the differences of damages first, which the claim is about."""
    # With several trainings of each kind their means are told, not each against the first.
    first = (
        seed_tables(comparison)
        if comparison.seeds
        else [*differences(comparison), *damages(comparison), *scores(comparison, published)]
    )
    return [
        *first,
        *divergence(comparison),
        *stages(comparison),
        *audit(comparison),
        *inputs(comparison),
        *kv_caches(comparison),
        *independence(comparison),
        *quantizers(comparison),
        *settings(comparison),
        *provenance(comparison),
    ]


def notes(comparison: Comparison) -> dict[str, list[str]]:
    """Section → what it cannot show, and why."""
    found = {"distributions": divergence_notes(comparison)}
    if comparison.unquantized is None:
        found["damage"] = ["No damage: the recipe has no unquantized cell to compare with."]
    elif not any(line.damages for line in comparison.lines):
        found["damage"] = ["No damage: no quantized cell can be compared with its unquantized one."]
    elif not comparison.others:
        found["damage"] = ["No difference of damages: there is one checkpoint."]
    return {section: lines for section, lines in found.items() if lines}
