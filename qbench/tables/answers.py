"""Build the tables of answers: how quantization changed them, by class and position of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping

from qbench.comparison.answers import AnswerDamage, TokenMeans
from qbench.comparison.rows import Comparison, Row
from qbench.comparison.verdict import effect_text, interval_text, nats
from qbench.records import ANSWERS
from qbench.tables.scores import drawn_notes
from qbench.text import NO_VALUE, Table, from_rows, metric_title, number

NOTES = (
    "KL along answers: each precision reads the unquantized model's answers; mean over prompts, "
    "nats per token, with its 95 % interval. Same token: share of tokens at which both models' "
    "likeliest token is the same.",
    "Same answer: share of prompts to which the precision gives the unquantized model's answer. "
    "Parts after: the median number of tokens before they differ.",
    "Stops: ended by itself. Repeats: share of stretches of 8 tokens that stand earlier in the "
    "answer. Length: tokens; then the ratio of mean lengths, with its 95 % interval; ¶ none, since "
    "fewer than 20 answers' lengths differ. First row: the score, then losses in points, paired by "
    "prompt; ‡ at 5 % after Holm's correction.",
    "Hurt most: the class of tokens with the largest KL, as a multiple of the mean over tokens.",
)


def answer_tables(comparison: Comparison) -> list[Table]:
    """Return three tables per checkpoint on what quantization changed in its answers: an overview,
    KL by class of token, KL by position. An empty list if the cells have no answers."""
    tables: list[Table] = []
    for checkpoint in comparison.grid.checkpoints:
        damages = {
            quantizer: damage
            for quantizer in comparison.quantizers
            if (damage := comparison.answers.get(f"{checkpoint}/{quantizer}"))
        }
        if damages:
            tables += [
                *_overview(comparison, checkpoint, damages),
                *_means_table(checkpoint, "class of token", {
                    name: each.by_class for name, each in damages.items()
                }),
                *_means_table(checkpoint, "position in the answer", {
                    name: each.by_position for name, each in damages.items()
                }),
            ]  # fmt: skip
    return tables


def _overview(
    comparison: Comparison, checkpoint: str, damages: Mapping[str, AnswerDamage]
) -> list[Table]:
    """Return the table of a checkpoint's answers: KL, agreement and scores per precision."""
    by_name = {(o.quantizer, o.metric): o for o in comparison.lines if o.task == ANSWERS}
    metrics = [name for name in dict.fromkeys(metric for _, metric in by_name) if name != "kl"]
    base = comparison.unquantized_of[next(iter(damages))]
    rows = []
    for quantizer in (base, *damages):
        damage = damages.get(quantizer)
        worst = damage and damage.hurt_most
        row = {
            "Precision": quantizer,
            **_along(by_name.get((quantizer, "kl")), checkpoint, damage),
            **{metric_title(metric): _loss(by_name.get((quantizer, metric)), checkpoint)
               for metric in metrics},
            "Hurt most": f"{worst[0]}, × {worst[1]:.1f}" if worst else NO_VALUE * bool(damage),
        }  # fmt: skip
        rows.append(row)
    read = next(iter(damages.values())).tokens
    notes = [
        *NOTES,
        *drawn_notes(by_name.values()),
        f"{read.prompts:,} prompts, {read.tokens:,} tokens of answers.",
    ]
    for name, each in damages.items():
        if each.other_prompts:
            notes.append(
                f"{name} renders {each.other_prompts} of {read.prompts} prompts differently: its "
                "chat template or tokenizer is not the original's."
            )
    title = f"Answers of {checkpoint}"
    return from_rows(rows, title=title, notes=notes, also_words=("Hurt most",))


def _along(row: Row | None, checkpoint: str, damage: AnswerDamage | None) -> dict[str, str]:
    """Return the cells about tokens along the unquantized model's answers; "" without damage."""
    names = ("KL along answers", "Same token", "Same answer", "Parts after")
    if damage is None or row is None:
        return dict.fromkeys(names, "")
    mean, score = row.entries[checkpoint].value, row.effect("scores", checkpoint)
    kl = nats(math.log(mean)) if mean else "0"
    if score is not None:
        kl += f" [{nats(score.low)}, {nats(score.high)}]"
    agrees, identical = f"{100 * damage.tokens.agrees:.1f} %", f"{100 * damage.identical:.0f} %"
    return dict(zip(names, (kl, agrees, identical, f"{damage.agreed:.0f}"), strict=True))


def _loss(line: Row | None, checkpoint: str) -> str:
    """Return the score of an unquantized row, else the damage; for lengths with its interval."""
    if line is None:
        return NO_VALUE
    if not line.quantized:
        return number(line.entries[checkpoint].value, percent=line.percent)
    effect = line.effects.get(("damages", checkpoint))
    text = effect_text(effect, percent=line.percent)
    if line.metric == "length" and hasattr(effect, "low"):
        text += f" {interval_text(effect, percent=False).removeprefix('× ')}"
    return text


def _means_table(
    checkpoint: str, grouping: str, means: Mapping[str, Mapping[str, TokenMeans]]
) -> list[Table]:
    """Return the table of KL and agreement per class or position (``grouping``) and precision."""
    names = list(dict.fromkeys(name for each in means.values() for name in each))
    first = next(iter(means.values()))
    rows = [
        {
            "Precision": quantizer,
            **{
                name: f"{values.kl:.2g} ({100 * values.agrees:.0f} %)"
                if (values := each.get(name))
                else NO_VALUE
                for name in names
            },
        }
        for quantizer, each in means.items()
    ]
    counts = "; ".join(f"{name}: {first[name].tokens:,}" for name in names if name in first)
    return from_rows(
        rows,
        title=f"Answers of {checkpoint}, by {grouping}",
        notes=(
            "KL per token in nats, a mean over tokens, and the share of tokens at which both "
            "models' likeliest token is the same.",
            f"Tokens: {counts}.",
        ),
    )
