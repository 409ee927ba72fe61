"""Write effects as text: points and units as differences, perplexities as ratios (×)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qbench.comparison.rows import Row, trained
from qbench.text import NO_VALUE, metric_title, number, ratio

if TYPE_CHECKING:
    from qbench.comparison.rows import Comparison
    from qbench.records import GroupScore, Score
    from qbench.statistics import Effect, Missing

    AnEffect = Effect | Missing | None


TIMES = "×"
MOSTLY_SEEDS = "§"
NO_INTERVAL = "¶"
RATIO_NOTE = f"{TIMES}: perplexities are compared by their ratio, computed on logarithms."


def metric_text(row: Row | Score | GroupScore) -> str:
    """Return the metric with the arrow of what is better: ``Acc ↑``."""
    arrow = "↑" if row.higher_is_better else "↓"
    return NO_VALUE if row.metric == NO_VALUE else f"{metric_title(row.metric)} {arrow}"


def effect_text(effect: AnEffect, *, percent: bool) -> str:
    """Return ``+1.04‡`` points or ``× 1.032‡``; § if most of the uncertainty comes from the seeds,
    ¶ if there is no interval."""
    if effect is None or effect.estimate is None:
        return NO_VALUE if effect is None else f"{NO_VALUE} {NO_INTERVAL}"
    text = _sign(effect) + _value(effect, effect.estimate, percent=percent)
    if not hasattr(effect, "mark"):
        return f"{text} {NO_INTERVAL}"
    return text + effect.mark + (MOSTLY_SEEDS if mostly_seeds(effect) else "")


def value_text(kind: str, value: float, *, percent: bool) -> str:
    """Return ``+1.04`` points or ``× 1.032``."""
    if kind == "log ratio":
        return f"{TIMES} {ratio(value)}"
    return number(value, percent=percent, signed=True)


def nats(logarithm: float) -> str:
    """Return a KL divergence with two to three digits: ``0.29``, ``0.0041``, ``1.9``."""
    value = math.exp(logarithm)
    return f"{value:.2f}" if 0.1 <= value < 10 else f"{value:.2g}"


def interval_text(effect: AnEffect, *, percent: bool) -> str:
    """Return ``[−1.98, +1.09]`` or ``× [0.996, 1.069]``."""
    if not hasattr(effect, "interval"):
        return NO_VALUE
    ends = (effect.interval.low, effect.interval.high)
    return f"{_sign(effect)}[{', '.join(_value(effect, end, percent=percent) for end in ends)}]"


def bound_text(effect: AnEffect, *, percent: bool) -> str:
    """Return the largest loss that is not excluded at 95 % (one-sided): ``+1.09``, ``× 1.069``."""
    if not hasattr(effect, "bounds"):
        return NO_VALUE
    return _sign(effect) + _value(effect, effect.bounds[1], percent=percent)


def each_text(effect: AnEffect, *, percent: bool) -> str:
    """Return the effect of every training, or pair of trainings: ``+0.8, +1.4, −0.2``; a dash if
    the trainings are no pairs."""
    if not getattr(effect, "paired", False):
        return NO_VALUE
    return _sign(effect) + ", ".join(
        _value(effect, estimate, percent=percent) for estimate in effect.each
    )


def _sign(effect: Effect | Missing) -> str:
    """Return ``× `` before ratios, else ""."""
    return f"{TIMES} " if effect.kind == "log ratio" else ""


def _value(effect: Effect | Missing, value: float, *, percent: bool) -> str:
    """Return an effect's value; a ratio with three decimals, or with as many as show two digits
    of its logarithm's standard error, up to six."""
    if effect.kind != "log ratio":
        return number(value, percent=percent, signed=True)
    stderr = effect.interval.stderr if hasattr(effect, "interval") else 0
    return ratio(
        value, decimals=3 if stderr == 0 else min(6, max(3, 1 - math.floor(math.log10(stderr))))
    )


SEED_NOTES = (
    "Means over trainings that differ in their seed.",
    "Brackets: 95 % intervals over documents and seeds (Banerjee 1960).",
    "‡ differs from 0 at 5 % after Holm's correction over all of its kind in this folder.",
)
SEEDS_NOTE = (
    f"{MOSTLY_SEEDS}: most of the uncertainty comes from the seeds: more trainings are needed."
)


RATIOS_NOTE = f"{RATIO_NOTE} Means of perplexities are arithmetic, of their ratios geometric."
SHARE = "Seeds’ share"
SHARE_NOTE = f"{SHARE}: the part of the variance of the effect’s mean that comes from the seeds."


def share_text(effect: AnEffect) -> str:
    """Return the share of an effect's variance that comes from the seeds, such as ``40 %``; a dash
    without seeds."""
    share = getattr(effect, "of_seeds", None)
    return NO_VALUE if share is None else f"{100 * share:.0f} %"


def mostly_seeds(effect: Effect) -> bool:
    """Return whether most of the effect's variance comes from the seeds."""
    return (effect.of_seeds or 0) > 0.5


def order_note(comparison: Comparison) -> str:
    """Return the note that lists the trainings in the order of the columns ``each``."""
    trainings = trained(comparison.records.values())
    groups = (
        ", ".join(f"{m} (seed {trainings[m].seed})" if m in trainings else m for m in members)
        for members in comparison.grid.replicates.values()
    )
    return f"Each, in this order: {'; '.join(groups)}."


def values_text(line: Row, members: Sequence[str]) -> str:
    """Return the score of every training, separated by commas."""
    return ", ".join(number(line.entry(member).value, percent=line.percent) for member in members)
