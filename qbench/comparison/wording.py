"""How effects are written: points and units as differences, perplexities as ratios (×)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from qbench.comparison.lines import Line
from qbench.text.numbers import NO_VALUE, number, ratio

if TYPE_CHECKING:
    from qbench.comparison.statistics import Effect

TIMES = "×"
RATIO_NOTE = (
    f"{TIMES}: of perplexities, intervals, tests, damage and differences of damage are ratios, "
    "computed on their logarithms."
)


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
