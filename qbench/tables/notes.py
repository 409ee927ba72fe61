"""Write the footnotes of tables of scores: one line per note."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING

from qbench.comparison.rows import Comparison, Row, training_notes
from qbench.comparison.wording import (
    NO_INTERVAL,
    RATIO_NOTE,
    RATIOS_NOTE,
    SEED_NOTES,
    SEEDS_NOTE,
    SHARE_NOTE,
    mostly_seeds,
    order_note,
)
from qbench.records import SampleDifference
from qbench.statistics import documents_for_margin, samples_needed
from qbench.statistics.effect import DRAWN_ERRORS
from qbench.text import MINUS, group_by_reason, metric_title

if TYPE_CHECKING:
    from qbench.statistics import Effect

HUNDREDTH = 0.01
AT_MOST, KEPT = "At most", "Kept"
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
KEPT_NOTE = f"{KEPT}: accuracy above chance, as a share of the unquantized model's."


def run_notes(comparison: Comparison, hidden: Sequence[Row]) -> list[str]:
    """Return lines on the run: tasks without data, prompts, BOS, and the rows that are ``hidden``,
    since word perplexity says the same."""
    notes = []
    if comparison.grid.skipped:
        notes.append(f"Left out, without data: {', '.join(comparison.grid.skipped)}.")
    notes += [*prompt_notes(comparison), *bos_notes(comparison)]
    if names := dict.fromkeys(f"{row.task} {row.metric}" for row in hidden):
        notes.append(f"Only in the CSV, since word_perplexity determines them: {', '.join(names)}.")
    return notes


def score_notes(comparison: Comparison, rows: Sequence[Row], footnotes: Sequence[str]) -> list[str]:
    """Return the lines below a table of scores: caches, how scoring was judged, ``footnotes``,
    precisions, tasks at chance, trainings."""
    return [
        *cache_notes(comparison, rows),
        *judged_notes(comparison, rows),
        *drawn_notes(rows),
        *footnotes,
        *precision_notes(rows),
        *chance_notes(comparison, rows),
        *single_notes(rows),
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
    """Return a line on perplexities if any of ``effects`` is a ratio."""
    return [RATIO_NOTE] if any(effect.kind == "log ratio" for effect in effects) else []


def missing_notes(rows: Iterable[Row], contrasts: Sequence[str]) -> list[str]:
    """Say why effects have no interval: a line per reason."""
    reasons = [
        (f"{row.label} {metric_title(row.metric)} {row.quantizer} of {group}", missing.reason)
        for row in rows
        for (contrast, group), missing in row.missing.items()
        if contrast in contrasts
    ]
    return [f"{NO_INTERVAL} {line}." for line in group_by_reason(reasons)]


def precision_notes(rows: Iterable[Row]) -> list[str]:
    """Return a note on precisions such as W4A8, and one with the scheme of weights that are
    rounded to a grid: symmetric or not, group size, column order."""
    rows = list(rows)
    notes = [PRECISION_NOTE] if any(row.precision.in_parts for row in rows) else []
    schemes = {row.quantizer: row.precision.weights.scheme for row in rows if row.precision.weights}
    named = [f"{quantizer} is {scheme}" for quantizer, scheme in schemes.items()
             if "symmetric" in scheme]  # fmt: skip
    return [*notes, *([f"Weights: {'; '.join(named)}."] if named else [])]


def scale_notes(comparison: Comparison) -> list[str]:
    """Return a line on precisions whose bits count scales in float32."""
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
    """Return a line on how prompts became conversations; none if they did not."""
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


def bos_notes(comparison: Comparison) -> list[str]:
    """Return a line on BOS before the texts that were scored; none for earlier records."""
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
    """Return a line on the accuracies of ``rows`` that an unquantized model may have guessed."""
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


def single_notes(lines: Sequence[Row]) -> list[str]:
    """Return a line on the tasks of ``lines`` that were scored on one document, if there are
    any."""
    alone = {line.label: None for line in lines for entry in line.entries if entry.documents == 1}
    if not alone:
        return []
    return [
        f"{', '.join(alone)}: one document has no error bars, so no interval, test or damage; "
        "score more."
    ]


def drawn_notes(rows: Iterable[Row]) -> list[str]:
    """Return a line per metric whose answers are drawn: how far drawing others to the same prompts
    moves a damage, and how many prompts or samples would show a loss of a hundredth."""
    effects_of: dict[str, list[Effect]] = {}
    for row in rows:
        for effect in row.damages.values():
            if getattr(effect, "drawn", 0.0) > 0:
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


def cache_notes(comparison: Comparison, lines: Sequence[Row]) -> list[str]:
    """Return a line per context length on quantized KV caches of ``lines``: the bytes per token
    of each."""
    sizes_by_context: dict[tuple[int, float], dict[str, dict[str, None]]] = {}
    for line in lines:
        for entry in line.entries:
            record = comparison.records.get(entry.cell)
            if audit := record and record.audit and record.audit.kv_cache:
                alike = sizes_by_context.setdefault(
                    (audit.tokens, audit.unquantized_bytes_per_token), {}
                )
                alike.setdefault(line.quantizer, {})[f"{audit.bytes_per_token:,.0f}"] = None
    return [
        f"KV cache of {tokens:,} tokens, bytes per token with scales: unquantized "
        f"{unquantized:,.0f}; "
        + "; ".join(f"{name} {' / '.join(sizes)}" for name, sizes in alike.items())
        + "."
        for (tokens, unquantized), alike in sizes_by_context.items()
    ]


def judged_notes(comparison: Comparison, lines: Sequence[Row]) -> list[str]:
    """Return a line if fast scores of ``lines`` were judged by their mean difference from exact
    ones."""
    entries = {entry.cell: entry for line in lines for entry in line.entries}
    samples = [sample for cell in entries for sample in _by_bias(comparison, cell)]
    if not samples:
        return []
    widest = max(sample.mean_per_token for sample in samples)
    worst = max(samples, key=lambda sample: abs(sample.bias_per_token or 0.0))
    error = f" ± {worst.bias_stderr:.2g}" if worst.bias_stderr is not None else ""
    bias = f"{worst.bias_per_token:+.2g}".replace("-", MINUS)
    return [
        "Fast scores of quantized activations or KV caches differ from exact ones by up to "
        f"{widest:.2g} nats a token; judged by their signed mean, at most {bias}{error}."
    ]


def _by_bias(comparison: Comparison, cell: str) -> list[SampleDifference]:
    record = comparison.records.get(cell)
    difference = record.scoring.difference_from_exact if record and record.scoring else None
    return [sample for sample in difference.samples if sample.by_bias] if difference else []
