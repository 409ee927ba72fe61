"""How effects over seeds are written. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qbench.comparison.wording import TIMES
from qbench.text.numbers import NO_VALUE, number, ratio

if TYPE_CHECKING:
    from qbench.comparison.statistics import SeedEffect

HALF = 0.5
MOSTLY_SEEDS = "§"
LEGEND = (
    "Means over trainings that differ in their seed; brackets hold 95 % intervals over documents "
    "and seeds (Banerjee 1960). ‡ differs from 0 at 5 % after Holm's correction over all of its "
    "kind, † after Benjamini–Hochberg's only."
)
SEEDS_LEGEND = (
    f"{MOSTLY_SEEDS}: seeds, not documents, are the larger part of the uncertainty: more documents "
    "would not make it much smaller, more trainings would."
)


def mostly_seeds(effect: SeedEffect | None) -> bool:
    return effect is not None and effect.of_seeds > HALF


def mean_text(effect: SeedEffect | None, *, percent: bool) -> str:
    """``+1.04‡`` points or ``× 1.032‡``, with the sign of uncertainty that comes of seeds."""
    if effect is None:
        return NO_VALUE
    if effect.kind == "log ratio":
        text = f"{TIMES} {ratio(effect.estimate)}"
    else:
        text = number(effect.estimate, percent=percent, signed=True)
    return text + effect.mark + (MOSTLY_SEEDS if mostly_seeds(effect) else "")


def ends_text(effect: SeedEffect | None, *, percent: bool) -> str:
    """``[−1.98, +1.09]`` or ``× [0.996, 1.069]``."""
    if effect is None:
        return NO_VALUE
    ends = effect.low, effect.high
    if effect.kind == "log ratio":
        return f"{TIMES} [{', '.join(ratio(end) for end in ends)}]"
    return f"[{', '.join(number(end, percent=percent, signed=True) for end in ends)}]"


def each_text(effect: SeedEffect | None, *, percent: bool) -> str:
    """The effect of every training, or pair of trainings: ``+0.8, +1.4, −0.2``."""
    if effect is None:
        return NO_VALUE
    if effect.kind == "log ratio":
        return f"{TIMES} " + ", ".join(ratio(one) for one in effect.each)
    return ", ".join(number(one, percent=percent, signed=True) for one in effect.each)


def values_text(values: tuple[float | None, ...], *, percent: bool) -> str:
    """Every training's own score."""
    return ", ".join(
        NO_VALUE if value is None else number(value, percent=percent) for value in values
    )
