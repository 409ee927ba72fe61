"""How effects are written: points and units as differences, perplexities as ratios (×)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from qbench.comparison.lines import Line
from qbench.text import NO_VALUE, number, ratio

if TYPE_CHECKING:
    from qbench.comparison.lines import Comparison
    from qbench.statistics import Effect, SeedEffect


TIMES = "×"
RATIO_NOTE = f"{TIMES}: perplexities are compared by their ratio, computed on logarithms."


def arrow(line: Line) -> str:
    return "↑" if line.higher_is_better else "↓"


def effect_text(effect: Effect | None, *, percent: bool) -> str:
    """``+1.04‡`` points, or ``× 1.032‡``: a ratio, for a difference-in-differences of ratios."""
    if effect is None:
        return NO_VALUE
    if effect.kind == "log ratio":
        return f"{TIMES} {ratio(effect.estimate, decimals=_decimals(effect))}{effect.mark}"
    return number(effect.estimate, percent=percent, signed=True) + effect.mark


def interval_text(effect: Effect | None, *, percent: bool) -> str:
    """``[−1.98, +1.09]`` or ``× [0.996, 1.069]``."""
    if effect is None:
        return NO_VALUE
    ends = effect.interval.low, effect.interval.high
    if effect.kind == "log ratio":
        places = _decimals(effect)
        low, high = (ratio(end, decimals=places) for end in ends)
        return f"{TIMES} [{low}, {high}]"
    return f"[{', '.join(number(end, percent=percent, signed=True) for end in ends)}]"


def detectable_text(effect: Effect | None, *, percent: bool) -> str:
    """The smallest effect that as many documents show: ``1.84`` points, or ``× 1.021``."""
    if effect is None:
        return NO_VALUE
    if effect.kind == "log ratio":
        return f"{TIMES} {ratio(effect.detectable, decimals=_decimals(effect))}"
    return number(effect.detectable, percent=percent)


def _decimals(effect: Effect) -> int:
    return decimals(effect.interval.stderr)


def decimals(stderr: float) -> int:
    """Of a ratio: three, or as many as show two digits of its logarithm's standard error, up to
    six."""
    return 3 if stderr == 0 else min(6, max(3, 1 - math.floor(math.log10(stderr))))


HALF = 0.5
MOSTLY_SEEDS = "§"
SEED_NOTES = (
    "Means over trainings that differ in their seed.",
    "Brackets: 95 % intervals over documents and seeds (Banerjee 1960).",
    "‡ differs from 0 at 5 % after Holm's correction over all of its kind, † after "
    "Benjamini–Hochberg's only.",
)
SEEDS_NOTE = f"{MOSTLY_SEEDS}: most of the uncertainty comes of the seeds: it takes more trainings."


RATIOS_NOTE = f"{RATIO_NOTE} Means of perplexities are arithmetic, of their ratios geometric."
SHARE = "Seeds’ share"
SHARE_NOTE = f"{SHARE}: how much of the variance of the effect’s mean comes of the seeds."


def share_text(effect: SeedEffect | None) -> str:
    """How much of the mean's variance comes of the seeds: ``34 %``."""
    return NO_VALUE if effect is None else f"{100 * effect.of_seeds:.0f} %"


def order_note(comparison: Comparison) -> str:
    """Which training is which, in the order of the columns ``each``."""
    seeds = {
        one.checkpoint: one.training.seed
        for one in comparison.records.values()
        if one.training is not None
    }
    told = (
        ", ".join(f"{m} (seed {seeds[m]})" if m in seeds else m for m in members)
        for members in comparison.grid.replicates.values()
    )
    return f"Each, in this order: {'; '.join(told)}."


def mostly_seeds(effect: SeedEffect | None) -> bool:
    return effect is not None and effect.of_seeds > HALF


def mean_text(effect: SeedEffect | None, *, percent: bool) -> str:
    """``+1.04‡`` points or ``× 1.032‡``, with the sign of uncertainty that comes of seeds."""
    if effect is None:
        return NO_VALUE
    if effect.kind == "log ratio":
        text = f"{TIMES} {ratio(effect.estimate, decimals=decimals(effect.stderr))}"
    else:
        text = number(effect.estimate, percent=percent, signed=True)
    return text + effect.mark + (MOSTLY_SEEDS if mostly_seeds(effect) else "")


def ends_text(effect: SeedEffect | None, *, percent: bool) -> str:
    """``[−1.98, +1.09]`` or ``× [0.996, 1.069]``."""
    if effect is None:
        return NO_VALUE
    ends = effect.low, effect.high
    if effect.kind == "log ratio":
        places = decimals(effect.stderr)
        return f"{TIMES} [{', '.join(ratio(end, decimals=places) for end in ends)}]"
    return f"[{', '.join(number(end, percent=percent, signed=True) for end in ends)}]"


def each_text(effect: SeedEffect | None, *, percent: bool) -> str:
    """The effect of every training, or pair of trainings: ``+0.8, +1.4, −0.2``; none where the
    trainings are no pairs."""
    if effect is None or not effect.paired:
        return NO_VALUE
    if effect.kind == "log ratio":
        places = decimals(effect.stderr)
        return f"{TIMES} " + ", ".join(ratio(one, decimals=places) for one in effect.each)
    return ", ".join(number(one, percent=percent, signed=True) for one in effect.each)


def values_text(values: tuple[float | None, ...], *, percent: bool) -> str:
    """Every training's own score."""
    return ", ".join(
        NO_VALUE if value is None else number(value, percent=percent) for value in values
    )
