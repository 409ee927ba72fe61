"""Is the new score at most ``margin`` worse? One-sided bounds, and how many documents it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import special

from qbench.comparison.statistics.effect import Effect
from qbench.comparison.statistics.power import POWER

LEVEL = 0.05  # one-sided
CONFIDENCE = 1 - 2 * LEVEL  # of the two-sided interval whose ends are one-sided bounds


@dataclass(frozen=True, kw_only=True, slots=True)
class Worsening:
    """How much worse the new score is, with one-sided 95 % bounds; negative is better."""

    estimate: float
    low: float
    high: float


def worsening(effect: Effect, *, higher_is_better: bool) -> Worsening:
    """From an effect (new − old), on the scale of its test: for perplexities, of logarithms.

    Student's t on the documents' contributions; score bounds where few answers changed.
    """
    low, high = effect.bounds
    if higher_is_better:
        return Worsening(estimate=-effect.estimate, low=-high, high=-low)
    return Worsening(estimate=effect.estimate, low=low, high=high)


def documents_needed(gap: float, stderr: float, documents: int) -> int | None:
    """Documents at which a bound tells, with 80 % power, a difference ``gap`` from the margin.

    With a gap of the whole margin: what it takes to pass a quantizer that changes nothing. The
    standard error shrinks as 1/√n. ``None`` where the gap is 0: no number is enough.
    """
    if gap <= 0:
        return None
    ratio = float(special.ndtri(1 - LEVEL) + special.ndtri(POWER)) * stderr / gap
    return max(2, math.ceil(documents * ratio**2))
