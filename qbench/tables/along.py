"""Tables of what stands beside table 4: along the text, a layer at a time, passkey retrieval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scipy import stats

from qbench.passkey import task_length
from qbench.records import Analysis, Record, Score, Sensitivity
from qbench.tables.analyses import Section, Why
from qbench.tables.chance import AT_CHANCE, at_chance
from qbench.tables.pruned import pruned
from qbench.tables.written import per_cent_text, value_text
from qbench.text import NO_VALUE

LAYERS_SHOWN = 5  # of each cell; all are in sensitivity.csv
NORMAL = 1.96  # standard errors either side: 95 %


def sections(why: Why) -> list[Section]:
    return [
        *stretches(why),
        *sensitivity(why),
        *correlations(why),
        *of_records(why.records),
    ]


def of_records(records: Sequence[Record]) -> list[Section]:
    """Those that need no analysis."""
    return [*pruned(records), *passkeys(records)]


def stretches(why: Why) -> Iterator[Section]:
    """Underscoring (the softpick paper's section 7.7): weights and losses along the text."""
    found = why.long or why.cells
    rows = []
    for one in found:
        assert one.measured is not None
        for part in one.measured.stretches:
            rows.append(
                (
                    one.cell,
                    f"{part.first}–{part.last}",
                    value_text(part.loss, "{:.3f}"),
                    value_text(part.loss_stderr, "{:.3f}"),
                    value_text(part.mass, "{:.3f}"),
                    value_text(part.largest, "{:.3f}"),
                    value_text(part.entropy, "{:.2f}"),
                )
            )
    if rows:
        texts = {one.text.samples for one in found if one.text is not None}
        yield Section(
            name="stretches",
            title="Along the text: losses and weights",
            note=f"Means over {'/'.join(map(str, sorted(texts)))} texts (with the standard error "
            "of the loss), heads and the queries of a stretch of positions. Weights that shrink "
            "along the text are what the softpick paper calls underscoring (section 7.7).",
            head=("Cell", "Positions", "Loss, nats", "± s.e.", "Σ weights", "Largest weight",
                  "Entropy, nats"),
            rows=tuple(rows),
            text=("Positions",),
            keys=2,
        )  # fmt: skip


def sensitivity(why: Why) -> Iterator[Section]:
    rows: list[tuple[str, ...]] = []
    for one in why.sensitivities:
        worst = sorted(one.units, key=lambda unit: -(unit.kl.value or 0.0))
        shown = [*worst[:LAYERS_SHOWN], *([one.together] if one.together else [])]
        rows += [
            (
                one.cell,
                "all at once" if unit is one.together else unit.name,
                value_text(unit.kl.value, "{:.4g}"),
                value_text(unit.kl.stderr, "{:.2g}"),
                per_cent_text(unit.ln_perplexity_ratio.value),
            )
            for unit in shown
        ]
    if rows:
        yield Section(
            name="sensitivity",
            title="Quantized alone",
            note=f"The {LAYERS_SHOWN} parts of each cell that hurt most when nothing else is "
            "quantized: KL divergence from the unquantized model over the whole vocabulary, nats "
            "a token, mean over texts; and the change of perplexity. All are in sensitivity.csv.",
            head=("Cell", "Quantized", "KL", "± s.e.", "Perplexity"),
            rows=tuple(rows),
            text=("Quantized",),
            keys=2,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One part of a model: its inputs' largest |x| over their rms, and the KL divergence when it
    is quantized alone."""

    name: str
    layer: int | None
    outliers: float
    kl: float


def pairs(one: Sensitivity, cells: Sequence[Analysis]) -> list[Pair]:
    """Parts of which both is known. The outliers are those of the unquantized model of the same
    checkpoint; those of a decoder layer are the most that one of its linear layers receives."""
    analysis = next(
        (a for a in cells if a.checkpoint == one.checkpoint and not a.precision.quantized), None
    )
    if analysis is None or analysis.measured is None:
        return []
    known = {given.name: given.largest_to_rms or 0.0 for given in analysis.measured.inputs}
    found = []
    for unit in one.units:
        inside = [v for name, v in known.items() if name == unit.name
                  or name.startswith(f"{unit.name}.")]  # fmt: skip
        if inside and unit.kl.value is not None:
            pair = Pair(name=unit.name, layer=unit.layer, outliers=max(inside), kl=unit.kl.value)
            found.append(pair)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Correlation:
    """Spearman's rank correlation with its 95 % interval."""

    value: float
    low: float
    high: float
    pairs: int


def correlation(found: Sequence[Pair]) -> Correlation | None:
    """Of outliers with KL; None of fewer than five pairs, or where all of one are equal.

    The interval is on Fisher's z = artanh ρ with standard error √((1 + ρ²/2) / (n − 3)), which
    holds for ranks (Bonett and Wright 2000, Psychometrika 65, 23–28). Layers of one model are
    not independent draws: it says how far chance among so many layers could reach, no more.
    """
    if len(found) < 5:
        return None
    x, y = [one.outliers for one in found], [one.kl for one in found]
    if len(set(x)) == 1 or len(set(y)) == 1:
        return None
    rho = float(stats.spearmanr(x, y).statistic)
    if abs(rho) >= 1:
        return Correlation(value=rho, low=rho, high=rho, pairs=len(found))
    reach = NORMAL * math.sqrt((1 + rho**2 / 2) / (len(found) - 3))
    low, high = (math.tanh(math.atanh(rho) + side * reach) for side in (-1, 1))
    return Correlation(value=rho, low=low, high=high, pairs=len(found))


def correlations(why: Why) -> Iterator[Section]:
    rows = []
    for one in why.sensitivities:
        found = correlation(pairs(one, why.cells))
        if found is not None:
            rows.append(
                (
                    one.cell,
                    value_text(found.value, "{:+.2f}"),
                    f"{value_text(found.low, '{:+.2f}')} to {value_text(found.high, '{:+.2f}')}",
                    str(found.pairs),
                )
            )
    if rows:
        yield Section(
            name="correlation",
            title="Outliers of inputs and damage",
            note="Spearman's rank correlation, over the parts of a model, of the largest |x| / rms "
            "of what a part receives with the KL divergence when it is quantized alone; 95 % "
            "interval (Bonett and Wright 2000).",
            head=("Cell", "ρ", "95 % interval", "Parts"),
            rows=tuple(rows),
        )


def passkeys(records: Sequence[Record]) -> Iterator[Section]:
    """The softpick paper's tables 5 and 7: accuracy by length."""
    scored = {
        record.cell: {
            (length, score.metric): score
            for score in record.scores
            if (length := task_length(score.task)) is not None
        }
        for record in records
    }
    scored = {cell: found for cell, found in scored.items() if found}
    lengths = sorted({length for found in scored.values() for length, _ in found})
    for metric, title, note in (
        ("exact_match", "Passkey retrieval", "Per cent of prompts whose five digits the model "
         "gives back by greedy decoding, by tokens of the prompt."),
        ("acc_digits", "Passkey retrieval, digit by digit", "Per cent of digits in their places."),
    ):  # fmt: skip
        rows = tuple(
            (cell, *(passkey_text(found.get((length, metric))) for length in lengths))
            for cell, found in scored.items()
            if any(known == metric for _, known in found)
        )
        if rows:
            yield Section(
                name=f"passkey-{metric.replace('_', '-')}",
                title=title,
                note=f"{note} Chance: a score that guessed digits reach at least once in "
                f"{round(1 / AT_CHANCE)} runs.",
                head=("Cell", *map(str, lengths)),
                rows=rows,
            )


def passkey_text(score: Score | None) -> str:
    if score is None:
        return NO_VALUE
    chance = at_chance(score.metric, score.value, score.documents)
    return f"{score.value * 100:.1f}{' (chance)' if chance else ''}"
