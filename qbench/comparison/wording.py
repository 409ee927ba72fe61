"""Write effects as text: points and units as differences, perplexities as ratios (×)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from qbench.text import NO_VALUE, number, ratio

if TYPE_CHECKING:
    from qbench.comparison.losses import Losses
    from qbench.statistics import Effect, Missing

    AnEffect = Effect | Missing | None


TIMES = "×"
MOSTLY_SEEDS = "§"
NO_INTERVAL = "¶"


def effect_text(effect: AnEffect, *, percent: bool) -> str:
    """Return a difference as ``+1.04‡``, in points if ``percent``, and a log ratio as ``× 1.032‡``;
    ‡ is the effect's mark. § is added if most of the uncertainty comes from the seeds, ¶ if there
    is no interval. ``—`` for None, ``— ¶`` without an estimate."""
    if effect is None or effect.estimate is None:
        return NO_VALUE if effect is None else f"{NO_VALUE} {NO_INTERVAL}"
    text = _texts(effect, effect.estimate, percent=percent)
    if not hasattr(effect, "mark"):
        return f"{text} {NO_INTERVAL}"
    return text + effect.mark + (MOSTLY_SEEDS if mostly_seeds(effect) else "")


def value_text(losses: Losses, value: float) -> str:
    """Return ``value`` as ``+1.04``, in points if ``losses.percent``, or a log ratio as ``×
    1.032``."""
    if losses.kind == "log ratio":
        return f"{TIMES} {ratio(value)}"
    return number(value, percent=losses.percent, signed=True)


def nats(logarithm: float) -> str:
    """Return exp(``logarithm``), a KL divergence, with two to three digits: ``0.29``, ``0.0041``,
    ``1.9``."""
    value = math.exp(logarithm)
    return f"{value:.2f}" if 0.1 <= value < 10 else f"{value:.2g}"


def interval_text(effect: AnEffect, *, percent: bool) -> str:
    """Return ``[−1.98, +1.09]``, in points if ``percent``, or ``× [0.996, 1.069]``; ``—`` without
    an interval."""
    if not hasattr(effect, "low"):
        return NO_VALUE
    return _texts(effect, effect.low, effect.high, percent=percent, form="[{}]")


def bound_text(effect: AnEffect, *, percent: bool) -> str:
    """Return the largest loss that is not excluded at 95 % (one-sided), in points if ``percent``:
    ``+1.09``, ``× 1.069``; ``—`` if there is none."""
    if not hasattr(effect, "bounds"):
        return NO_VALUE
    return _texts(effect, effect.bounds[1], percent=percent)


def each_text(effect: AnEffect, *, percent: bool) -> str:
    """Return the effect of every training, or pair of trainings: ``+0.8, +1.4, −0.2``, in points if
    ``percent``; ``× 1.032, 0.987`` for a log ratio; ``—`` if the trainings are no pairs."""
    if not getattr(effect, "paired", False):
        return NO_VALUE
    return _texts(effect, *effect.each, percent=percent)


def _texts(effect: Effect | Missing, *values: float, percent: bool, form: str = "{}") -> str:
    """Return values of an effect as text; ratios with three decimals, or with as many as show two
    digits of their logarithm's standard error, up to six."""
    if effect.kind != "log ratio":
        return form.format(", ".join(number(v, percent=percent, signed=True) for v in values))
    stderr = getattr(effect, "stderr", 0)
    decimals = 3 if stderr == 0 else min(6, max(3, 1 - math.floor(math.log10(stderr))))
    return f"{TIMES} " + form.format(", ".join(ratio(v, decimals=decimals) for v in values))


def mostly_seeds(effect: Effect) -> bool:
    """Return whether most of the effect's variance comes from the seeds."""
    return (effect.of_seeds or 0) > 0.5
