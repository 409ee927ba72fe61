"""How effects are written: points and units as differences, perplexities as ratios (×); and the
answer in one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qbench.comparison.lines import Line, redundant
from qbench.comparison.trainings import trained
from qbench.text import NO_VALUE, metric_title, number, ratio

if TYPE_CHECKING:
    from qbench.comparison.changes import Change
    from qbench.comparison.lines import Comparison
    from qbench.records import GroupScore, Score
    from qbench.statistics import Effect, SeedEffect


TIMES = "×"
MOSTLY_SEEDS = "§"
RATIO_NOTE = f"{TIMES}: perplexities are compared by their ratio, computed on logarithms."


def metric_text(one: Line | Change | Score | GroupScore) -> str:
    """The metric with the arrow of what is better: ``Acc ↑``."""
    arrow = "↑" if one.higher_is_better else "↓"
    return NO_VALUE if one.metric == NO_VALUE else f"{metric_title(one.metric)} {arrow}"


def effect_text(effect: Effect | SeedEffect | None, *, percent: bool) -> str:
    """``+1.04‡`` points, or ``× 1.032‡``: a ratio, for a difference-in-differences of ratios; with
    § where most of the uncertainty comes from the seeds."""
    if effect is None:
        return NO_VALUE
    text = _sign(effect) + _value(effect, effect.estimate, percent=percent)
    return text + effect.mark + (MOSTLY_SEEDS if mostly_seeds(effect) else "")


def interval_text(effect: Effect | SeedEffect | None, *, percent: bool) -> str:
    """``[−1.98, +1.09]`` or ``× [0.996, 1.069]``."""
    if effect is None:
        return NO_VALUE
    ends = (effect.interval.low, effect.interval.high)
    return f"{_sign(effect)}[{', '.join(_value(effect, end, percent=percent) for end in ends)}]"


def each_text(effect: SeedEffect | None, *, percent: bool) -> str:
    """The effect of every training, or pair of trainings: ``+0.8, +1.4, −0.2``; none where the
    trainings are no pairs."""
    if effect is None or not effect.paired:
        return NO_VALUE
    return _sign(effect) + ", ".join(_value(effect, one, percent=percent) for one in effect.each)


def _sign(effect: Effect | SeedEffect) -> str:
    return f"{TIMES} " if effect.kind == "log ratio" else ""


def _value(effect: Effect | SeedEffect, value: float, *, percent: bool) -> str:
    """Of a ratio three decimals, or as many as show two digits of its logarithm's standard error,
    up to six."""
    if effect.kind != "log ratio":
        return number(value, percent=percent, signed=True)
    stderr = effect.interval.stderr
    return ratio(
        value, decimals=3 if stderr == 0 else min(6, max(3, 1 - math.floor(math.log10(stderr))))
    )


SEED_NOTES = (
    "Means over trainings that differ in their seed.",
    "Brackets: 95 % intervals over documents and seeds (Banerjee 1960).",
    "‡ differs from 0 at 5 % after Holm's correction over all of its kind, † after "
    "Benjamini–Hochberg's only.",
)
SEEDS_NOTE = (
    f"{MOSTLY_SEEDS}: most of the uncertainty comes from the seeds: more trainings are needed."
)


RATIOS_NOTE = f"{RATIO_NOTE} Means of perplexities are arithmetic, of their ratios geometric."
SHARE = "Seeds’ share"
SHARE_NOTE = f"{SHARE}: the part of the variance of the effect’s mean that comes from the seeds."


def share_text(effect: SeedEffect | None) -> str:
    return NO_VALUE if effect is None else f"{100 * effect.of_seeds:.0f} %"


def mostly_seeds(effect: Effect | SeedEffect) -> bool:
    return getattr(effect, "of_seeds", 0.0) > 0.5


def order_note(comparison: Comparison) -> str:
    """Which training is which, in the order of the columns ``each``."""
    known = trained(comparison.records.values())
    told = (
        ", ".join(f"{m} (seed {known[m].seed})" if m in known else m for m in members)
        for members in comparison.grid.replicates.values()
    )
    return f"Each, in this order: {'; '.join(told)}."


def values_text(line: Line, members: Sequence[str]) -> str:
    """Every training's own score."""
    return ", ".join(number(line.entry(one).value, percent=line.percent) for one in members)


def headline(comparison: Comparison) -> str:
    """The answer in one sentence with its certainty, of the first question that has effects."""
    base, *others = comparison.groups
    for question, better, worse in (
        ("differences", "Quantization hurts {other} less than {base}", "more"),
        ("damages", "Quantization makes {other} better", "worse"),
        ("deltas", "{other} is better than {base}", "worse"),
    ):
        for other in others if question != "damages" else [*others, base]:
            effects = list(_answers(comparison, question, other))
            if not effects:
                continue
            sure = [
                effect.estimate > 0 if line.higher_is_better else effect.estimate < 0
                for line, effect in effects
                if effect.mark == "‡"
            ]
            if not sure:
                return (
                    f"None of {len(effects)} differences is significant (5 %, Holm’s correction)."
                )
            return (
                f"{better.format(other=other, base=base)} in {sum(sure)} of {len(effects)} "
                f"comparisons and {worse} in {len(sure) - sum(sure)}. The other "
                f"{len(effects) - len(sure)} differences are not significant (5 %, Holm’s "
                "correction)."
            )
    finished = sum(record.status == "ok" for record in comparison.records.values())
    failed = len(comparison.records) - finished
    line = f"{finished} of {len(comparison.grid.cells)} cells are finished"
    return f"{line}, {failed} failed." if failed else f"{line}."


def _answers(
    comparison: Comparison, question: str, group: str
) -> Iterator[tuple[Line, Effect | SeedEffect]]:
    for line in comparison.seeds or comparison.lines:
        effect = getattr(line, question).get(group)
        asked = question != "deltas" or line.quantized or not comparison.unquantized
        if effect is not None and asked and not redundant(line, comparison.lines):
            yield line, effect
